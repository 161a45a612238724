"""From options to rows: everything before the first and after the last."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ronde.bench.capacity import FreeMemory, free_host_memory, largest_row, require_room
from ronde.bench.catalog import Spread, is_possible
from ronde.bench.limits import Wires, search_limit
from ronde.bench.measured import Heading, Reason
from ronde.bench.operations import IN_PLACE_ONLY, Buffers, allocator
from ronde.bench.options import Options
from ronde.bench.ranks import Ranks, meet_ranks
from ronde.bench.sweeps import Case, Event, RowBench, SweepBench
from ronde.bench.timing import Clock, CudaEvent, Expired, Watchdog
from ronde.bench.variables import Variables
from ronde.collectives import Communicator
from ronde.errors import UsageError
from ronde.topology.limits.bounds import Limit
from ronde.world import RankInfo
from ronde.world.environment import select_variables

_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class BenchSession:
    """A benchmark that is ready to run."""

    options: Options  # what was asked for, sizes cut to what fits
    variables: Variables  # what the environment asks for
    ranks: Ranks
    benches: dict[str, RowBench]  # measures rows, by engine
    watchdog: Watchdog  # notices what does not end
    notes: tuple[str, ...]  # what is to be said of how it is measured

    def heading(self) -> Heading:
        """Return what is known before the first row; collective."""
        limit, reason = self._limit()
        return Heading(
            options=self.options,
            engine=self._engine,
            devices=self.ranks.devices,
            size=self.ranks.group.size,
            versions={"torch": torch.__version__},
            notes=(*self.notes, *([f"limit: none, for {reason}"] if reason else [])),
            shown_variables=self.variables.shown,
            limit=limit,
            call_overhead_us=self._call_overhead_us(),
            nccl_version=_nccl_version(self.ranks.device),
        )

    def sweep(self, is_stopped: Callable[[], bool]) -> Generator[Event, None, Reason]:
        """Yield the rows of the first engine; see ``SweepBench.run``."""
        bench = next(iter(self.benches.values()))
        is_shown = self.variables.is_traffic_shown
        return SweepBench(bench, self.options, is_stopped, is_shown).run()

    def close(self) -> None:
        self.watchdog.close()
        self.ranks.close()

    @property
    def _engine(self) -> str:
        """What moves the bytes: torch's engine takes NCCL for CUDA tensors."""
        if len(self.benches) > 1:
            return ", ".join(self.benches)
        name = self.ranks.group.engine
        is_cuda = self.ranks.device.type == "cuda"
        return "nccl" if is_cuda and name in ("auto", "gloo") else name

    def _limit(self) -> tuple[Limit | None, str]:
        """Find the physical bound, or say why there is none; collective."""
        shown, ranks = self.options.shown, self.ranks
        if not shown.has_limit:
            return None, ""
        # ronde run names the interface so, if not the user.
        named = select_variables([_INTERFACE]).get(_INTERFACE, "")
        wires = Wires(named, shown.link_rate_gb_per_s or None)
        found = search_limit(
            self.options.test.name, ranks.group, ranks.hosts, ranks.device, wires
        )
        return found.limit, found.reason

    def _call_overhead_us(self) -> float | None:
        bench = next(iter(self.benches.values()))
        test, sweep = self.options.test, self.options.sweep
        dtype = sweep.dtypes[0]
        num_bytes = dtype.num_bytes
        if test.spread is not Spread.WHOLE:
            num_bytes = 16 * bench.communicator.size
        is_small = num_bytes <= bench.buffers.capacity_bytes
        has_call = is_possible(test, bench.communicator.size)
        if bench.traffic.given or not (is_small and has_call):
            return None
        root = 0 if test.has_root else -1
        case = Case(test, dtype, sweep.ops[0], root, num_bytes)
        try:
            elapsed = bench.time(case, is_in_place=False)
        except UsageError:
            return None
        num_calls = self.options.loop.iterations * self.options.loop.aggregated
        return max(each.total_s for each in elapsed) / num_calls * 1e6


def open_session(
    claim: RankInfo, options: Options, variables: Variables, on_expired: Expired
) -> BenchSession:
    """Connect, find room, allocate; collective."""
    ranks = meet_ranks(claim, options, variables)
    _require_root(options, ranks.group.size)
    options, cut = _fit(options, ranks)
    _require_traffic(options, variables, ranks.group.size)
    watchdog = Watchdog(options.loop.timeout_s, on_expired)
    clock = _clock(ranks)
    benches: dict[str, RowBench] = {}
    for name, communicator in ranks.engines.items():
        allocate = allocator(
            communicator, ranks.device, is_foreign=options.engines.is_foreign
        )
        benches[name] = RowBench(
            ranks=ranks,
            communicator=communicator,
            buffers=Buffers(
                allocate, options.sweep.max_bytes, options.loop.unaligned_by
            ),
            clock=clock,
            loop=options.loop,
            traffic=variables.traffic,
            watchdog=watchdog,
        )
    notes = (*_notes(options, ranks.group, ranks.device), *cut)
    return BenchSession(options, variables, ranks, benches, watchdog, notes)


