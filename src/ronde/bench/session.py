"""Setup of a benchmark: ranks, memory, buffers and heading."""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.bench import catalog
from ronde.bench.limits import search_limit
from ronde.bench.operations import IN_PLACE_ONLY, Buffers
from ronde.bench.options import Options
from ronde.bench.ranks import Ranks, connect_ranks
from ronde.bench.results import Heading
from ronde.bench.sweeps import Case, RowBench
from ronde.bench.timing import Clock, Expired, Watchdog, marks_of
from ronde.bench.variables import Variables
from ronde.collectives import Communicator
from ronde.errors import UsageError
from ronde.memory import AvailableMemory, available_memory
from ronde.topology.limits import KnownRates, Limit
from ronde.world import RankInfo
from ronde.world.environment import select_variables

_INTERFACE = "GLOO_SOCKET_IFNAME"


class BenchSession(NamedTuple):
    """A benchmark with connected ranks and allocated buffers."""

    options: Options  # with sizes that fit into memory
    variables: Variables
    ranks: Ranks
    benches: dict[str, RowBench]  # by engine
    notes: tuple[str, ...]  # shown above the rows

    @property
    def first(self) -> RowBench:
        return next(iter(self.benches.values()))

    def heading(self) -> Heading:
        """Gather the facts for the heading; collective."""
        limit, reason = self._limit()
        device, version = self.ranks.device, 0
        if device.type == "cuda":
            from torch.cuda import nccl

            parts: Any = nccl.version()
            version = parts[0] * 10000 + parts[1] * 100 + parts[2]
        engine = self.ranks.group.engine
        # torch's engine uses NCCL for CUDA tensors.
        if device.type == "cuda" and engine in ("auto", "gloo"):
            engine = "nccl"
        return Heading(
            options=self.options,
            engine=", ".join(self.benches) if len(self.benches) > 1 else engine,
            devices=self.ranks.devices,
            size=self.ranks.group.size,
            versions={"torch": torch.__version__},
            notes=(*self.notes, *([f"limit: none, for {reason}"] if reason else [])),
            shown_variables=self.variables.shown,
            limit=limit,
            call_overhead_us=self._call_overhead_us(),
            nccl_version=version,
            hosts=tuple(Counter(self.ranks.hosts).values()),
        )

    def _limit(self) -> tuple[Limit | None, str]:
        """Return the physical bound, or the reason why there is none; collective."""
        shown, ranks = self.options.shown, self.ranks
        if not shown.has_limit:
            return None, ""
        # Set by ronde run or by the user.
        named = select_variables([_INTERFACE]).get(_INTERFACE, "")
        given = KnownRates(shown.link_rate_gb_per_s or None, interface=named)
        name, device = self.options.test.name, ranks.device
        found = search_limit(name, ranks.group, ranks.hosts, device, given)
        return found.limit, found.reason

    def _call_overhead_us(self) -> float | None:
        """Measure the time of an operation on almost no data."""
        bench = self.first
        test, sweep, loop = self.options.test, self.options.sweep, self.options.loop
        size, num_bytes = bench.communicator.size, sweep.dtypes[0].num_bytes
        if test.spread is not catalog.Spread.WHOLE:
            num_bytes = 16 * size
        is_small = num_bytes <= bench.buffers.capacity_bytes
        if not (is_small and catalog.is_possible(test, size)):
            return None
        root = 0 if test.has_root else -1
        case = Case(test, sweep.dtypes[0], sweep.ops[0], root, num_bytes)
        try:
            elapsed = bench.time(case, is_in_place=False)
        except UsageError:
            return None
        num_calls = loop.iterations * loop.aggregated
        return max(each.total_s for each in elapsed) / num_calls * 1e6


def open_session(
    rank_info: RankInfo, options: Options, variables: Variables, on_expired: Expired
) -> BenchSession:
    """Connect the ranks and allocate their buffers; collective.

    Raises:
        UsageError: An option cannot be satisfied.
        CollectiveError: A rank is missing.
    """
    ranks = connect_ranks(rank_info, options, variables)
    size, device = ranks.group.size, ranks.device
    if options.test.has_root and options.sweep.root >= size:
        raise UsageError(
            f"-r must be a rank in 0..{size - 1}, -1 or all, got {options.sweep.root}."
        )
    options, cut = _fit(options, ranks)
    watchdog = Watchdog(options.loop.timeout_s, on_expired)
    clock = _clock(ranks)
    benches: dict[str, RowBench] = {}
    loop, num_bytes = options.loop, options.sweep.max_bytes
    for name, communicator in ranks.engines.items():

        def allocate(num_bytes: int, own: Communicator = communicator) -> Tensor:
            if options.engines.is_foreign:
                return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            return own.allocate(num_bytes, torch.uint8, device)

        buffers = Buffers(allocate, num_bytes, loop.unaligned_by)
        benches[name] = RowBench(ranks, communicator, buffers, clock, loop, watchdog)
    notes = (*_notes(options, size, device), *cut)
    return BenchSession(options, variables, ranks, benches, notes)


def _clock(ranks: Ranks) -> Clock:
    def barrier() -> None:
        ranks.control.barrier().wait()

    device = ranks.device
    if device.type != "cuda":
        # Operations on CPU tensors are complete when the call returns.
        return Clock(lambda: None, barrier)
    return Clock(lambda: torch.cuda.synchronize(device), barrier, marks_of(device))


def _fit(options: Options, ranks: Ranks) -> tuple[Options, tuple[str, ...]]:
    """Limit the sweep to sizes that fit into every rank's memory; collective."""
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        memory = AvailableMemory(free, "the GPU's memory", "")
        num_sharing = ranks.num_sharing if options.is_gpu_shared else 1
    else:
        memory, num_sharing = available_memory(), ranks.num_sharing
    num_sharing *= len(options.engines.names)
    is_checked = options.loop.checks > 0
    own = catalog.largest_row(memory.num_bytes, num_sharing, is_checked=is_checked)
    largest = int(min(each[0] for each in ranks.exchange([own])))
    sweep = options.sweep
    catalog.require_room(sweep.min_bytes, largest, memory)
    if sweep.max_bytes <= largest:
        return options, ()
    cut = replace(options, sweep=replace(sweep, max_bytes=largest))
    return cut, (f"Reducing maxBytes to {largest} due to memory limitation",)


def _notes(options: Options, size: int, device: torch.device) -> tuple[str, ...]:
    test, loop = options.test, options.loop
    notes = [f"ignored: {words}" for words in options.ignored]
    if device.type != "cuda":
        notes += [f"ignored: {words}" for words in options.needing_cuda]
    elif options.cta_policy and not options.parent:
        notes.append("ignored: -x, for NCCL reads NCCL_CTA_POLICY as it was at start")
    if test.emulation:
        notes.append(f"emulated: {test.name} is {test.emulation}")
    if test.name in IN_PLACE_ONLY and size > 1:
        notes.append("out-of-place is a copy, then the operation in place")
    if not test.is_in_place_checked:
        notes.append("in-place is not verified")
    if loop.aggregated > 1:
        notes.append("agg iters: operations are not grouped but follow one another")
    if loop.blocking == 0 and device.type == "cpu":
        notes.append("each operation is waited for: -z 0 is -z 2 on CPU tensors")
    if options.engines.is_foreign:
        notes.append("foreign: tensors are not in the engine's own memory")
    if size == 1:
        notes.append("one rank has no bus: its bandwidth is 0. Start more with -g")
    return tuple(notes)
