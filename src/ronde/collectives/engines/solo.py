"""The engine of a single rank, without process group, thread or socket."""

from collections.abc import Sequence
from typing import Never

from torch import Tensor

from ronde.collectives.arithmetic import scale_
from ronde.collectives.engine import (
    Engine,
    Plan,
    ReduceOp,
    Reduction,
    Work,
    closed_error,
)


class SoloEngine(Engine):
    """Engine of one rank, which copies inputs to outputs on any device."""

    name = "solo"
    rank = 0
    size = 1
    timeout_s = 0.0
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        self._is_closed = False

    def require_open(self) -> None:
        if self._is_closed:
            raise closed_error()

    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction:
        return Reduction(op, scales=True)

    def all_reduce(
        self, source: Tensor, out: Tensor, reduction: Reduction
    ) -> Work[None]:
        self.require_open()
        _copy(source, out)
        scale_(out, reduction.prescale)
        scale_(out, reduction.postscale)
        return Work(None)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> Work[None]:
        return self.all_reduce(source, out, reduction)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        self.require_open()
        return own.unsqueeze(0)

    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[None]:
        _copy(own, out)
        return Work(None)

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[None]:
        _copy(sent, received)
        return Work(None)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        return self.barrier()

    def send(self, data: Tensor, to: int, tag: int) -> Never:
        raise AssertionError(data, to, tag)

    def recv(self, data: Tensor, source: int, tag: int) -> Never:
        raise AssertionError(data, source, tag)

    def barrier(self) -> Work[None]:
        self.require_open()
        return Work(None)

    def clone(self) -> "SoloEngine":
        self.require_open()
        return SoloEngine()

    def close(self) -> None:
        self._is_closed = True


def _copy(source: Tensor, out: Tensor) -> None:
    if source.data_ptr() != out.data_ptr():
        out.copy_(source)
