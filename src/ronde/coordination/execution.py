"""Execution of negotiated operations on a communicator, with tensor fusion.

Every rank computes the same plan of tensors to fuse. The fusion threshold can be tuned
by measuring the program's steps.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.collectives import Communicator
from ronde.collectives.adasum import adasum_all_reduce
from ronde.collectives.torch_modes import writing_to
from ronde.coordination.node import RunCommand
from ronde.coordination.requests import Entry, OpKind, Request, StreamMark
from ronde.errors import UsageError
from ronde.timeline.events import Activity, Recorded, Recorder
from ronde.tuning import Tuner, TuningOptions

_MAX_ITEMS = 4096  # tensors in cached plans, 1 KiB each; equal on all ranks
_ALONE_BYTES = 1 << 20
"""Size from which copying a tensor costs more than a separate collective."""
_COPIED_BYTES = 8 << 20
"""The fusion limit of broadcasts, whose buffer is rarely used again."""
_Entries = Sequence[Entry | None]
"""The entry of each request on this rank; None if it has joined."""
_NAMES = {kind: kind.name for kind in OpKind}
_MIB = 1 << 20
_SIZES = (64 * _MIB, 16 * _MIB, 4 * _MIB, 256 * _MIB, 1 * _MIB, 32 * _MIB, 8 * _MIB, 0)
"""Thresholds to try, the most likely first; 0 fuses nothing."""
_MOST_NAMES = 1000
"""Limit of names in a step; with unique names a step would never end."""


@dataclass(frozen=True, slots=True)
class CoordinationOptions:
    """Options of a coordinator, equal on all ranks."""

    fusion_threshold_bytes: int = 128 << 20  # 0 fuses nothing
    tuning: TuningOptions | None = None  # of the threshold
    gather_time_s: float = 0.001  # Horovod's cycle time, while no thread waits
    cache_capacity: int = 1024  # requests; 0 for none
    is_group_alone: bool = False  # do not fuse a group with other tensors
    stall_warning_s: float = 60.0  # age of an operation; 0 for never
    stall_shutdown_s: float = 0.0  # end the job at this age; 0 for never


class _Item(NamedTuple):
    """A tensor, by the index of its request in the run and its index in the request."""

    request: int
    tensor: int
    numel: int


_Owned = Sequence[tuple[_Item, Entry | None]]


@dataclass(slots=True)
class _Batch:
    request: Request
    items: list[_Item]
    num_bytes: int = 0
    flat: Tensor | None = None  # the fusion buffer if there are several tensors
    views: list[Tensor] = field(default_factory=list[Tensor])  # the tensors in ``flat``


class Execution:
    """Runs the operations of a process set, fused up to ``threshold_bytes``."""

    def __init__(
        self, communicator: Communicator, set_id: int, options: CoordinationOptions
    ) -> None:
        self.recorder: Recorder | None = None
        self.threshold_bytes = options.fusion_threshold_bytes
        self._communicator = communicator
        self._engine = communicator.engine.upper()
        self._set_id = set_id
        self._is_group_alone = options.is_group_alone
        # Fusion buffers by kind, dtype and device; they only grow.
        self._buffers: dict[tuple[OpKind, torch.dtype, str], Tensor] = {}
        self._plans: dict[tuple[int, ...] | None, list[_Batch]] = {}
        self._num_items = 0
        self._activities: list[Activity] = []
        self._sequence = 0
        self._last: StreamMark | None = None

    def run(self, run: RunCommand, entries: _Entries) -> None:
        if not any(request.device == "cuda" for request in run.requests):
            self._run(run, entries)
            return
        marks = [e.ready for e in entries if e is not None and e.ready is not None]
        if self._last is not None:
            # The previous run used the same buffers, perhaps on another stream.
            marks.append(self._last)
        with torch.cuda.device(marks[0].device if marks else None):
            for mark in marks:
                mark.order()
            self._run(run, entries)
            device = torch.cuda.current_device()
            self._last = StreamMark(torch.device("cuda", device))

    def _run(self, run: RunCommand, entries: _Entries) -> None:
        agreed_ns = time.monotonic_ns()
        results: list[list[Any]] = [[] for _ in entries]
        for batch in self._plan(run):
            begun_ns = time.monotonic_ns()
            owned = [(item, entries[item.request]) for item in batch.items]
            try:
                with writing_to(_own_tensors(owned)):
                    if batch.flat is not None:
                        self._run_packed(batch, batch.flat, owned)
                    else:
                        item, entry = owned[0]
                        result = self._run_one(run.requests[item.request], item, entry)
                        results[item.request].append(result)
            except UsageError as error:  # raised by the engine on all ranks
                for _, entry in owned:
                    if entry is not None:
                        entry.fail(error.with_traceback(None))
            if self.recorder is not None:
                times_ns = agreed_ns, begun_ns, time.monotonic_ns()
                self._record(self.recorder, run.requests, owned, times_ns)
            self._activities.clear()
        for entry, request, made in zip(entries, run.requests, results, strict=True):
            if entry is not None and not entry.is_over:
                is_barrier = request.kind is OpKind.BARRIER
                result = entry.operation.outputs or tuple(made)
                entry.succeed(None if is_barrier else result)
        self._sequence += len(entries)

    def _plan(self, run: RunCommand) -> list[_Batch]:
        key = None if run.key is None else (*run.key, self.threshold_bytes)
        if key in self._plans:
            return self._plans[key]
        plan = _plan_batches(
            run.requests, self.threshold_bytes, is_group_alone=self._is_group_alone
        )
        for batch in plan:
            if len(batch.items) > 1:
                self._pack(batch, run.requests)
        if key is not None:
            num_items = sum(len(batch.items) for batch in plan)
            if self._num_items + num_items > _MAX_ITEMS:
                self._plans.clear()
                self._num_items = 0
            self._plans[key] = plan
            self._num_items += num_items
        return plan

    def _pack(self, batch: _Batch, requests: Sequence[Request]) -> None:
        request = batch.request
        dtype = request.torch_dtypes[batch.items[0].tensor]
        key = request.kind, dtype, request.device
        numel = sum(item.numel for item in batch.items)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            room = 1 << max(numel - 1, 1).bit_length()
            where = torch.device(request.device)
            if where.type == "cuda":
                where = torch.device("cuda", torch.cuda.current_device())
            if request.kind is OpKind.ALLREDUCE:  # reduced in place
                buffer = self._communicator.allocate(room, dtype, where)
            else:  # rarely repeated, so allocating a buffer would not pay
                buffer = torch.empty(room, dtype=dtype, device=where)
            self._buffers[key] = buffer
        batch.flat = buffer[:numel]
        start = 0
        for item in batch.items:
            shape = requests[item.request].shapes[item.tensor]
            batch.views.append(buffer[start : start + item.numel].view(shape))
            start += item.numel

    def _run_packed(self, batch: _Batch, flat: Tensor, owned: _Owned) -> None:
        request = batch.request
        sources: list[Tensor] = []
        outputs: list[Tensor] = []
        views: list[Tensor] = []
        for (item, entry), view in zip(owned, batch.views, strict=True):
            if entry is None:
                view.zero_()
                continue
            sources.append(entry.operation.tensors[item.tensor])
            outputs.append(entry.operation.outputs[item.tensor])
            views.append(view)
        is_root = request.root == self._communicator.rank
        if is_root or request.kind is not OpKind.BROADCAST:
            self._timed("MEMCPY_IN_FUSION_BUFFER", _copy_all, views, sources)
        name = f"{self._engine}_{_NAMES[request.kind]}"
        self._timed(name, self._call, request, flat, flat, None)
        results = sources if is_root else views
        self._timed("MEMCPY_OUT_FUSION_BUFFER", _copy_all, outputs, results)

    def _run_one(self, request: Request, item: _Item, entry: Entry | None) -> Any:  # noqa: ANN401 - each operation's own
        if request.kind is OpKind.BARRIER:
            return None  # complete, since all ranks have submitted it
        if entry is None:
            source = output = request.zeros(item.tensor)
            splits = None
        else:
            operation = entry.operation
            source, splits = operation.tensors[item.tensor], operation.splits
            output = operation.outputs[item.tensor] if operation.outputs else source
        name = f"{self._engine}_{_NAMES[request.kind]}"
        return self._timed(name, self._call, request, output, source, splits)

    def _call(
        self,
        request: Request,
        tensor: Tensor,
        source: Tensor,
        splits: Sequence[int] | None,
    ) -> Any:  # noqa: ANN401 - each operation's own
        """Run one operation on ``source``; in-place operations run on ``tensor``."""
        communicator = self._communicator
        before, after = request.prescale, request.postscale
        is_apart = tensor is not source
        if is_apart and request.kind is not OpKind.ALLREDUCE:
            tensor.copy_(source)
        match request.kind:
            case OpKind.ALLREDUCE:
                work = communicator.all_reduce(
                    tensor,
                    request.reduce_op,
                    prescale=before,
                    postscale=after,
                    source=source if is_apart else None,
                )
            case OpKind.REDUCESCATTER:
                work = communicator.reduce_scatter(
                    tensor, request.reduce_op, prescale=before, postscale=after
                )
            case OpKind.ADASUM:
                if before != 1.0:
                    tensor.mul_(before)
                adasum_all_reduce(communicator, tensor)
                return tensor if after == 1.0 else tensor.mul_(after)
            case OpKind.BROADCAST:
                work = communicator.broadcast(tensor, request.root)
            case OpKind.ALLGATHER:
                work = communicator.all_gather(tensor)
            case _:
                return communicator.all_to_all(tensor, splits).wait()
        return work.wait()

    def _timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        begun_ns = time.monotonic_ns()
        result = call(*args)
        self._activities.append(Activity(name, begun_ns, time.monotonic_ns()))
        return result

    def _record(
        self,
        recorder: Recorder,
        requests: Sequence[Request],
        owned: _Owned,
        times_ns: tuple[int, int, int],
    ) -> None:
        agreed_ns, begun_ns, ended_ns = times_ns
        for item, entry in owned:
            request = requests[item.request]
            name, num_tensors = request.name, len(request.shapes)
            if num_tensors > 1:
                name += f"_{item.tensor + 1}of{num_tensors}"
            recorder.operation(
                Recorded(
                    set_id=self._set_id,
                    sequence=self._sequence + item.request,
                    name=name,
                    kind=request.kind.name,
                    submitted_ns=0 if entry is None else entry.submitted_ns,
                    agreed_ns=agreed_ns,
                    begun_ns=begun_ns,
                    ended_ns=ended_ns,
                    dtype=request.dtypes[item.tensor] if request.dtypes else "",
                    shape=request.shapes[item.tensor] if request.shapes else (),
                    num_fused=len(owned),
                    activities=tuple(self._activities),
                )
            )


def _plan_batches(
    requests: Sequence[Request], threshold_bytes: int, *, is_group_alone: bool
) -> list[_Batch]:
    """Batch tensors that are reduced or broadcast in the same way, up to a size.

    Tensors of alternating dtypes get one batch per dtype (Horovod's look-ahead).
    """
    copied_bytes = min(threshold_bytes, _COPIED_BYTES)
    limits = {OpKind.ALLREDUCE: threshold_bytes, OpKind.BROADCAST: copied_bytes}
    planned: list[_Batch] = []
    open_by_key: dict[object, _Batch] = {}
    for index, request in enumerate(requests):
        most_bytes = limits.get(request.kind, 0)
        group = index if is_group_alone and len(request.shapes) > 1 else -1
        how = request.kind, request.device, *request.scaling
        for tensor, shape in enumerate(request.shapes or ((),)):
            numel = num_bytes = 0
            dtype = None
            if request.dtypes:
                dtype = request.torch_dtypes[tensor]
                numel = torch.Size([max(extent, 0) for extent in shape]).numel()
                num_bytes = numel * dtype.itemsize
            item = _Item(index, tensor, numel)
            if num_bytes >= min(_ALONE_BYTES, most_bytes):
                planned.append(_Batch(request, [item]))
                continue
            key = (dtype, how, group)
            batch = open_by_key.get(key)
            if batch is None or batch.num_bytes + num_bytes > most_bytes:
                batch = open_by_key[key] = _Batch(request, [])
                planned.append(batch)
            batch.items.append(item)
            batch.num_bytes += num_bytes
    return planned


def _own_tensors(owned: _Owned) -> Iterator[Tensor]:
    for item, entry in owned:
        if entry is not None:
            # A slice, as a barrier has no tensor.
            yield from entry.operation.tensors[item.tensor : item.tensor + 1]


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]


class FusionTuning:
    """Tunes the fusion threshold; runs on the first rank of a process set.

    A step ends when a name is repeated. The cost of a step is seconds per byte, as
    steps differ in size.
    """

    def __init__(
        self, default_bytes: int, options: TuningOptions, change: Callable[[int], None]
    ) -> None:
        others = [size for size in _SIZES if size != default_bytes]
        self._tuner = Tuner(
            [default_bytes, *others],
            options,
            "fusion",
            lambda size: {"tensor_fusion_threshold": size},
        )
        self._change = change
        self._names: set[str] = set()
        self._num_bytes = 0
        # The end of the previous step; unknown in the first, which is not measured.
        self._begun_s: float | None = None
        self._ended_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._tuner.is_over

    def ran(self, names: Sequence[str], num_bytes: int, now_s: float) -> None:
        """Record operations that ran together and ended at ``now_s``."""
        is_full = len(self._names) >= _MOST_NAMES
        if is_full or not self._names.isdisjoint(names):
            self._end_step()
        self._names.update(names)
        self._num_bytes += num_bytes
        self._ended_s = now_s

    def _end_step(self) -> None:
        begun_s, self._begun_s = self._begun_s, self._ended_s
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._names.clear()
        if begun_s is None or not num_bytes:
            return
        tuner = self._tuner
        before = tuner.setting
        tuner.feed((self._ended_s - begun_s) / num_bytes)
        if tuner.setting != before:
            self._change(tuner.setting)
