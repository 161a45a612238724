"""What engines share that are made of other communicators.

They reduce and copy vectors of plain elements in a thread of their own; this module
makes tensors of every dtype and layout into such vectors.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from ronde.collectives.arguments import apart_from, require_out, require_root
from ronde.collectives.arithmetic import as_bytes, dense, put_back, require_reducible
from ronde.collectives.communicator import Communicator, Done, ReduceOp, Work, rows
from ronde.collectives.lane import Lane
from ronde.collectives.layouts import Agreement, Layout
from ronde.collectives.vectors import Reduction, flat
from ronde.errors import UsageError

T = TypeVar("T")


class LayeredCommunicator(Communicator):
    """A communicator on top of others. Tensors must be on the CPU.

    What it cannot do better (``all_to_all``, ``send``, ``recv``, ``barrier``) goes to
    a communicator of all ranks.

    Attributes:
        rank: This process in the group.
        size: Number of processes in the group.
    """

    def __init__(
        self,
        world: Communicator,
        lane: Lane,
        gather_numbers: Callable[[Tensor], Tensor],
    ) -> None:
        """Take over a communicator; it is closed with this one.

        Args:
            world: All ranks.
            lane: Where the vectors are reduced and copied.
            gather_numbers: See ``Agreement.gather``.
        """
        self.rank, self.size = world.rank, world.size
        self._world = world
        self._lane = lane
        self._agreement = Agreement(self.rank, self.size, gather_numbers)

    @abstractmethod
    def _reduce(self, vector: Tensor, op: ReduceOp) -> None:
        """Reduce a vector in place; ``op`` is any but AVERAGE. Runs in the lane."""

    @abstractmethod
    def _reduce_rows(self, encoded: Tensor, counts: list[int], op: ReduceOp) -> Tensor:
        """Return this rank's rows of the reduction; ``encoded`` may be overwritten."""

    @abstractmethod
    def _gather_rows(self, gathered: Tensor, own: Tensor, counts: list[int]) -> None:
        """Put all ranks' bytes into ``gathered``; runs in the lane.

        Args:
            gathered: The bytes of all rows.
            own: Those of this rank's; they may lie in ``gathered`` already.
            counts: How many bytes each rank has.
        """

    @abstractmethod
    def _copy(self, vector: Tensor, root: int) -> None:
        """Copy the root's bytes, in place; runs in the lane."""

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce in place: see ``Communicator``."""
        self._require_usable(tensor)
        require_reducible(tensor.dtype, op, prescale, postscale)
        if not tensor.numel():
            return Done(tensor)
        reduction = Reduction(op, prescale, postscale, self.size)

        def steps() -> Tensor:
            encoded = reduction.encode(tensor, is_kept=False)
            self._reduce(flat(encoded), reduction.travelling_op)
            return put_back(reduction.decode(encoded, tensor.dtype), tensor)

        return self._submit("all_reduce", steps)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate along dimension 0: see ``Communicator``."""
        self._require_usable(tensor)
        counts = self._agreement.on_rows("all_gather", tensor, out)
        rest = tensor.shape[1:]
        gathered = tensor.new_empty((sum(counts), *rest)) if out is None else out
        if not gathered.numel():
            return Done(gathered)
        own = as_bytes(dense(apart_from(tensor, out, sum(counts[: self.rank]))))
        row_bytes = rest.numel() * tensor.element_size()
        sizes = [count * row_bytes for count in counts]

        def steps() -> Tensor:
            self._gather_rows(as_bytes(gathered.detach()), own, sizes)
            return gathered

        return self._submit("all_gather", steps)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Tensor | None = None,
    ) -> Work[Tensor]:
        """Reduce and keep this rank's rows: see ``Communicator``."""
        self._require_usable(tensor)
        require_reducible(tensor.dtype, op, prescale, postscale)
        if tensor.ndim == 0:
            raise UsageError(
                "tensor must have at least one dimension, got a scalar. "
                "Use tensor.reshape(1)."
            )
        counts = rows(tensor.shape[0], self.size)
        require_out(out, tensor, counts[self.rank])
        shape = (counts[self.rank], *tensor.shape[1:])
        result = tensor.new_empty(shape) if out is None else out
        if not tensor.numel():
            return Done(result)
        reduction = Reduction(op, prescale, postscale, self.size)

        def steps() -> Tensor:
            encoded = reduction.encode(tensor, is_kept=True)
            own = self._reduce_rows(encoded, counts, reduction.travelling_op)
            return put_back(reduction.decode(own, tensor.dtype), result)

        return self._submit("reduce_scatter", steps)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor in place: see ``Communicator``."""
        self._require_usable(tensor)
        require_root(root, self.size)
        if not tensor.numel():
            return Done(tensor)

        def steps() -> Tensor:
            values = dense(tensor)
            self._copy(as_bytes(values), root)
            return tensor if self.rank == root else put_back(values, tensor)

        return self._submit("broadcast", steps)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Exchange rows by the communicator below: see ``Communicator``."""
        self._require_usable(tensor)
        # Ranks that call all_gather instead wait for this rank's layout here.
        self._agreement.on_call(Layout.of("all_to_all", tensor, None))
        return self._world.all_to_all(tensor, splits, out=out)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send by the communicator below: see ``Communicator``."""
        return self._world.send(tensor, to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive by the communicator below: see ``Communicator``."""
        return self._world.recv(tensor, source, tag)

    def barrier(self) -> Work[None]:
        """Complete when all have called: see ``Communicator``."""
        return self._world.barrier()

    def abort(self) -> None:
        """Close at once: see ``Communicator``."""
        self._lane.abort()
        self._world.abort()

    def close(self) -> None:
        """Give all back; not collective, and calls may be repeated."""
        self._lane.close()
        self._world.close()

    def _submit(self, name: str, steps: Callable[[], T]) -> Work[T]:
        place = f"{name} on rank {self.rank} of {self.size} by {self.engine}"
        return self._lane.submit(place, steps)

    def _require_usable(self, tensor: Tensor) -> None:
        self._lane.require_open()
        if tensor.device.type != "cpu":
            raise UsageError(
                f"device must be cpu for engine {self.engine}, got {tensor.device}. "
                "Copy the tensor to the CPU, or use engine nccl."
            )
