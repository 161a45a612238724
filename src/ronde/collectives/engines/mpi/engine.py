"""Collectives on MPI, through mpi4py."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ronde.collectives.arguments import apart_from, require_peer, require_root
from ronde.collectives.arithmetic import as_bytes, dense, put_back
from ronde.collectives.communicator import Communicator, Done, ReduceOp, Work
from ronde.collectives.engines.mpi import reductions, requests
from ronde.collectives.engines.mpi.buffers import Parts
from ronde.collectives.engines.mpi.library import MPI, load
from ronde.collectives.engines.mpi.wire import Wire, require_cpu
from ronde.collectives.layouts import Agreement
from ronde.errors import UsageError


class MpiCommunicator(Communicator):
    """A communicator of MPI's ranks, apart from whatever the program does with MPI.

    MPI moves bytes only inside of its calls: a collective under way goes on while this
    process waits for it, asks whether it is done, or makes another call.

    Attributes:
        rank: This process in the group.
        size: Number of processes in the group.
        timeout_s: How long a collective may wait for the other ranks.
    """

    engine = "mpi"

    def __init__(self, wire: Wire) -> None:
        """Take over a communicator of MPI's that nobody else uses."""
        self.rank = wire.rank
        self.size = wire.size
        self.timeout_s = wire.timeout_s
        self._wire = wire
        self._agreement = Agreement(wire.rank, wire.size, wire.gather)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce in place: see ``Communicator``."""
        return reductions.all_reduce(self._wire, tensor, op, prescale, postscale)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate along dimension 0: see ``Communicator``."""
        self._require_ready(tensor)
        counts = self._agreement.on_rows("all_gather", tensor, out)
        rest = tensor.shape[1:]
        result = tensor.new_empty((sum(counts), *rest)) if out is None else out
        if not result.numel():
            return Done(result)
        data = as_bytes(result.detach())
        row_bytes = rest.numel() * tensor.element_size()
        parts = Parts.of([count * row_bytes for count in counts])
        first_row = sum(counts[: self.rank])
        own = as_bytes(dense(apart_from(tensor, out, first_row)))
        place = parts.of_rank(data, self.rank)
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        start = partial(
            requests.gather, data=data, parts=parts, max_count=self._wire.max_count
        )
        return self._wire.begin("all_gather", start, lambda: result, (data,))

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
        scales = prescale, postscale
        return reductions.reduce_scatter(self._wire, tensor, op, scales, out)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor in place: see ``Communicator``."""
        require_root(root, self.size)
        self._require_ready(tensor)
        if not tensor.numel():
            return Done(tensor)
        values = dense(tensor)
        start = partial(
            requests.broadcast,
            data=as_bytes(values),
            root=root,
            max_count=self._wire.max_count,
        )
        is_new = self.rank != root
        finish = partial(put_back, values, tensor) if is_new else lambda: tensor
        return self._wire.begin("broadcast", start, finish, (values,))

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Exchange rows: see ``Communicator``."""
        self._require_ready(tensor)
        plan = self._agreement.on_splits(tensor, splits, out)
        sent_rows, counts = plan[self.rank], [row[self.rank] for row in plan]
        rest = tensor.shape[1:]
        result = tensor.new_empty((sum(counts), *rest)) if out is None else out
        row_bytes = rest.numel() * tensor.element_size()
        if not row_bytes or not any(map(sum, plan)):
            return Done((result, counts))
        source = as_bytes(dense(apart_from(tensor[: sum(sent_rows)], out)))
        target = as_bytes(result.detach())
        sent = source, Parts.of([count * row_bytes for count in sent_rows])
        received = target, Parts.of([count * row_bytes for count in counts])
        max_count = self._wire.max_count
        start = partial(requests.exchange, sent=sent, received=received)
        if not requests.is_within(max_count, plan, row_bytes):
            start = partial(
                requests.exchange_by_pairs,
                sent=sent,
                received=received,
                max_count=max_count,
            )
        return self._wire.begin(
            "all_to_all", start, lambda: (result, counts), (source, target)
        )

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send to one rank: see ``Communicator``."""
        require_peer("to", to, self.rank, self.size)
        self._require_ready(tensor)
        if not tensor.numel():
            return Done(None)
        data = as_bytes(dense(tensor))
        start = partial(
            requests.send, data=data, to=to, tag=tag, max_count=self._wire.max_count
        )
        return self._wire.begin("send", start, lambda: None, (data,))

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive from one rank: see ``Communicator``."""
        require_peer("source", source, self.rank, self.size)
        self._require_ready(tensor)
        if not tensor.numel():
            return Done(tensor)
        values = dense(tensor)
        start = partial(
            requests.receive,
            data=as_bytes(values),
            source=source,
            tag=tag,
            max_count=self._wire.max_count,
        )
        return self._wire.begin(
            "recv", start, partial(put_back, values, tensor), (values,)
        )

    def barrier(self) -> Work[None]:
        """Complete when all have called: see ``Communicator``."""
        return self._wire.begin("barrier", _enter_barrier, lambda: None)

    def duplicate(self) -> "MpiCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        return MpiCommunicator(self._wire.duplicate())

    def close(self) -> None:
        """Give MPI's communicator back; calls may be repeated."""
        self._wire.close()

    def _require_ready(self, tensor: Tensor) -> None:
        self._wire.require_open()
        require_cpu(tensor)


def connect_some(
    rank: int, ranks: Sequence[int], *, timeout_s: float
) -> MpiCommunicator:
    """Connect some of the ranks that were started with MPI; collective over them.

    Args:
        rank: This process among them.
        ranks: Their numbers among all.
        timeout_s: How long a collective may wait for a rank.
    """
    library = load()
    world = MPI.COMM_WORLD
    with library.calling():
        group = world.Get_group().Incl(list(ranks))
        comm = world.Create_group(group)
        group.Free()
    return MpiCommunicator(Wire(library, comm, rank, len(ranks), timeout_s))


def connect_world(rank: int, size: int, *, timeout_s: float) -> MpiCommunicator:
    """Connect all ranks that were started with MPI; collective.

    Args:
        rank: This process, as its launcher said.
        size: Number of processes, likewise.
        timeout_s: How long a collective may wait for a rank.

    Raises:
        UsageError: MPI knows of other ranks than the launcher.
        CollectiveError: Not all ranks came in time.
    """
    library = load()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        raise UsageError(
            f"MPI must know the ranks that the launcher started, but it says rank "
            f"{world.rank} of {world.size} where the launcher says {rank} of {size}. "
            "Start the program with mpirun of the MPI that mpi4py loads "
            f"({MPI.Get_library_version().partition(',')[0]}), or with: ronde run "
            "--engine mpi"
        )
    # The world itself is the program's; it is never closed here.
    return MpiCommunicator(Wire(library, world, rank, size, timeout_s)).duplicate()


def _enter_barrier(comm: MPI.Intracomm) -> list[MPI.Request]:
    return [comm.Ibarrier()]
