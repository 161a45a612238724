"""Carry agreed operations out on a communicator, the same ones on all ranks.

Which tensors travel together is planned purely: every rank comes to the same plan.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.collectives.adasum import adasum
from ronde.collectives.torch_modes import writing_to
from ronde.coordination.node import RunCommand
from ronde.coordination.requests import Entry, OpKind, Request, StreamMark
from ronde.errors import UsageError
from ronde.timeline.events import Activity, Recorded, Recorder

_MAX_ITEMS = 4096
"""Tensors in the plans that are kept, 1 KiB each; the same plans on all ranks."""
_ALONE_BYTES = 1 << 20
"""From this size on copying a tensor costs more than a collective of its own."""
_Entries = Sequence[Entry | None]
"""This rank's, one for each request; None where it has joined."""


class _Item(NamedTuple):
    """One tensor: its request's place among those that run together, its own there."""

    request: int
    tensor: int
    numel: int


@dataclass(slots=True)
class _Batch:
    """Tensors that one collective reduces.

    Attributes:
        request: What it does; the same for all of them.
        flat: Where several lie side by side, all of them, else None.
        views: Each of those, in its own shape.
    """

    request: Request
    items: list[_Item]
    num_bytes: int = 0
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list[Tensor])


class _Span(NamedTuple):
    """When a batch and its parts ran, by ``time.monotonic_ns()``."""

    batch: _Batch
    begun_ns: int
    ended_ns: int
    activities: tuple[Activity, ...]


