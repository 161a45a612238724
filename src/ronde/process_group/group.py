"""The process group: torch's calls, each by calls of a communicator."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd import profiler
from torch.distributed import PrefixStore, Store

from ronde.collectives import Communicator, ReduceOp, Work
from ronde.collectives.store import clone_of
from ronde.errors import CollectiveError, UsageError
from ronde.memory import available_memory
from ronde.process_group.arena import Arena
from ronde.process_group.monitored_barrier import MonitoredBarrier
from ronde.process_group.tensor_lists import (
    as_real,
    flattened,
    joined,
    only,
    place_of,
    put,
    put_apart,
    received,
    require_count,
    require_dtype,
    require_length,
    require_ratio,
    require_rows,
)
from ronde.process_group.works import (
    BackendError,
    Drain,
    GroupWork,
    as_backend_error,
)

_PROBE_EVERY_S = 0.0005
_ARENA_PART = 4  # of what is available
_ARENA_BITS = 20  # whole MiB
Options = Any  # those of torch's calls have no common type
Works = Sequence[Work[Any]]
_ProcessGroup: Any = dist.ProcessGroup  # its stub has other names for parameters
_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVERAGE,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
    "PREMUL_SUM": ReduceOp.SUM,
}
_BITWISE = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class RondeProcessGroup(_ProcessGroup):
    """All of torch's collectives and messages; C++ and Python call it."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self, communicator: Communicator, store: Store, timeout: timedelta
    ) -> None:
        """Take over a communicator; the group's store is for a monitored barrier."""
        super().__init__(communicator.rank, communicator.size)
        self._communicator, self._store = communicator, store
        self._rank, self._size = communicator.rank, communicator.size
        self._name = self._desc = ""  # torch gives them afterwards
        self._timeout_s = timeout.total_seconds()
        self._process = os.getpid()
        self._drain = Drain()
        self._coalesced: list[GroupWork] | None = None
        self._sequence = self._num_monitored = 0
        self._arena: Arena | None = None

    # What it is called

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "ronde"

    name = getBackendName

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, _device: torch.device) -> "RondeProcessGroup":
        return self

    def _get_backend_name(self) -> str:
        return "ronde"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # Memory

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" and self._communicator.has_shared_memory

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a vector in memory that all ranks map; collective the first time.

        Where that is full, in memory of this rank's own.
        """
        if self._arena is None:
            own = available_memory().num_bytes // (_ARENA_PART * self._size)
            least = torch.tensor([own >> _ARENA_BITS << _ARENA_BITS], device="cpu")
            num_bytes = int(self._communicator.all_reduce(least, ReduceOp.MIN).wait())
            whole = self._communicator.allocate(
                num_bytes, torch.uint8, is_populated=False
            )
            self._arena = Arena(whole)
        found = self._arena.take(numel, dtype)
        if found is None:
            found = torch.empty(numel, dtype=dtype, device=device)
        return found

    # Reductions

    def allreduce(self, tensors: Sequence[Tensor], opts: Options = None) -> GroupWork:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        op, factor, bitwise = _read_op(opts)
        if only(tensors, "tensors").is_sparse:
            return self._reduce_sparse(tensors[0], op, opts)
        if bitwise is not None:
            return self._reduce_bits(tensors[0], bitwise, opts)

        def start() -> Works:
            data = as_real(tensors[0], op)
            return [self._communicator.all_reduce(data, op, prescale=factor)]

        return self._start("all_reduce", start, lambda _: list(tensors), opts)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        op, factor, _ = _read_op(opts)
        joint: list[Tensor] = []

        def start() -> Works:
            require_dtype(tensors, tensors[0], "tensors")
            joint.append(joined([as_real(tensor, op) for tensor in tensors]))
            return [self._communicator.all_reduce(joint[0], op, prescale=factor)]

        def finish(_: list[Any]) -> list[Tensor]:
            put_apart(joint[0], [as_real(tensor, op) for tensor in tensors])
            return list(tensors)

        return self._start("all_reduce", start, finish, opts)

    def _reduce_bits(
        self, tensor: Tensor, combine: Callable[..., Tensor], opts: Options
    ) -> GroupWork:
        def start() -> Works:
            return [self._communicator.all_gather(tensor.detach()[None])]

        def finish(results: list[Any]) -> list[Tensor]:
            first, *others = results[0]
            for other in others:
                combine(first, other, out=first)
            tensor.detach().copy_(first)
            return [tensor]

        return self._start("all_reduce", start, finish, opts)

    def _reduce_sparse(self, tensor: Tensor, op: ReduceOp, opts: Options) -> GroupWork:
        if op is not ReduceOp.SUM:
            raise UsageError(f"op must be SUM for sparse tensors, got {op}.")

        def start() -> Works:
            own = tensor.detach().coalesce()
            gather = self._communicator.all_gather
            return [gather(own.indices().t().contiguous()), gather(own.values())]

        def finish(results: list[Any]) -> list[Tensor]:
            places, values = results
            total = torch.sparse_coo_tensor(
                places.t(), values, tensor.shape, device=tensor.device
            )
            tensor.copy_(total.coalesce())
            return [tensor]

        return self._start("all_reduce", start, finish, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Options = None) -> GroupWork:
        op, factor, bitwise = _read_op(opts)
        tensor, root = only(tensors, "tensors"), opts.rootRank
        if bitwise is not None:
            taken = tensor if self._rank == root else tensor.detach().clone()
            return self._reduce_bits(taken, bitwise, opts)

        def start() -> Works:
            data = flattened(as_real(tensor, op))
            splits = [data.numel() if r == root else 0 for r in range(self._size)]
            scatter = self._communicator.reduce_scatter
            return [scatter(data, op, prescale=factor, splits=splits)]

        def finish(results: list[Any]) -> list[Tensor]:
            if self._rank == root:
                put_apart(results[0], [as_real(tensor, op)])
            return [tensor]

        return self._start("reduce", start, finish, opts)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options = None,
    ) -> GroupWork:
        op, factor, _ = _read_op(opts)

        def start() -> Works:
            works: list[Work[Any]] = []
            for sent in inputs:
                require_count(sent, self._size, "input_list")
                require_dtype(sent, outputs[0], "input_list")
                splits = [each.numel() for each in sent]
                data = joined([as_real(each, op) for each in sent])
                splits = [n * data.numel() // (sum(splits) or 1) for n in splits]
                scatter = self._communicator.reduce_scatter
                works.append(scatter(data, op, prescale=factor, splits=splits))
            return works

        def finish(results: list[Any]) -> list[Tensor]:
            for result, output in zip(results, outputs, strict=True):
                put_apart(result, [as_real(output, op)])
            return list(outputs)

        return self._start("reduce_scatter", start, finish, opts)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Options = None
    ) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        op, factor, _ = _read_op(opts)

        def start() -> Works:
            works: list[Work[Any]] = []
            for output, tensor in zip(outputs, inputs, strict=True):
                require_dtype([output], tensor, "output")
                require_ratio(tensor, output, self._size, "input", "output")
                data = flattened(as_real(tensor, op))
                out = place_of(as_real(output, op))
                scatter = self._communicator.reduce_scatter
                works.append(scatter(data, op, prescale=factor, out=out))
            return works

        def finish(results: list[Any]) -> list[Tensor]:
            for result, output in zip(results, outputs, strict=True):
                put(result, as_real(output, op))
            return list(outputs)

        return self._start("reduce_scatter", start, finish, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What copies

    def broadcast(self, tensors: Sequence[Tensor], opts: Options = None) -> GroupWork:
        tensor = only(tensors, "tensors")

        def start() -> Works:
            return [self._communicator.broadcast(tensor.detach(), opts.rootRank)]

        return self._start("broadcast", start, lambda _: [tensor], opts)

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> GroupWork:
        def start() -> Works:
            for places, tensor in zip(outputs, inputs, strict=True):
                require_count(places, self._size, "tensor_list")
                require_dtype(places, tensor, "tensor_list")
            gather = self._communicator.all_gather
            return [gather(flattened(tensor)) for tensor in inputs]

        def finish(results: list[Any]) -> list[Tensor]:
            for result, places in zip(results, outputs, strict=True):
                require_length(result, places)
                put_apart(result, places)
            return [place for places in outputs for place in places]

        return self._start("all_gather", start, finish, opts)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> GroupWork:
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Options = None
    ) -> GroupWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        def start() -> Works:
            works: list[Work[Any]] = []
            for output, tensor in zip(outputs, inputs, strict=True):
                require_dtype([output], tensor, "output")
                require_ratio(output, tensor, self._size, "output", "input")
                out = place_of(output)
                gather = self._communicator.all_gather
                works.append(gather(flattened(tensor), out=out))
            return works

        def finish(results: list[Any]) -> list[Tensor]:
            for result, output in zip(results, outputs, strict=True):
                put(result, output)
            return list(outputs)

        return self._start("all_gather", start, finish, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> GroupWork:
        tensor, root = only(inputs, "tensor"), opts.rootRank
        places = list(outputs[0]) if self._rank == root else []

        def start() -> Works:
            if self._rank == root:
                require_count(places, self._size, "gather_list")
                require_dtype(places, tensor, "gather_list")
            data = flattened(tensor)
            splits = [data.numel() if r == root else 0 for r in range(self._size)]
            return [self._communicator.all_to_all(data, splits)]

        return self._start("gather", start, lambda r: received(r, places), opts)

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options = None,
    ) -> GroupWork:
        output, is_root = only(outputs, "tensor"), self._rank == opts.rootRank

        def start() -> Works:
            data, splits = flattened(output)[:0], [0] * self._size
            if is_root:
                require_count(inputs[0], self._size, "scatter_list")
                require_dtype(inputs[0], output, "scatter_list")
                data = joined(inputs[0])
                splits = [each.numel() for each in inputs[0]]
            return [self._communicator.all_to_all(data, splits)]

        return self._start("scatter", start, lambda r: received(r, [output]), opts)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> GroupWork:
        def start() -> Works:
            for tensors, name in ((outputs, "output_list"), (inputs, "input_list")):
                require_count(tensors, self._size, name)
                require_dtype(tensors, inputs[0], name)
            splits = [each.numel() for each in inputs]
            return [self._communicator.all_to_all(joined(inputs), splits)]

        places = list(outputs)
        return self._start("all_to_all", start, lambda r: received(r, places), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options = None,
    ) -> GroupWork:
        def start() -> Works:
            require_dtype([output], tensor, "output")
            require_rows(output, output_splits, self._size, "output")
            splits = require_rows(tensor, input_splits, self._size, "input")
            row = tensor.shape[1:].numel()
            numels = [count * row for count in splits]
            return [self._communicator.all_to_all(flattened(tensor), numels)]

        return self._start("all_to_all", start, lambda r: received(r, [output]), opts)

    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> GroupWork:
        tensor = only(tensors, "tensors").detach()
        return self._start(
            "send",
            lambda: [self._communicator.send(tensor, to, tag)],
            lambda _: list(tensors),
        )

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> GroupWork:
        tensor = only(tensors, "tensors").detach()
        work = self._start(
            "recv",
            lambda: [self._communicator.recv(tensor, source, tag)],
            lambda _: list(tensors),
        )
        work.source = source
        return work

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> GroupWork:
        """Receive from whoever sends; nothing is received before ``wait()``."""
        self._require_own_process()
        tensor = only(tensors, "tensors").detach()

        def finish() -> list[Tensor]:
            until_s = time.monotonic() + self._timeout_s
            while (source := self._communicator.find_sender(tensor, tag)) is None:
                if time.monotonic() > until_s:
                    raise CollectiveError(
                        "recv must complete within its timeout of "
                        f"{self._timeout_s:g} s, but no rank has sent anything."
                    )
                time.sleep(_PROBE_EVERY_S)
            self._communicator.recv(tensor, source, tag).wait()
            work.source = source
            return list(tensors)

        work = GroupWork(self._drain, None, finish, self._timeout_s, self.abort)
        return work

    # All together

    def barrier(self, opts: Options = None) -> GroupWork:
        def start() -> Works:
            return [self._communicator.barrier()]

        return self._start("barrier", start, lambda _: [], opts)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002  torch's
    ) -> None:
        """Wait for all; rank 0 says who does not come, all or the first of them.

        The words are those of Gloo. The group goes on afterwards.
        """
        self._num_monitored += 1
        limit = timeout or timedelta(seconds=self._timeout_s)
        store = PrefixStore(f"monitored{self._num_monitored}", clone_of(self._store))
        MonitoredBarrier(store, self._rank, self._size, limit).run(
            is_complete=wait_all_ranks
        )

    def _start_coalescing(self, _device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None

        def finish() -> list[Tensor]:
            return [tensor for work in works for tensor in work.result()]

        own = [each for work in works for each in work.works or ()]
        return GroupWork(self._drain, own, finish, self._timeout_s, self.abort)

    def _start(
        self,
        name: str,
        start: Callable[[], Works],
        finish: Callable[[list[Any]], list[Tensor]],
        opts: Options = None,
    ) -> GroupWork:
        """Start a call; ``finish`` gets the results of its works."""
        self._require_own_process()
        self._sequence += 1
        limit_s = opts.timeout.total_seconds() if opts is not None else -1.0
        try:
            with torch.no_grad(), profiler.record_function(f"ronde:{name}"):
                works = start()
        except CollectiveError as error:
            raise as_backend_error(error) from error

        def end() -> list[Tensor]:
            with torch.no_grad():
                return finish([work.wait() for work in works])

        limit_s = limit_s if limit_s > 0 else self._timeout_s
        work = GroupWork(self._drain, works, end, limit_s, self.abort)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise BackendError(
                f"a group must be used in the process that made it, {self._process}, "
                f"got {os.getpid()}, a fork of it. Call init_process_group after the "
                "fork."
            )

    def abort(self) -> None:
        self._require_own_process()
        self._communicator.abort()

    def shutdown(self) -> None:
        if os.getpid() == self._process:
            self._communicator.close()


def _read_op(opts: Options) -> tuple[ReduceOp, float, Callable[..., Tensor] | None]:
    """Return the reduction, what multiplies inputs, and what combines bits instead."""
    if opts is None:
        return ReduceOp.SUM, 1.0, None
    asked = opts.reduceOp
    name: str = getattr(asked, "op", asked).name
    if name in _BITWISE:
        return ReduceOp.SUM, 1.0, _BITWISE[name]
    if name not in _OPS:
        known = ", ".join((*_OPS, *_BITWISE))
        raise UsageError(f"op must be one of {known}, got {name}.")
    factor = float(asked.factor) if name == "PREMUL_SUM" else 1.0
    return _OPS[name], factor, None
