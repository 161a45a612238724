"""Carry agreed operations out on a communicator, the same ones on all ranks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ronde.collectives import Communicator, Work
from ronde.collectives.adasum import adasum
from ronde.collectives.recent import Recent
from ronde.collectives.torch_modes import writing_to
from ronde.coordination.entries import Entry
from ronde.coordination.fusion import Batch, plan_batches
from ronde.coordination.fusion_buffer import FusionBuffer, Packing
from ronde.coordination.operations import Kind
from ronde.coordination.requests import Request
from ronde.coordination.spans import Place, Span, record_run
from ronde.coordination.steps import Run
from ronde.coordination.streams import Mark, after
from ronde.errors import UsageError
from ronde.timeline.events import Recorder

_MAX_ITEMS = 4096
"""Tensors in the plans that are kept, 1 KiB each; the same plans on all ranks."""


@dataclass(slots=True)
class _Planned:
    """A batch, and where its tensors travel where they travel together."""

    batch: Batch
    packing: Packing | None


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
        self._set_id = set_id
        self._is_group_alone = is_group_alone
        self._buffer = FusionBuffer(communicator)
        self._plans = Recent[tuple[int, int, int], list[_Planned]](_MAX_ITEMS)
        self._sequence = 0
        self._last: Mark | None = None

    def run(self, run: Run, entries: Sequence[Entry | None]) -> None:
        """Carry operations out; collective.

        Args:
            run: What was agreed.
            entries: This rank's, one for each request; None where it has joined.

        Raises:
            CollectiveError: A rank is gone.
        """
        if not any(request.device == "cuda" for request in run.requests):
            self._run(run, entries)
            return
        marks = [e.ready for e in entries if e is not None and e.ready is not None]
        if self._last is not None:
            # Perhaps on another stream: it reads the same buffers to its end.
            marks.append(self._last)
        with after(marks):
            self._run(run, entries)
            device = torch.cuda.current_device()
            self._last = Mark(torch.device("cuda", device))

    def _run(self, run: Run, entries: Sequence[Entry | None]) -> None:
        agreed_ns = time.monotonic_ns()
        results: list[list[Any]] = [[] for _ in entries]
        spans: list[Span] = []
        for planned in self._plan(run):
            span = Span(planned.batch, time.monotonic_ns(), [])
            with writing_to(_own_tensors(planned.batch, entries)):
                self._run_batch(planned, run.requests, entries, results, span)
            span.ended_ns = time.monotonic_ns()
            spans.append(span)
        if self.recorder is not None:
            record_run(
                self.recorder,
                run.requests,
                entries,
                spans,
                Place(self._set_id, self._sequence, agreed_ns),
            )
        for entry, request, result in zip(entries, run.requests, results, strict=True):
            if entry is not None and not entry.is_over:
                entry.succeed(None if request.kind is Kind.BARRIER else tuple(result))
        self._sequence += len(entries)

    def _plan(self, run: Run) -> list[_Planned]:
        if run.key is None:
            return self._make_plan(run.requests)
        key = (*run.key, self.threshold_bytes)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(run.requests)
            self._plans.put(key, plan, sum(len(each.batch.items) for each in plan))
        return plan

    def _make_plan(self, requests: Sequence[Request]) -> list[_Planned]:
        batches = plan_batches(
            requests, self.threshold_bytes, is_group_alone=self._is_group_alone
        )
        return [
            _Planned(
                batch,
                self._buffer.pack(batch, requests) if len(batch.items) > 1 else None,
            )
            for batch in batches
        ]

    def _run_batch(
        self,
        planned: _Planned,
        requests: Sequence[Request],
        entries: Sequence[Entry | None],
        results: list[list[Any]],
        span: Span,
    ) -> None:
        batch = planned.batch
        try:
            if planned.packing is not None:
                self._reduce_packed(batch, planned.packing, entries, results, span)
                return
            item = batch.items[0]
            entry = entries[item.request]
            result = self._run_one(requests[item.request], item.tensor, entry, span)
            results[item.request].append(result)
        except UsageError as error:  # of the engine, alike on all ranks
            for item in batch.items:
                entry = entries[item.request]
                if entry is not None:
                    entry.fail(error.with_traceback(None))

    def _reduce_packed(
        self,
        batch: Batch,
        packing: Packing,
        entries: Sequence[Entry | None],
        results: list[list[Any]],
        span: Span,
    ) -> None:
        """Reduce several tensors side by side."""
        sources: list[Tensor] = []
        outputs: list[Tensor] = []
        places: list[Tensor] = []
        for item, view in zip(batch.items, packing.views, strict=True):
            entry = entries[item.request]
            if entry is None:
                view.zero_()
                continue
            sources.append(entry.operation.tensors[item.tensor])
            output = entry.operation.outputs[item.tensor]
            outputs.append(output)
            places.append(view)
            results[item.request].append(output)
        with span.doing("MEMCPY_IN_FUSION_BUFFER"):
            _copy_all(places, sources)
        request = batch.request
        with span.doing(self._activity(request)):
            self._communicator.all_reduce(
                packing.flat,
                request.reduce_op,
                prescale=request.prescale,
                postscale=request.postscale,
            ).wait()
        with span.doing("MEMCPY_OUT_FUSION_BUFFER"):
            _copy_all(outputs, places)

    def _run_one(
        self, request: Request, index: int, entry: Entry | None, span: Span
    ) -> Any:  # noqa: ANN401 - each operation's own
        if request.kind is Kind.BARRIER:
            return None  # that all have asked for it is all there is to it
        if entry is None:
            zeros = request.zeros()[index]
            with span.doing(self._activity(request)):
                return self._call(request, zeros, zeros, None)
        operation = entry.operation
        source = operation.tensors[index]
        output = operation.outputs[index] if operation.outputs else source
        if output is not source and request.kind is not Kind.ALLREDUCE:
            output.copy_(source)
        with span.doing(self._activity(request)):
            return self._call(request, source, output, entry)

    def _call(
        self, request: Request, source: Tensor, output: Tensor, entry: Entry | None
    ) -> Any:  # noqa: ANN401 - each operation's own
        communicator = self._communicator
        op, before, after = request.reduce_op, request.prescale, request.postscale
        work: Work[Any]
        match request.kind:
            case Kind.ALLREDUCE:
                reduce = communicator.all_reduce
                if output is not source:
                    reduce = partial(communicator.all_reduce_from, source)
                work = reduce(output, op, prescale=before, postscale=after)
            case Kind.REDUCESCATTER:
                work = communicator.reduce_scatter(
                    source, op, prescale=before, postscale=after
                )
            case Kind.ADASUM:
                work = Work(_adasum(communicator, output, before, after))
            case Kind.BROADCAST:
                work = communicator.broadcast(output, request.root)
            case Kind.ALLGATHER:
                work = communicator.all_gather(source)
            case Kind.ALLTOALL:
                splits = None if entry is None else entry.operation.splits
                work = communicator.all_to_all(source, splits)
            case Kind.BARRIER | Kind.JOIN | Kind.CONNECT:
                raise AssertionError(f"{request.kind.name} moves no tensor")
        return work.wait()

    def _activity(self, request: Request) -> str:
        engine = self._communicator.engine.upper()
        return f"{engine}_{request.kind.name}"


def _own_tensors(batch: Batch, entries: Sequence[Entry | None]) -> Iterator[Tensor]:
    """Return this rank's tensors of a batch."""
    for item in batch.items:
        entry = entries[item.request]
        if entry is not None:
            # A slice: a barrier has no tensor.
            yield from entry.operation.tensors[item.tensor : item.tensor + 1]


def _adasum(
    communicator: Communicator, tensor: Tensor, prescale: float, postscale: float
) -> Tensor:
    """Adasum in place."""
    if prescale != 1.0:
        tensor.mul_(prescale)
    adasum(communicator, tensor)
    return tensor if postscale == 1.0 else tensor.mul_(postscale)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        # As torch's own optimizers do.
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