def _nccl_version(device: torch.device) -> int:
    """Return NCCL's version as it counts itself since 2.9; 0 where it takes no part."""
    if device.type != "cuda":
        return 0
    from torch.cuda import nccl

    version: Any = nccl.version()
    major, minor, patch = version[:3]
    return major * 10000 + minor * 100 + patch


def _clock(ranks: Ranks) -> Clock:
    def barrier() -> None:
        ranks.control.barrier().wait()

    device = ranks.device
    if device.type != "cuda":
        return Clock(_nothing, barrier)
    return Clock(lambda: torch.cuda.synchronize(device), barrier, CudaEvent)


def _nothing() -> None:
    """Have nothing to wait for: CPU tensors are done when the call returns."""


def _require_root(options: Options, size: int) -> None:
    if options.test.has_root and options.sweep.root >= size:
        raise UsageError(
            f"-r must be a rank in 0..{size - 1}, or -1 or all for each, got "
            f"{options.sweep.root}."
        )


def _fit(options: Options, ranks: Ranks) -> tuple[Options, tuple[str, ...]]:
    """Cut the sweep to what fits the memory of the scarcest rank; collective."""
    memory, num_sharing = _free_memory(options, ranks)
    num_engines = len(options.engines.names)
    largest = largest_row(
        memory.free_bytes, num_sharing * num_engines, is_checked=options.loop.checks > 0
    )
    largest = int(min(each[0] for each in ranks.exchange([largest])))
    sweep = options.sweep
    require_room(sweep.min_bytes, largest, memory)
    if sweep.max_bytes <= largest:
        return options, ()
    cut = replace(options, sweep=replace(sweep, max_bytes=largest))
    return cut, (f"Reducing maxBytes to {largest} due to memory limitation",)


def _free_memory(options: Options, ranks: Ranks) -> tuple[FreeMemory, int]:
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        num_sharing = ranks.num_sharing if options.is_gpu_shared else 1
        return FreeMemory(free, "the GPU's memory"), num_sharing
    return free_host_memory(), ranks.num_sharing


def _require_traffic(options: Options, variables: Variables, size: int) -> None:
    given = variables.traffic.given
    if options.test.spread is not Spread.MATRIX or not given:
        return
    sweep = options.sweep
    if len(given) < size:
        raise UsageError(
            f"the traffic matrix must have a row for each of {size} ranks, got "
            f"{len(given)}. Add rows and columns to the file."
        )
    matrix = variables.traffic.matrix(0, size)
    largest = max(sum(line) for line in (*matrix, *zip(*matrix, strict=True)))
    if sweep.min_bytes != sweep.max_bytes or sweep.max_bytes < largest:
        raise UsageError(
            "-b and -e must be one size of at least the largest sum of the traffic "
            f"matrix, {largest}, got {sweep.min_bytes} and {sweep.max_bytes}. "
            f"Give -b {largest} -e {largest}."
        )


def _notes(
    options: Options, communicator: Communicator, device: torch.device
) -> tuple[str, ...]:
    test, loop = options.test, options.loop
    notes = [f"ignored: {words}" for words in options.ignored]
    if device.type != "cuda":
        notes += [f"ignored: {words}" for words in options.needing_cuda]
    elif options.cta_policy and not options.parent:
        notes.append("ignored: -x, for NCCL reads NCCL_CTA_POLICY as it was at start")
    if test.emulation:
        notes.append(f"emulated: {test.name} is {test.emulation}")
    if test.name in IN_PLACE_ONLY and communicator.size > 1:
        notes.append("out-of-place is a copy, then the operation in place")
    if not test.is_in_place_checked:
        notes.append("in-place is not verified")
    if loop.aggregated > 1:
        notes.append("agg iters: operations are not grouped but follow one another")
    if loop.blocking == 0 and device.type == "cpu":
        notes.append("each operation is waited for: -z 0 is -z 2 on CPU tensors")
    if options.engines.is_foreign:
        notes.append("foreign: tensors are not in the engine's own memory")
    if communicator.size == 1:
        notes.append("one rank has no bus: its bandwidth is 0. Start more with -g")
    return tuple(notes)
