"""Collectives by schedules, over another engine's point-to-point calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from ronde.collectives.algorithms import find_algorithm
from ronde.collectives.arguments import (
    apart_from,
    require_out,
    require_root,
)
from ronde.collectives.arithmetic import as_bytes, dense, require_reducible
from ronde.collectives.communicator import Communicator, Done, ReduceOp, Work, rows
from ronde.collectives.engines.scheduled.executor import PIECE_BYTES, Executor
from ronde.collectives.engines.scheduled.programs import Programs
from ronde.collectives.lane import Lane
from ronde.collectives.layouts import Agreement
from ronde.collectives.vectors import Reduction, flat, put
from ronde.errors import UsageError

T = TypeVar("T")


class ScheduledCommunicator(Communicator):
    """A communicator that follows an algorithm's schedules.

    It sends and receives over a duplicate of another communicator, in a thread; what
    has no schedule (``all_to_all``, ``send``, ``recv``, ``barrier``) goes to the other
    itself. Tensors must be on the CPU.

    Attributes:
        algorithm: Name of the algorithm.
        rank: This process in the group.
        size: Number of processes in the group.
    """

    engine = "scheduled"

    def __init__(self, inner: Communicator, algorithm: str = "ring") -> None:
        """Take a communicator over; collective.

        Args:
            inner: What moves the messages; closed with this one.
            algorithm: One of ``ALGORITHMS``, equal on all ranks.

        Raises:
            UsageError: There is no such algorithm.
        """
        self.algorithm = find_algorithm(algorithm).name
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._programs = Programs(algorithm, inner.rank, inner.size, PIECE_BYTES)
        messages = inner.duplicate()
        self._lane = Lane(messages)
        self._executor = Executor(messages)
        self._agreement = Agreement(self.rank, self.size, self._gather)

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
            vector = flat(encoded)
            program = self._programs.all_reduce(vector.numel(), vector.element_size())
            self._executor.run(program, vector, op)
            return put(reduction.decode(encoded, tensor.dtype), tensor)

        return self._submit("all_reduce", steps)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate along dimension 0: see ``Communicator``."""
        self._require_usable(tensor)
        counts = self._agreement.on_rows("all_gather", tensor, out)
        first, count = sum(counts[: self.rank]), counts[self.rank]
        rest = tensor.shape[1:]
        gathered = tensor.new_empty((sum(counts), *rest)) if out is None else out
        own = apart_from(tensor, out, first).detach()
        row_bytes = rest.numel() * tensor.element_size()
        sizes = tuple(num_rows * row_bytes for num_rows in counts)

        def steps() -> Tensor:
            put(own, gathered.detach()[first : first + count])
            if sum(sizes):
                program = self._programs.all_gather(sizes)
                self._executor.run(program, as_bytes(gathered.detach()))
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
        first, count = sum(counts[: self.rank]), counts[self.rank]
        result = tensor.new_empty((count, *tensor.shape[1:])) if out is None else out
        if not tensor.numel():
            return Done(result)
        reduction = Reduction(op, prescale, postscale, self.size)

        def steps() -> Tensor:
            encoded = reduction.encode(tensor, is_kept=True)
            vector = flat(encoded)
            per_row = vector.numel() // tensor.shape[0]
            sizes = tuple(num_rows * per_row for num_rows in counts)
            program = self._programs.reduce_scatter(sizes, vector.element_size())
            self._executor.run(program, vector, op)
            own = encoded[first : first + count]
            return put(reduction.decode(own, tensor.dtype), result)

        return self._submit("reduce_scatter", steps)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor in place: see ``Communicator``."""
        self._require_usable(tensor)
        require_root(root, self.size)
        if not tensor.numel():
            return Done(tensor)

        def steps() -> Tensor:
            values = dense(tensor)
            vector = as_bytes(values)
            self._executor.run(self._programs.broadcast(vector.numel(), root), vector)
            return tensor if self.rank == root else put(values, tensor)

        return self._submit("broadcast", steps)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Exchange rows by the other engine: see ``Communicator``."""
        self._require_usable(tensor)
        # Ranks that call all_gather instead wait for this rank's layout here.
        self._agreement.on_splits(tensor, splits, out)
        return self._inner.all_to_all(tensor, splits, out=out)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send to one rank by the other engine: see ``Communicator``."""
        return self._inner.send(tensor, to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive from one rank by the other engine: see ``Communicator``."""
        return self._inner.recv(tensor, source, tag)

    def barrier(self) -> Work[None]:
        """Complete when all have called: see ``Communicator``."""
        return self._inner.barrier()

    def duplicate(self) -> "ScheduledCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        return ScheduledCommunicator(self._inner.duplicate(), self.algorithm)

    def abort(self) -> None:
        """Close at once: see ``Communicator``."""
        self._lane.close()
        self._inner.abort()

    def close(self) -> None:
        """Give thread and sockets back; not collective, and calls may be repeated."""
        self._lane.close()
        self._inner.close()

    def _submit(self, name: str, steps: Callable[[], T]) -> Work[T]:
        return self._lane.submit(f"{name} by {self.algorithm}", steps)

    def _require_usable(self, tensor: Tensor) -> None:
        self._lane.require_open()
        if tensor.device.type != "cpu":
            raise UsageError(
                f"device must be cpu for engine scheduled, got {tensor.device}. Copy "
                "the tensor to the CPU, or use engine nccl."
            )

    def _gather(self, own: Tensor) -> Tensor:
        """Return every rank's vector of numbers, a row a rank; collective, blocking."""
        gathered = own.new_empty((self.size, own.numel()))
        gathered[self.rank] = own
        # So short a message is told in the fewest rounds, whatever the algorithm is.
        programs = replace(self._programs, algorithm="halving_doubling")
        program = programs.all_gather((own.numel() * own.element_size(),) * self.size)
        vector = as_bytes(gathered)
        self._submit("agreeing", lambda: self._executor.run(program, vector)).wait()
        return gathered
