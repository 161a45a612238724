"""One rank: no process group, no thread, no socket."""

from collections.abc import Sequence
from typing import Never

import torch
from torch import Tensor

from ronde.collectives.arithmetic import scale_
from ronde.collectives.engine import Engine, Native, ReduceOp, Reduction, Work
from ronde.errors import CollectiveError


class SoloEngine(Engine):
    """Moves tensors of any device to where they are."""

    name = "solo"
    rank = 0
    size = 1
    timeout_s = 0.0
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        self._is_closed = False

    def require_open(self) -> None:
        """Refuse once closed: see ``Engine``."""
        if self._is_closed:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )

    def native(
        self,
        call: str,  # noqa: ARG002  the interface's
        dtype: torch.dtype,  # noqa: ARG002
        op: ReduceOp,
        device_type: str,  # noqa: ARG002
    ) -> Native:
        """Take every dtype as it is."""
        return Native(op, scales=True)

    def all_reduce(self, source: Tensor, out: Tensor, what: Reduction) -> Work[None]:
        """Copy and scale."""
        self.require_open()
        _copy(source, out)
        scale_(out, what.prescale)
        scale_(out, what.postscale)
        return Work(None)

    def reduce_scatter(
        self,
        source: Tensor,
        out: Tensor,
        counts: Sequence[int],  # noqa: ARG002
        what: Reduction,
    ) -> Work[None]:
        """Copy and scale."""
        return self.all_reduce(source, out, what)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:  # noqa: ARG002
        """Return one row."""
        self.require_open()
        return own.unsqueeze(0)

    def all_gather(
        self,
        own: Tensor,
        out: Tensor,
        counts: Sequence[int],  # noqa: ARG002
    ) -> Work[None]:
        """Copy."""
        _copy(own, out)
        return Work(None)

    def all_to_all(
        self,
        sent: Tensor,
        received: Tensor,
        plan: Sequence[Sequence[int]],  # noqa: ARG002
    ) -> Work[None]:
        """Copy."""
        _copy(sent, received)
        return Work(None)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:  # noqa: ARG002
        """Leave all as it is."""
        return self.barrier()

    def send(self, data: Tensor, to: int, tag: int) -> Never:
        """There is no other rank: ``Communicator`` has refused the call."""
        raise AssertionError(data, to, tag)

    def recv(self, data: Tensor, source: int, tag: int) -> Never:
        """There is no other rank: ``Communicator`` has refused the call."""
        raise AssertionError(data, source, tag)

    def barrier(self) -> Work[None]:
        """Return at once."""
        self.require_open()
        return Work(None)

    def clone(self) -> "SoloEngine":
        """Return another."""
        self.require_open()
        return SoloEngine()

    def close(self) -> None:
        """Refuse later calls; there is nothing to give back."""
        self._is_closed = True


def _copy(source: Tensor, out: Tensor) -> None:
    if source.data_ptr() != out.data_ptr():
        out.copy_(source)
