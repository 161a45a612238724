"""The interface of engines, which move flat, contiguous memory between ranks.

``Communicator`` checks arguments, encodes dtypes, scales and copies results for all
engines. To add an engine, implement ``Engine`` in a file of its own under ``engines``
and add it to ``connections.ENGINES``.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from ronde.collectives.scope import AbortScope
from ronde.collectives.shapes import (
    CallLayout,
    LayoutSummary,
    as_rows,
    disagreement,
    do_fit,
)
from ronde.errors import CollectiveError, PeerLostError, UsageError, fresh
from ronde.status.steps import own_meter

MESSAGE_BYTES = 512  # limit of a message in ``exchange``
_NO_SCOPE = AbortScope()
_SOURCE_LINE = re.compile(r"^\[enforce fail at [^]]*\] .*?\. |^\[[^]]*\] ")
_TIMED_OUT = re.compile(
    r"timed? ?out|caused pair closure|timeout after|wait timeout", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|socket closed"
    r"|connection (was )?(closed|refused|reset|aborted)|failed to recv|connectfullmesh"
    r"|process failure|err_proc_failed",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """Context manager that turns a RuntimeError into a CollectiveError."""

    name: str
    rank: int
    size: int
    timeout_s: float
    scope: AbortScope = _NO_SCOPE  # if it was aborted, its failure is raised instead

    def explain(self, error: Exception) -> CollectiveError:
        if self.scope.failure is not None:
            return fresh(self.scope.failure)
        # torch's messages begin with a source line and the checked condition, and end
        # with advice; only the first sentence matters.
        text = _SOURCE_LINE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
        # NCCL's own reason, such as: Duplicate GPU detected.
        last = str(error).partition("Last error:")[2].strip().partition("\n")[0]
        text += f"; NCCL: {last}" if last else ""
        if _TIMED_OUT.search(text):
            return self.late(f" ({text})")
        if _PEER_LOST.search(text):
            return self.lost(text)
        return CollectiveError(f"{self._subject} failed: {text}")

    @property
    def _subject(self) -> str:
        return f"{self.name} on rank {self.rank} of {self.size}"

    def late(self, detail: str) -> CollectiveError:
        return CollectiveError(
            f"{self._subject} timed out after {self.timeout_s:g} s without an answer"
            f"{detail}. Find the rank that hangs or makes other calls, or set a longer "
            "timeout_s."
        )

    def lost(self, loss: str) -> PeerLostError:
        return PeerLostError(
            f"{self._subject} failed because another rank was lost ({loss}). See that "
            "rank's own error."
        )

    # Not a generator, as its frame would hold the error: see Note [Tracebacks hold
    # groups] in scope.py.
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        is_final = self.scope.failure is None and isinstance(error, CollectiveError)
        if isinstance(error, RuntimeError) and not is_final:
            raise self.explain(error) from error


def closed_error() -> CollectiveError:
    return CollectiveError("the communicator is closed. Connect again.")


T = TypeVar("T")
S = TypeVar("S")
PollCallback = Callable[[], float | None]  # seconds to the next call; None: stop
CPU = torch.device("cpu")


class ReduceOp(StrEnum):
    # The default hash of an enum is a Python function, too slow for every call.
    """The operation that combines corresponding elements of all ranks."""

    __hash__ = str.__hash__

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Work(Generic[T]):
    """A collective in progress; subclasses set ``is_over`` and ``failure``."""

    __slots__ = ("_finish", "_result", "failure", "is_over")

    def __init__(self, result: T, *, is_over: bool = True) -> None:
        self.is_over = is_over
        self.failure: Exception | None = None
        self._result = result
        self._finish: Callable[[], T] | None = None

    def is_done(self) -> bool:
        """Return True if ``wait()`` would not block."""
        return self.is_over or self._poll()

    def wait(self) -> T:
        """Block until the collective is complete and return its result.

        May be called repeatedly. As in torch, on an accelerator the result is ready for
        later work on the current stream.

        Raises:
            CollectiveError: The collective failed; every later call raises it again.
            PeerLostError: It failed because another rank was lost.
        """
        if not self.is_over:
            with own_meter().blocked:
                self._block(None)
        if self.failure is not None:
            raise fresh(self.failure)
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def wait_watched(self, poll: PollCallback) -> bool:
        """Wait until complete or ``poll`` returns None; return True if complete."""
        return self.is_over or self._block(poll)

    def with_result(self, result: S) -> "Work[S]":
        work: Any = self
        work._result = result  # noqa: SLF001  same class
        work._finish = None  # noqa: SLF001  same class
        return work

    def with_finish(self, finish: Callable[[], S]) -> "Work[S]":
        """Return this work; its first ``wait()`` calls ``finish`` for the result."""
        work: Any = self
        work._finish = finish  # noqa: SLF001  same class
        return work

    def _poll(self) -> bool:
        """Make progress without waiting; return True if the collective is over."""
        raise NotImplementedError

    def _block(self, poll: PollCallback | None) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """The operation and scaling of a reduction; one object for each call and dtype."""

    op: ReduceOp  # SUM if the communicator divides for an AVERAGE
    scales: bool = False  # the engine applies both factors and divides averages
    prescale: float = 1.0
    postscale: float = 1.0
    is_encoded: bool = False  # elements travel as ``arithmetic.encode`` returns them


PostMessage = Callable[
    [str, Tensor, int, int], Any
]  # "send" or "recv", data, peer, tag
WaitForMessage = Callable[[Any], object]
MessageSteps = Callable[[PostMessage, WaitForMessage], object]
Plan = Sequence[Sequence[int]]  # plan[r][s]: the rows or bytes that r sends to s
AllocateRows = Callable[[Sequence[LayoutSummary]], Tensor]  # all_gather's output
AllocateExchange = Callable[[Sequence[LayoutSummary], Plan], Tensor]  # all_to_all's


class Engine(ABC):
    """Moves bytes between a fixed group of ranks.

    Every call except ``send``, ``recv``, ``abort`` and ``close`` is collective, in the
    same order on all ranks. Tensors are flat, contiguous, detached and not empty, on
    one of ``devices``. Neither input nor output may be touched until the work is over.
    """

    name: str  # the value of ``--engine``
    rank: int
    size: int
    timeout_s: float  # longest wait of a call for another rank
    algorithm: str = ""  # name of the schedule
    sender: str = ""  # name of the engine that sends messages, if it is another
    devices: frozenset[str] = frozenset({"cpu"})  # supported device types

    @abstractmethod
    def require_open(self) -> None:
        """Raise CollectiveError if the engine is closed or broken."""

    @abstractmethod
    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction | None:
        """Return a reduction if the engine reduces tensors like ``like``, else None.

        If it is None, the caller converts 16-bit floats to float32, and other tensors
        with ``arithmetic.encode``. Every engine must support the resulting dtypes.
        """

    @abstractmethod
    def all_reduce(
        self, source: Tensor, out: Tensor, reduction: Reduction
    ) -> Work[Any]:
        """Reduce into ``out``, which is ``source`` unless ``reduction.scales``."""

    @abstractmethod
    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> Work[Any]:
        """Reduce and keep this rank's part; rank r gets ``counts[r]`` elements.

        ``source`` is not changed, but with ``reduction.scales`` ``out`` may be this
        rank's part of ``source``.
        """

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        """Gather int64 CPU vectors as the rows of one tensor; block until complete.

        ``call`` names the collective in errors.
        """
        gathered = own.new_empty((self.size, own.numel()))
        data, out = own.view(torch.uint8), gathered.view(-1).view(torch.uint8)
        self.all_gather(data, out, [own.nbytes] * self.size, call).wait()
        return gathered

    def exchange(self, message: bytes) -> list[bytes]:
        """Wait for every rank's message of at most ``MESSAGE_BYTES``; return all."""
        length = len(message).to_bytes(8, "little")
        packed = bytearray(length + message.ljust(MESSAGE_BYTES))
        own = torch.frombuffer(packed, dtype=torch.int64)
        gathered = self.gather_numbers(own, "connecting")
        texts = [each.numpy().tobytes() for each in gathered]
        return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]

    @abstractmethod
    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[Any]:
        """Gather the ranks' bytes into ``out``; ``own`` may be this rank's part."""

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[Any]:
        """Send ``plan[r][s]`` consecutive bytes from each rank r to each rank s.

        Only ``exchange_rows`` calls it.
        """
        raise NotImplementedError

    @abstractmethod
    def broadcast(self, data: Tensor, root: int) -> Work[Any]:
        """Copy ``root``'s elements, of any dtype, to all ranks."""

    @abstractmethod
    def send(self, data: Tensor, to: int, tag: int) -> Work[Any]:
        """Send elements of any dtype to another rank."""

    @abstractmethod
    def recv(self, data: Tensor, source: int, tag: int) -> Work[Any]:
        """Receive a message of the size and dtype of ``data`` from another rank."""

    def run_messages(self, call: str, steps: MessageSteps) -> None:
        """Run steps that send and receive CPU bytes as one blocking collective.

        Only the ``scheduled`` engine calls it.
        """
        raise NotImplementedError

    def find_sender(self, _tag: int) -> int | None:
        """Return a rank that has sent an unreceived message with this tag, or None."""
        raise UsageError(
            f"the {self.name} engine cannot receive from any source. Pass the source "
            "rank, or use the shared_memory engine."
        )

    @abstractmethod
    def barrier(self) -> Work[Any]:
        """Return work that completes once every rank has called ``barrier``."""

    @abstractmethod
    def clone(self) -> Self:
        """Return a new engine for the same ranks, with an order of calls of its own."""

    @abstractmethod
    def close(self) -> None:
        """Free threads, sockets and memory; may be called repeatedly."""

    def abort(self) -> None:
        """Close at once; calls in progress fail here and on the other ranks."""
        self.close()

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_populated: bool = True,  # noqa: ARG002  for engines with their own memory
    ) -> Tensor:
        """Allocate zeros in memory where in-place calls are fastest."""
        with torch.inference_mode(mode=False):
            return torch.zeros(numel, dtype=dtype, device=device)

    # Engines that send shapes and data together override these three.

    def refuse(self, layout: CallLayout) -> None:
        """Report wrong arguments on this rank to the other ranks, which wait for it."""
        with suppress(CollectiveError):
            self.exchange_shapes(layout)

    def gather_rows(
        self, layout: CallLayout, data: Tensor, row_bytes: int, allocate: AllocateRows
    ) -> Work[Any]:
        """Gather rows of bytes; their number may differ between ranks."""
        summaries = self.exchange_shapes(layout)
        result = allocate(summaries)
        if not result.numel():
            return Work(None)
        counts = [each.num_rows * row_bytes for each in summaries]
        return self.all_gather(data, result, counts)

    def exchange_rows(
        self,
        layout: CallLayout,
        data: Tensor,
        splits: Sequence[int],
        row_bytes: int,
        allocate: AllocateExchange,
    ) -> Work[Any]:
        """Send ``splits[r]`` rows of bytes to each rank r."""
        summaries = self.exchange_shapes(layout)
        own = torch.tensor(splits, device="cpu")
        plan = as_rows(self.gather_numbers(own, layout.call))
        result = allocate(summaries, plan)
        sizes = [[count * row_bytes for count in row] for row in plan]
        if not any(map(any, sizes)):
            return Work(None)
        return self.all_to_all(data, result, sizes)

    def exchange_shapes(self, own: CallLayout) -> list[LayoutSummary]:
        """Return a summary of each rank's layout; raise if they are incompatible."""
        numbers = torch.tensor(own.summarize(), device="cpu")
        gathered = as_rows(self.gather_numbers(numbers, own.call))
        summaries = [LayoutSummary(*each) for each in gathered]
        if not do_fit(summaries):
            layouts = self.gather_numbers(own.encode(), own.call)
            raise disagreement([CallLayout.decode(row) for row in layouts])
        return summaries
