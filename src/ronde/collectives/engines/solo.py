"""Collectives of one rank: no process group, no thread, no socket."""

from collections.abc import Sequence

from torch import Tensor

from ronde.collectives.arguments import (
    apart_from,
    require_out,
    require_peer,
    require_root,
    require_splits,
)
from ronde.collectives.arithmetic import dense, require_reducible, scale_
from ronde.collectives.communicator import Communicator, Done, ReduceOp, Work
from ronde.errors import CollectiveError, UsageError


class SoloCommunicator(Communicator):
    """A communicator of one rank, which keeps to the rules of all others."""

    engine = "solo"
    rank = 0
    size = 1

    def __init__(self) -> None:
        self._is_closed = False

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Scale in place: see ``Communicator``."""
        self._require_open()
        require_reducible(tensor.dtype, op, prescale, postscale)
        scale_(tensor, prescale)
        scale_(tensor, postscale)
        return Done(tensor)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Copy: see ``Communicator``."""
        self._require_rows("all_gather", tensor)
        return Done(_copy(tensor, out))

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Tensor | None = None,
    ) -> Work[Tensor]:
        """Copy and scale: see ``Communicator``."""
        require_reducible(tensor.dtype, op, prescale, postscale)
        self._require_rows("reduce_scatter", tensor)
        return self.all_reduce(
            _copy(tensor, out), op, prescale=prescale, postscale=postscale
        )

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Leave ``tensor`` as it is: see ``Communicator``."""
        self._require_open()
        require_root(root, self.size)
        return Done(tensor)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Copy the rows that ``splits`` names: see ``Communicator``."""
        self._require_open()
        counts = require_splits(tensor, splits, self.size)
        return Done((_copy(tensor[: counts[0]], out), counts))

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:  # noqa: ARG002  the interface's
        """Refuse: there is no other rank.

        Raises:
            UsageError: Always.
        """
        self._require_open()
        require_peer("to", to, self.rank, self.size)
        return Done(None)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:  # noqa: ARG002  the interface's
        """Refuse: there is no other rank.

        Raises:
            UsageError: Always.
        """
        self._require_open()
        require_peer("source", source, self.rank, self.size)
        return Done(tensor)

    def barrier(self) -> Work[None]:
        """Return at once: see ``Communicator``."""
        self._require_open()
        return Done(None)

    def duplicate(self) -> "SoloCommunicator":
        """Return another: see ``Communicator``."""
        self._require_open()
        return SoloCommunicator()

    def close(self) -> None:
        """Refuse later calls; there is nothing to give back."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )

    def _require_rows(self, name: str, tensor: Tensor) -> None:
        self._require_open()
        if tensor.ndim == 0:
            raise UsageError(
                f"{name} must be given at least one dimension, got a scalar. "
                "Use tensor.reshape(1)."
            )


def _copy(tensor: Tensor, out: Tensor | None) -> Tensor:
    """Copy in row-major order, apart from autograd.

    Raises:
        UsageError: ``out`` cannot hold the copy.
    """
    require_out(out, tensor, tensor.shape[0])
    values = dense(apart_from(tensor, out, 0))
    if out is None:
        return values.clone()
    if out.data_ptr() != values.data_ptr():
        out.detach().copy_(values)
    return out
