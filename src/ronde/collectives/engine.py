"""What an engine is to a communicator: something that moves flat, contiguous memory.

``Communicator`` checks arguments, encodes dtypes, scales and puts results where they
belong, once for all engines. To add an engine, implement ``Engine`` in a file of its
own under ``engines``, and name it in ``connections.ENGINES``.
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

MESSAGE_BYTES = 512  # of an exchange, at most
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
    """Where a collective runs: a failure in its block says so in a sentence."""

    name: str
    rank: int
    size: int
    timeout_s: float
    scope: AbortScope = _NO_SCOPE  # where that was aborted, its failure says most

    def explain(self, error: Exception) -> CollectiveError:
        if self.scope.failure is not None:
            return fresh(self.scope.failure)
        # torch puts its own source line, and the condition that it checked there,
        # before the first sentence, and advice after it.
        text = _SOURCE_LINE.sub("", str(error).partition("\n")[0]).partition(". ")[0]
        # Of an error of NCCL's this says most, such as: Duplicate GPU detected.
        last = str(error).partition("Last error:")[2].strip().partition("\n")[0]
        text += f"; NCCL: {last}" if last else ""
        if _TIMED_OUT.search(text):
            return self.late(f" ({text})")
        if _PEER_LOST.search(text):
            return self.lost(text)
        return CollectiveError(f"{self.place} failed: {text}")

    @property
    def place(self) -> str:
        return f"{self.name} on rank {self.rank} of {self.size}"

    def late(self, whence: str) -> CollectiveError:
        return CollectiveError(
            f"{self.place} must complete within timeout_s, got no answer for "
            f"{self.timeout_s:g} s{whence}. See which rank hangs or makes other calls, "
            "or give a longer timeout_s."
        )

    def lost(self, loss: str) -> PeerLostError:
        return PeerLostError(
            f"{self.place} needs every rank, but one is gone ({loss}). Its own error "
            "shows why."
        )

    # No generator, whose frame would hold the error, and that its frame: see Note [What
    # a failure holds].
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        is_told = self.scope.failure is None and isinstance(error, CollectiveError)
        if isinstance(error, RuntimeError) and not is_told:
            raise self.explain(error) from error


def closed_error() -> CollectiveError:
    return CollectiveError(
        "communicator must be open, got a closed one. Connect again."
    )


T = TypeVar("T")
S = TypeVar("S")
Look = Callable[[], float | None]  # seconds until the next call; None: stop waiting
CPU = torch.device("cpu")


class ReduceOp(StrEnum):
    """How corresponding elements of all ranks become one."""

    # An enum's own is a function in Python, on the path of every call.
    __hash__ = str.__hash__

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Work(Generic[T]):
    """A collective under way. An engine's own sets ``is_over`` and ``failure``."""

    __slots__ = ("_finish", "_result", "failure", "is_over")

    def __init__(self, result: T, *, is_over: bool = True) -> None:
        self.is_over = is_over
        self.failure: Exception | None = None
        self._result = result
        self._finish: Callable[[], T] | None = None

    def is_done(self) -> bool:
        """Say whether ``wait()`` would return without blocking."""
        return self.is_over or self._poll()

    def wait(self) -> T:
        """Block until the result is there and return it; later calls return it again.

        On an accelerator "there" means ordered before whatever the current stream is
        given next, as torch has it.

        Raises:
            CollectiveError: The collective failed; every later call raises it again.
            PeerLostError: It failed because another rank is gone.
        """
        if not self.is_over:
            self._block(None)
        if self.failure is not None:
            raise fresh(self.failure)
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over, or failed, or ``look`` returns None; say if over."""
        return self.is_over or self._block(look)

    def giving(self, result: S) -> "Work[S]":
        work: Any = self
        work._result = result  # noqa: SLF001  this itself
        work._finish = None  # noqa: SLF001  likewise
        return work

    def then(self, finish: Callable[[], S]) -> "Work[S]":
        """Return this, with the result of what the first ``wait()`` is to call."""
        work: Any = self
        work._finish = finish  # noqa: SLF001  this itself
        return work

    def _poll(self) -> bool:
        """Go as far as it can without waiting; say whether it is over."""
        raise NotImplementedError

    def _block(self, look: Look | None) -> bool:
        """Do what ``wait_watched`` does."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """What becomes of corresponding elements: one object for one call and dtype."""

    op: ReduceOp  # SUM for an AVERAGE that is to be divided afterwards
    scales: bool = False  # it applies both factors, else 1, and divides averages
    prescale: float = 1.0
    postscale: float = 1.0
    is_encoded: bool = False  # elements travel as ``arithmetic.encode`` makes them


PostMessage = Callable[[str, Tensor, int, int], Any]  # send or recv, to whom, its tag
WaitForMessage = Callable[[Any], object]
MessageSteps = Callable[[PostMessage, WaitForMessage], object]
Plan = Sequence[Sequence[int]]  # how much each rank sends to each
PlaceRows = Callable[[Sequence[LayoutSummary]], Tensor]  # all_gather's bytes
PlaceExchange = Callable[[Sequence[LayoutSummary], Plan], Tensor]  # all_to_all's


class Engine(ABC):
    """What moves bytes between a fixed group of ranks.

    Every call is collective (but ``send``, ``recv``, ``abort`` and ``close``) and comes
    in the same order on all ranks. Tensors are flat, contiguous and detached, on one of
    ``devices``, and have elements; neither input nor output may be touched until the
    work is over.
    """

    name: str  # as ``--engine`` has it
    rank: int
    size: int
    timeout_s: float  # how long a call waits for another rank
    algorithm: str = ""  # the schedule that it follows
    devices: frozenset[str] = frozenset({"cpu"})  # types of the devices that it serves

    @abstractmethod
    def require_open(self) -> None:
        """Raise CollectiveError where it is closed or broken."""

    @abstractmethod
    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction | None:
        """Say how ``all_reduce`` or ``reduce_scatter`` takes elements such as these.

        None where they must travel as another one: 16-bit floats as 32-bit ones, and
        what ``arithmetic.encode`` makes of the others, which it must take.
        """

    @abstractmethod
    def all_reduce(self, source: Tensor, out: Tensor, what: Reduction) -> Work[Any]:
        """Reduce every rank's ``source`` into ``out``; the same unless it scales."""

    @abstractmethod
    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], what: Reduction
    ) -> Work[Any]:
        """Reduce consecutive parts, ``counts[r]`` elements for each rank r.

        ``source`` is left as it was; where it scales, ``out`` may be this rank's part.
        """

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        """Return every rank's int64 vector on the CPU, a row a rank; blocks.

        ``call`` names the collective in errors.
        """
        gathered = own.new_empty((self.size, own.numel()))
        data, out = own.view(torch.uint8), gathered.view(-1).view(torch.uint8)
        self.all_gather(data, out, [own.nbytes] * self.size, call).wait()
        return gathered

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every rank's message of at most ``MESSAGE_BYTES``; blocks."""
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
        """Concatenate the ranks' bytes; ``own`` may lie in its place in ``out``."""

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[Any]:
        """Send ``plan[r][s]`` consecutive bytes from each rank r to each rank s.

        Only ``exchange_rows`` calls it.
        """
        raise NotImplementedError

    @abstractmethod
    def broadcast(self, data: Tensor, root: int) -> Work[Any]:
        """Copy ``root``'s elements, of any dtype, into everybody's."""

    @abstractmethod
    def send(self, data: Tensor, to: int, tag: int) -> Work[Any]:
        """Send elements of any dtype to another rank."""

    @abstractmethod
    def recv(self, data: Tensor, source: int, tag: int) -> Work[Any]:
        """Receive as many elements of the same dtype from another rank."""

    def run_messages(self, call: str, steps: MessageSteps) -> None:
        """Call what sends and receives bytes on the CPU, as part of a call; blocks.

        Only the engine ``scheduled`` calls it.
        """
        raise NotImplementedError

    def find_sender(self, _tag: int) -> int | None:
        """Return a rank whose message with this tag has come and is not asked for."""
        raise UsageError(
            f"source must be a rank with engine {self.name}, got any. Name the rank, "
            "or use engine shared_memory."
        )

    @abstractmethod
    def barrier(self) -> Work[Any]:
        """Be over when every rank has called it."""

    @abstractmethod
    def clone(self) -> Self:
        """Make another of the same ranks, with an order of calls of its own."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads, sockets and memory; calls may be repeated."""

    def abort(self) -> None:
        """Close at once: what is under way fails, here and on the other ranks."""
        self.close()

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_populated: bool = True,  # noqa: ARG002  of an engine that has memory of its own
    ) -> Tensor:
        """Return zeros in memory where calls are fastest."""
        with torch.inference_mode(mode=False):
            return torch.zeros(numel, dtype=dtype, device=device)

    # An engine that sends shapes and data at once overrides these three.

    def refuse(self, layout: CallLayout) -> None:
        """Inform the others, who wait for it, that this rank's arguments are wrong."""
        with suppress(CollectiveError):
            self.exchange_shapes(layout)

    def gather_rows(
        self, layout: CallLayout, data: Tensor, row_bytes: int, place: PlaceRows
    ) -> Work[Any]:
        """Gather rows, given as bytes, of which every rank may have another number."""
        summaries = self.exchange_shapes(layout)
        result = place(summaries)
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
        place: PlaceExchange,
    ) -> Work[Any]:
        """Send ``splits[r]`` rows, given as bytes, to each rank r."""
        summaries = self.exchange_shapes(layout)
        own = torch.tensor(splits, device="cpu")
        plan = as_rows(self.gather_numbers(own, layout.call))
        result = place(summaries, plan)
        sizes = [[count * row_bytes for count in row] for row in plan]
        if not any(map(any, sizes)):
            return Work(None)
        return self.all_to_all(data, result, sizes)

    def exchange_shapes(self, own: CallLayout) -> list[LayoutSummary]:
        """Return what every rank was called for, which fits together; blocks."""
        numbers = torch.tensor(own.summarize(), device="cpu")
        gathered = as_rows(self.gather_numbers(numbers, own.call))
        summaries = [LayoutSummary(*each) for each in gathered]
        if not do_fit(summaries):
            layouts = self.gather_numbers(own.encode(), own.call)
            raise disagreement([CallLayout.decode(row) for row in layouts])
        return summaries
