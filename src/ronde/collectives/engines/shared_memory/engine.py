"""Collectives of the ranks of one machine, through memory that all of them map."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import Store

from ronde.collectives.arguments import (
    require_out,
    require_peer,
    require_root,
    require_splits,
)
from ronde.collectives.arithmetic import dense
from ronde.collectives.communicator import Communicator, Done, ReduceOp, Work, rows
from ronde.collectives.engines.shared_memory import movements, reductions
from ronde.collectives.engines.shared_memory.exchanges import among, through_store
from ronde.collectives.engines.shared_memory.executor import Executor
from ronde.collectives.engines.shared_memory.ground import Call, Ground
from ronde.collectives.engines.shared_memory.mail import BOX_BYTES, PostOffice
from ronde.collectives.engines.shared_memory.peers import Peers, Process
from ronde.collectives.engines.shared_memory.reductions import Asked
from ronde.collectives.engines.shared_memory.segment import Exchange, share_segments
from ronde.collectives.engines.shared_memory.stage import Heap, Stage, slot_bytes
from ronde.collectives.engines.shared_memory.words import Header, Places
from ronde.collectives.failures import Scene
from ronde.collectives.layouts import Layout
from ronde.errors import UsageError

_CPU = torch.device("cpu")
_PAGE_BYTES = 4096


class SharedMemoryCommunicator(Communicator):
    """A communicator of ranks that run on one machine. It moves CPU tensors.

    Attributes:
        rank: This process in the group.
        size: Number of processes in the group.
        timeout_s: How long a collective may wait for the other ranks.
    """

    engine = "shared_memory"

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        """Connect to all other ranks; collective.

        Args:
            store: Where the ranks meet, empty under the keys used here.
            rank: This process.
            size: Number of processes.
            timeout_s: How long any collective, and this call, may wait for a rank.

        Raises:
            CollectiveError: Not all ranks came in time, they are not all on this
                machine, or there is not enough memory.
        """
        with Scene("connecting", rank, size, timeout_s).guard():
            exchange = through_store(store, rank, size, timeout_s)
            self._connect(exchange, rank, size, timeout_s)

    def _connect(
        self, exchange: Exchange, rank: int, size: int, timeout_s: float
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        told = exchange(Process.of(os.getpid()).encode())
        peers = Peers([Process.decode(text) for text in told])
        places = Places(size)
        stage_at = places.num_bytes
        room = slot_bytes(size, is_crowded=peers.is_crowded)
        boxes_at = stage_at + 2 * room
        num_bytes = -(-(boxes_at + size * BOX_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        segments = share_segments(exchange, rank, num_bytes, is_populated=False)
        headers = [Header(segment, places) for segment in segments]
        self._executor = Executor(headers, rank, peers, timeout_s)
        self._ground = Ground(rank, headers, Stage(segments, stage_at, room), Heap())
        self._post = PostOffice(self._executor, headers, segments, boxes_at)
        self._asked = Asked(size)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce in place: see ``Communicator``."""
        if not tensor.is_cpu:
            _require_cpu(tensor)
        what = self._asked.reduction("all_reduce", tensor, op, prescale, postscale)
        if not what.call.numel:
            self._executor.require_usable()
            return Done(tensor)
        flat = tensor if _is_flat(tensor) else dense(tensor).view(-1)
        steps = reductions.all_reduce(self._ground, tensor, flat, flat, what)
        return self._executor.submit("all_reduce", steps)

    def all_reduce_from(
        self,
        source: Tensor,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce from one tensor into another: see ``Communicator``."""
        scaling = {"prescale": prescale, "postscale": postscale}
        if not (_is_plain(source) and _is_plain(tensor)):
            return super().all_reduce_from(source, tensor, op, **scaling)
        what = self._asked.reduction("all_reduce", tensor, op, **scaling)
        flat, taken = tensor.detach().view(-1), source.detach().view(-1)
        steps = reductions.all_reduce(self._ground, tensor, flat, taken, what)
        return self._executor.submit("all_reduce", steps)

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
        _require_cpu(tensor)
        what = self._asked.reduction("reduce_scatter", tensor, op, prescale, postscale)
        if tensor.ndim == 0:
            raise UsageError(
                "tensor must have at least one dimension, got a scalar. "
                "Use tensor.reshape(1)."
            )
        num_rows = rows(tensor.shape[0], self.size)
        require_out(out, tensor, num_rows[self.rank])
        steps = reductions.reduce_scatter(self._ground, tensor, num_rows, what, out)
        return self._executor.submit("reduce_scatter", steps)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate along dimension 0: see ``Communicator``."""
        with self._telling_refusal("all_gather", tensor):
            require_out(out, tensor)
        steps = movements.all_gather(self._ground, tensor, out)
        return self._executor.submit("all_gather", steps)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor in place: see ``Communicator``."""
        require_root(root, self.size)
        _require_cpu(tensor)
        if not tensor.numel():
            self._executor.require_usable()
            return Done(tensor)
        call = Call("broadcast", str(tensor.dtype), tensor.numel(), f" from {root}")
        steps = movements.broadcast(self._ground, tensor, root, call)
        return self._executor.submit("broadcast", steps)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Exchange rows: see ``Communicator``."""
        with self._telling_refusal("all_to_all", tensor):
            sent = require_splits(tensor, splits, self.size)
            require_out(out, tensor)
        steps = movements.all_to_all(self._ground, tensor, sent, out)
        return self._executor.submit("all_to_all", steps)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send to one rank: see ``Communicator``."""
        require_peer("to", to, self.rank, self.size)
        _require_cpu(tensor)
        self._executor.require_usable()
        if not tensor.numel():
            return Done(None)
        return self._post.send(tensor, to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive from one rank: see ``Communicator``."""
        require_peer("source", source, self.rank, self.size)
        _require_cpu(tensor)
        self._executor.require_usable()
        if not tensor.numel():
            return Done(tensor)
        return self._post.recv(tensor, source, tag)

    def barrier(self) -> Work[None]:
        """Complete when all have called: see ``Communicator``."""
        return self._executor.submit("barrier", movements.barrier(self._ground))

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> Tensor:
        """Return zeros that all ranks map: see ``Communicator``."""
        if device.type != "cpu" or numel == 0:
            return super().allocate(numel, dtype, device)
        num_bytes = -(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
        segments = share_segments(among(self), self.rank, num_bytes, is_populated=True)
        own = self._ground.heap.add(segments, self.rank)
        with torch.inference_mode(mode=False):
            return own[: numel * dtype.itemsize].view(dtype)

    def duplicate(self) -> "SharedMemoryCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        self._executor.require_usable()
        copy = SharedMemoryCommunicator.__new__(SharedMemoryCommunicator)
        copy._connect(among(self), self.rank, self.size, self.timeout_s)  # noqa: SLF001  its own
        return copy

    def close(self) -> None:
        """End the helper thread; not collective, and calls may be repeated."""
        self._executor.close()

    @contextmanager
    def _telling_refusal(self, name: str, tensor: Tensor) -> Generator[None]:
        """Require what the CPU can move; tell the others of any wrong argument."""
        try:
            _require_cpu(tensor)
            yield
        except UsageError:
            refused = Layout.refused(name, tensor)
            self._executor.submit(name, movements.refuse(self._ground, refused))
            raise


def _is_flat(tensor: Tensor) -> bool:
    """Say whether a tensor may be read and written as it is."""
    return tensor.dim() == 1 and not (
        tensor.requires_grad
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is elements one after the other on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.numel() > 0


def _require_cpu(tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise UsageError(
            "tensor must be on the CPU for the engine shared_memory, got one on "
            f"{tensor.device}. Use the engine auto or nccl."
        )
