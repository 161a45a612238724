"""THE interface of all collectives, which every engine implements.

Rules that hold for every call:

* It is collective: every rank of the communicator makes the same calls in the same
  order, with equal dtype and, where not said otherwise, equal shape.
* It returns at once where the engine can; the result is there after ``Work.wait()``.
  Until then neither input nor output may be touched. Calls that must first agree on
  sizes (uneven shapes) may block until all ranks have made the call.
* Tensors may have any layout; results of in-place calls keep it.
* Every dtype torch can hold is moved; float16, bfloat16, float32, float64, complex, all
  integers and bool are reduced (bool by min, max and product: and, or, and; complex by
  sum, average and product). Sums and products of integers wrap as their dtype does;
  their averages are summed in 64 bits.
* A failure raises ``CollectiveError`` on every rank that takes part, from the call or
  from ``wait()``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)
Look = Callable[[], float | None]
"""What a thread calls while it waits: returns for how many seconds it need not be
called again, or None to have it wait no longer."""


class ReduceOp(StrEnum):
    """How corresponding elements of all ranks become one."""

    # An enum's own is a function in Python, on the path of every call.
    __hash__ = str.__hash__

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Work(Protocol[T_co]):
    """A collective under way."""

    def is_done(self) -> bool:
        """Say whether ``wait()`` would return without blocking."""
        ...

    def wait(self) -> T_co:
        """Block until the result is there and return it; later calls return it again.

        On an accelerator "there" means ordered before whatever the current stream is
        given next, as torch has it.

        Raises:
            CollectiveError: The collective failed.
            PeerLostError: It failed because another rank is gone.
        """
        ...

    def wait_watched(self, look: Look) -> bool:
        """Block until it is over or ``look`` says to stop; say whether it is over.

        A failure counts as over, and is raised by ``wait()``.
        """
        ...


class Done(Generic[T_co]):
    """Work that was over before it was returned."""

    def __init__(self, value: T_co) -> None:
        self._value = value

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> T_co:
        """Return the value."""
        return self._value

    def wait_watched(self, look: Look) -> bool:  # noqa: ARG002 - the interface's
        """Return True."""
        return True


class Communicator(ABC):
    """A fixed group of ranks that can exchange tensors.

    Attributes:
        engine: Name of what moves the bytes.
        rank: This process in the group, ``0 <= rank < size``.
        size: Number of processes in the group.
    """

    engine: str
    rank: int
    size: int

    @abstractmethod
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce ``tensor`` over all ranks, in place.

        Args:
            tensor: Any shape, equal on all ranks.
            op: AVERAGE divides the sum by ``size``; integers truncate toward zero.
            prescale: Multiplies each rank's input, and is equal on all ranks; for
                integers in float64, truncated.
            postscale: Multiplies the result; for integers in float64, truncated.

        Returns:
            Work whose result is ``tensor`` itself.

        Raises:
            UsageError: ``op`` is not defined for the dtype.
        """

    def all_reduce_from(
        self,
        source: Tensor,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce ``source`` over all ranks into ``tensor``: see ``all_reduce``.

        Args:
            source: Any shape, equal on all ranks; it is left as it was.
            tensor: Of its shape, dtype and device, apart from it.
            op: As in ``all_reduce``, as are the two factors.
            prescale: See there.
            postscale: See there.
        """
        tensor.copy_(source)
        return self.all_reduce(tensor, op, prescale=prescale, postscale=postscale)

    @abstractmethod
    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate every rank's ``tensor`` along dimension 0, in rank order.

        Args:
            tensor: At least one dimension; dimension 0 may differ from rank to rank (0
                included), the others may not.
            out: Where the result goes, contiguous and of the result's shape and dtype;
                ``tensor`` may be this rank's rows of it. None makes a new tensor.

        Returns:
            Work whose result is ``out`` or a new tensor, equal on all ranks.

        Raises:
            UsageError: ``out`` cannot hold the result.
            CollectiveError: Dtypes or later dimensions differ; on every rank.
        """

    @abstractmethod
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Tensor | None = None,
    ) -> Work[Tensor]:
        """Reduce over all ranks and keep this rank's rows of dimension 0.

        Args:
            tensor: At least one dimension, equal shape on all ranks; it is left as it
                was. When ``size`` does not divide dimension 0, the first ranks take
                one row more.
            op: As in ``all_reduce``.
            prescale: As in ``all_reduce``.
            postscale: As in ``all_reduce``.
            out: Where the result goes, contiguous and of the result's shape and dtype;
                it may be this rank's rows of ``tensor``. None makes a new tensor.

        Returns:
            Work whose result is ``out`` or a new tensor: ``rows(n)[rank]`` rows.

        Raises:
            UsageError: ``op`` is not defined for the dtype, ``tensor`` has no
                dimensions, or ``out`` cannot hold the result.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor into every rank's, in place.

        Args:
            tensor: Any shape, equal on all ranks.
            root: The rank to copy from.

        Returns:
            Work whose result is ``tensor`` itself.
        """

    @abstractmethod
    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Send consecutive rows of dimension 0 to the ranks and gather theirs.

        Args:
            tensor: At least one dimension; later dimensions equal on all ranks.
            splits: Rows for each rank; None splits evenly. Rows past the sum stay.
            out: Where the result goes, contiguous and of the result's shape and dtype,
                apart from ``tensor``. None makes a new tensor.

        Returns:
            Work whose result is ``out`` or a new tensor of the received rows in rank
            order, and how many came from each rank.

        Raises:
            UsageError: ``splits`` has not ``size`` entries, a negative one, or more
                rows than there are; or it is None and ``size`` does not divide them;
                or ``out`` cannot hold the result.
        """

    @abstractmethod
    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send ``tensor`` to one rank, which must ``recv`` it."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive into ``tensor`` what ``source`` sent: equal shape, dtype and tag."""

    @abstractmethod
    def barrier(self) -> Work[None]:
        """Complete when every rank has called it."""

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
    ) -> Tensor:
        """Return zeros in memory where this engine's in-place calls are fastest.

        Collective: every rank asks for the same. Any part of it may be given to any
        collective; where it lies changes speed alone.

        Args:
            numel: Number of elements.
            dtype: Their dtype.
            device: Where they are to lie.

        Returns:
            A tensor of shape ``(numel,)``, aligned to 64 bytes, which outlives
            ``close()`` and, made in ``torch.inference_mode()``, may be used outside.

        Raises:
            CollectiveError: There is not enough of that memory; on every rank.
        """
        with torch.inference_mode(mode=False):
            return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def duplicate(self) -> "Communicator":
        """Make a communicator of the same ranks with an order of calls of its own.

        Collective. Calls on the copy may interleave with calls on the original in any
        way, differently on each rank. Source: MPI_Comm_dup.
        """

    def abort(self) -> None:
        """Close at once: what is under way fails, here and on the other ranks.

        Not collective. For a rank that failed where others wait for it.
        """
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give back threads, sockets and memory; later calls raise CollectiveError."""


def rows(num_rows: int, size: int) -> list[int]:
    """Split ``num_rows`` over ``size`` ranks; the first ranks take the extra rows."""
    base, extra = divmod(num_rows, size)
    return [base + (rank < extra) for rank in range(size)]