class Execution:
    """What one process set's operations run on.

    Attributes:
        recorder: Takes operations down, or None.
        threshold_bytes: Tensors are fused up to this.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        set_id: int,
        threshold_bytes: int,
        is_group_alone: bool,
    ) -> None:
        self.recorder: Recorder | None = None
        self.threshold_bytes = threshold_bytes
        self._communicator = communicator
        self._engine = communicator.engine.upper()
        self._set_id = set_id
        self._is_group_alone = is_group_alone
        # One stretch for each dtype and device, as large as was ever needed, where the
        # communicator reduces it without a copy.
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._plans: dict[tuple[int, int, int], list[_Batch]] = {}
        self._num_items = 0
        self._activities: list[Activity] = []
        self._sequence = 0
        self._last: StreamMark | None = None

    def run(self, run: RunCommand, entries: _Entries) -> None:
        """Carry operations out; collective, and fails where a rank is gone."""
        if not any(request.device == "cuda" for request in run.requests):
            self._run(run, entries)
            return
        marks = [e.ready for e in entries if e is not None and e.ready is not None]
        if self._last is not None:
            # Perhaps on another stream: it reads the same buffers to its end.
            marks.append(self._last)
        with _after(marks):
            self._run(run, entries)
            device = torch.cuda.current_device()
            self._last = StreamMark(torch.device("cuda", device))

    def _run(self, run: RunCommand, entries: _Entries) -> None:
        agreed_ns = time.monotonic_ns()
        results: list[list[Any]] = [[] for _ in entries]
        spans: list[_Span] = []
        for batch in self._plan(run):
            begun_ns = time.monotonic_ns()
            with writing_to(_own_tensors(batch, entries)):
                self._run_batch(batch, run.requests, entries, results)
            activities, self._activities = tuple(self._activities), []
            spans.append(_Span(batch, begun_ns, time.monotonic_ns(), activities))
        if self.recorder is not None:
            self._record(self.recorder, run.requests, entries, spans, agreed_ns)
        for entry, request, result in zip(entries, run.requests, results, strict=True):
            if entry is not None and not entry.is_over:
                is_barrier = request.kind is OpKind.BARRIER
                entry.succeed(None if is_barrier else tuple(result))
        self._sequence += len(entries)

    def _plan(self, run: RunCommand) -> list[_Batch]:
        if run.key is None:
            return self._make_plan(run.requests)
        key = (*run.key, self.threshold_bytes)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(run.requests)
            num_items = sum(len(batch.items) for batch in plan)
            if self._num_items + num_items > _MAX_ITEMS:
                self._plans.clear()
                self._num_items = 0
            self._plans[key] = plan
            self._num_items += num_items
        return plan

    def _make_plan(self, requests: Sequence[Request]) -> list[_Batch]:
        batches = _plan_batches(requests, self.threshold_bytes, self._is_group_alone)
        for batch in batches:
            if len(batch.items) > 1:
                self._pack(batch, requests)
        return batches

    def _pack(self, batch: _Batch, requests: Sequence[Request]) -> None:
        """Give the tensors of a batch their places; collective."""
        dtype = batch.request.dtypes[batch.items[0].tensor]
        key = dtype, batch.request.device
        numel = sum(item.numel for item in batch.items)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            room = 1 << max(numel - 1, 1).bit_length()
            where = torch.device(batch.request.device)
            if where.type == "cuda":
                where = torch.device("cuda", torch.cuda.current_device())
            buffer = self._communicator.allocate(room, getattr(torch, dtype), where)
            self._buffers[key] = buffer
        batch.flat = buffer[:numel]
        start = 0
        for item in batch.items:
            shape = requests[item.request].shapes[item.tensor]
            batch.views.append(buffer[start : start + item.numel].view(shape))
            start += item.numel

    def _run_batch(
        self,
        batch: _Batch,
        requests: Sequence[Request],
        entries: _Entries,
        results: list[list[Any]],
    ) -> None:
        try:
            if batch.flat is not None:
                self._reduce_packed(batch, batch.flat, entries, results)
                return
            item = batch.items[0]
            entry = entries[item.request]
            result = self._run_one(requests[item.request], item.tensor, entry)
            results[item.request].append(result)
        except UsageError as error:  # of the engine, alike on all ranks
            for item in batch.items:
                entry = entries[item.request]
                if entry is not None:
                    entry.fail(error.with_traceback(None))

    def _reduce_packed(
        self, batch: _Batch, flat: Tensor, entries: _Entries, results: list[list[Any]]
    ) -> None:
        sources: list[Tensor] = []
        outputs: list[Tensor] = []
        places: list[Tensor] = []
        for item, view in zip(batch.items, batch.views, strict=True):
            entry = entries[item.request]
            if entry is None:
                view.zero_()
                continue
            sources.append(entry.operation.tensors[item.tensor])
            output = entry.operation.outputs[item.tensor]
            outputs.append(output)
            places.append(view)
            results[item.request].append(output)
        self._timed("MEMCPY_IN_FUSION_BUFFER", _copy_all, places, sources)
        self._timed_call(batch.request, lambda: self._all_reduce(batch.request, flat))
        self._timed("MEMCPY_OUT_FUSION_BUFFER", _copy_all, outputs, places)

    def _run_one(self, request: Request, index: int, entry: Entry | None) -> Any:  # noqa: ANN401 - each operation's own
        if request.kind is OpKind.BARRIER:
            return None  # that all have asked for it is all there is to it
        if entry is None:
            source = output = request.zeros(index)
            splits = None
        else:
            operation = entry.operation
            source, splits = operation.tensors[index], operation.splits
            output = operation.outputs[index] if operation.outputs else source
        if output is not source and request.kind is not OpKind.ALLREDUCE:
            output.copy_(source)
        return self._timed_call(
            request, lambda: self._call(request, source, output, splits)
        )

    def _call(
        self,
        request: Request,
        source: Tensor,
        output: Tensor,
        splits: Sequence[int] | None,
    ) -> Any:  # noqa: ANN401 - each operation's own
        communicator = self._communicator
        op, before, after = request.reduce_op, request.prescale, request.postscale
        work: Work[Any]
        match request.kind:
            case OpKind.ALLREDUCE:
                return self._all_reduce(request, output, source)
            case OpKind.REDUCESCATTER:
                work = communicator.reduce_scatter(
                    source, op, prescale=before, postscale=after
                )
            case OpKind.ADASUM:
                if before != 1.0:
                    output.mul_(before)
                adasum(communicator, output)
                return output if after == 1.0 else output.mul_(after)
            case OpKind.BROADCAST:
                work = communicator.broadcast(output, request.root)
            case OpKind.ALLGATHER:
                work = communicator.all_gather(source)
            case OpKind.ALLTOALL:
                work = communicator.all_to_all(source, splits)
            case OpKind.BARRIER | OpKind.JOIN | OpKind.CONNECT:
                raise AssertionError(f"{request.kind.name} moves no tensor")
        return work.wait()

    def _all_reduce(
        self, request: Request, output: Tensor, source: Tensor | None = None
    ) -> Tensor:
        reduce = self._communicator.all_reduce
        if source is not None and source is not output:
            reduce = partial(reduce, source=source)
        return reduce(
            output,
            request.reduce_op,
            prescale=request.prescale,
            postscale=request.postscale,
        ).wait()

    def _timed_call(self, request: Request, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        return self._timed(f"{self._engine}_{request.kind.name}", call)

    def _timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        begun_ns = time.monotonic_ns()
        result = call(*args)
        self._activities.append(Activity(name, begun_ns, time.monotonic_ns()))
        return result

    def _record(
        self,
        recorder: Recorder,
        requests: Sequence[Request],
        entries: _Entries,
        spans: Sequence[_Span],
        agreed_ns: int,
    ) -> None:
        for batch, begun_ns, ended_ns, activities in spans:
            for item in batch.items:
                request, entry = requests[item.request], entries[item.request]
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
                        num_fused=len(batch.items),
                        activities=activities,
                    )
                )


def _plan_batches(
    requests: Sequence[Request],
    threshold_bytes: int,
    is_group_alone: bool,  # noqa: FBT001
) -> list[_Batch]:
    """Gather tensors that are reduced in the same way, up to a size.

    A tensor joins the last open batch of its own kind, past others that do not fit, so
    that two dtypes in turn make two batches (Horovod's look-ahead).
    """
    planned: list[_Batch] = []
    open_by_key: dict[object, _Batch] = {}
    for place, request in enumerate(requests):
        is_reduced = request.kind is OpKind.ALLREDUCE
        group = place if is_group_alone and len(request.shapes) > 1 else -1
        how = request.device, request.number, request.prescale, request.postscale
        for tensor, shape in enumerate(request.shapes or ((),)):
            numel = num_bytes = 0
            dtype = None
            if request.dtypes:
                dtype = request.torch_dtypes[tensor]
                numel = torch.Size([max(extent, 0) for extent in shape]).numel()
                num_bytes = numel * dtype.itemsize
            item = _Item(place, tensor, numel)
            if not is_reduced or num_bytes >= min(_ALONE_BYTES, threshold_bytes):
                planned.append(_Batch(request, [item]))
                continue
            key = (dtype, how, group)
            batch = open_by_key.get(key)
            if batch is None or batch.num_bytes + num_bytes > threshold_bytes:
                batch = open_by_key[key] = _Batch(request, [])
                planned.append(batch)
            batch.items.append(item)
            batch.num_bytes += num_bytes
    return planned


def _own_tensors(batch: _Batch, entries: _Entries) -> Iterator[Tensor]:
    for item in batch.items:
        entry = entries[item.request]
        if entry is not None:
            # A slice: a barrier has no tensor.
            yield from entry.operation.tensors[item.tensor : item.tensor + 1]


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        # As torch's own optimizers do.
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _after(marks: Sequence[StreamMark]) -> Generator[None]:
    """Work on the device of some marks, after all of them; anywhere without any."""
    if not marks:
        yield
        return
    with torch.cuda.device(marks[0].device):
        for mark in marks:
            mark.order()
        yield
