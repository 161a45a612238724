"""One communicator of MPI's, and how its calls become works."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ronde.collectives.engines.mpi.buffers import MAX_COUNT, memory
from ronde.collectives.engines.mpi.library import MPI, Library
from ronde.collectives.engines.mpi.work import MpiWork
from ronde.collectives.failures import Scene
from ronde.errors import CollectiveError, UsageError

T = TypeVar("T")

Start = Callable[[MPI.Intracomm], Sequence[MPI.Request]]


@dataclass(slots=True)
class Wire:
    """A communicator of MPI's.

    Attributes:
        library: MPI.
        comm: None once it was closed.
        rank: This process in it.
        size: Number of processes in it.
        timeout_s: How long a call may wait for the other ranks.
        max_count: Elements in one of MPI's calls, equal on all ranks.
    """

    library: Library
    comm: MPI.Intracomm | None
    rank: int
    size: int
    timeout_s: float
    max_count: int = MAX_COUNT

    def begin(
        self,
        name: str,
        start: Start,
        finish: Callable[[], T],
        held: Sequence[Tensor] = (),
    ) -> MpiWork[T]:
        """Start a collective.

        Args:
            name: Its name.
            start: Makes the requests; at least one.
            finish: Turns the bytes into the result.
            held: The tensors that MPI reads and writes until then.

        Raises:
            CollectiveError: The communicator is closed, or MPI refused the call.
        """
        comm = self.require_open()
        scene = Scene(name, self.rank, self.size, self.timeout_s)
        with scene.guard(), self.library.calling():
            requests = start(comm)
        return MpiWork(
            self.library, requests, finish, scene, held, lambda: self.comm is None
        )

    def gather(self, own: Tensor) -> Tensor:
        """Return every rank's vector of numbers, a row a rank; blocks."""
        gathered = own.new_empty((self.size, own.numel()))

        def start(comm: MPI.Intracomm) -> list[MPI.Request]:
            places = memory(own), memory(gathered)
            return [comm.Iallgather(*([place, MPI.BYTE] for place in places))]

        held = (own, gathered)
        return self.begin("agreeing on sizes", start, lambda: gathered, held).wait()

    def duplicate(self) -> "Wire":
        """Make another of the same ranks; collective and blocking."""
        made: list[MPI.Intracomm] = []

        def start(comm: MPI.Intracomm) -> list[MPI.Request]:
            copy, request = comm.Idup()
            made.append(copy)
            return [request]

        copy = self.begin("duplicate", start, lambda: made[0]).wait()
        return Wire(
            self.library, copy, self.rank, self.size, self.timeout_s, self.max_count
        )

    def require_open(self) -> MPI.Intracomm:
        """Return the communicator.

        Raises:
            CollectiveError: It is closed.
        """
        if self.comm is None:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )
        return self.comm

    def close(self) -> None:
        """Give the communicator back, unless something failed: then MPI may hang."""
        comm, self.comm = self.comm, None
        if comm is None or self.library.has_failed or MPI.Is_finalized():
            return
        with self.library.calling():
            comm.Free()


def require_cpu(tensor: Tensor) -> None:
    """Refuse tensors that MPI cannot be trusted to read.

    Raises:
        UsageError: The tensor is not on the CPU.
    """
    if tensor.device != torch.device("cpu"):
        raise UsageError(
            f"device must be cpu for the engine mpi, got {tensor.device}. Copy the "
            "tensor to the CPU, or use the engine nccl."
        )
