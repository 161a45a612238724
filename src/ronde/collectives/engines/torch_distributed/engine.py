"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from ronde.collectives.arguments import (
    require_peer,
    require_root,
)
from ronde.collectives.arithmetic import as_bytes, dense, put_back
from ronde.collectives.communicator import Communicator, Done, ReduceOp, Work
from ronde.collectives.engines.torch_distributed import steps
from ronde.collectives.engines.torch_distributed.groups import (
    Groups,
    all_gather_even,
    broadcast,
)
from ronde.collectives.engines.torch_distributed.reductions import Reductions
from ronde.collectives.engines.torch_distributed.work import TorchWork
from ronde.collectives.failures import Scene
from ronde.collectives.layouts import Agreement


class TorchDistributedCommunicator(Communicator):
    """A communicator on process groups of its own.

    torch's default group (``init_process_group``) is left to the program.

    Attributes:
        rank: This process in the group.
        size: Number of processes in the group.
        timeout_s: How long a collective may wait for the other ranks.
    """

    engine = "gloo"

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, is_one_host: bool
    ) -> None:
        """Connect to all other ranks; collective.

        Args:
            store: Where the ranks meet, empty under the keys used here.
            rank: This process.
            size: Number of processes.
            timeout_s: How long any collective, and this call, may wait for a rank.
            is_one_host: All ranks are on this host; they use the loopback then.

        Raises:
            CollectiveError: Not all ranks came in time.
        """
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._store = store
        self._is_one_host = is_one_host
        self._num_duplicates = 0
        with self._scene("connecting").guard():
            self._groups = Groups(store, rank, size, timeout_s, is_one_host=is_one_host)
        self._agreement = Agreement(rank, size, self._gather)
        self._reductions = Reductions(self._groups, rank, size, timeout_s)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce in place: see ``Communicator``."""
        return self._reductions.all_reduce(tensor, op, prescale, postscale)

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate along dimension 0: see ``Communicator``."""
        scene = self._scene("all_gather")
        with scene.guard():
            backend = self._groups.of(tensor.device)
            counts = self._agreement.on_rows(scene.name, tensor, out)
            pending, gathered = steps.gather_rows(
                backend, self.rank, tensor, counts, out
            )
        return TorchWork(pending, lambda: gathered, scene)

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
        return self._reductions.reduce_scatter(tensor, op, prescale, postscale, out)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor in place: see ``Communicator``."""
        require_root(root, self.size)
        scene = self._scene("broadcast")
        with scene.guard():
            backend = self._groups.of(tensor.device)
            if not tensor.numel():
                return Done(tensor)
            values = dense(tensor)
            pending = broadcast(backend, as_bytes(values), root)
        is_new = self.rank != root
        return TorchWork(
            (pending,), lambda: put_back(values, tensor) if is_new else tensor, scene
        )

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Exchange rows: see ``Communicator``."""
        scene = self._scene("all_to_all")
        with scene.guard():
            backend = self._groups.of(tensor.device)
            plan = self._agreement.on_splits(tensor, splits, out)
            sent, counts = plan[self.rank], [row[self.rank] for row in plan]
            has_rows = any(map(sum, plan))
            pending, received = steps.exchange_rows(
                backend, tensor, sent, counts, out, is_empty=not has_rows
            )
        return TorchWork(pending, lambda: (received, counts), scene)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send to one rank: see ``Communicator``."""
        require_peer("to", to, self.rank, self.size)
        scene = self._scene("send")
        with scene.guard():
            if not tensor.numel():
                return Done(None)
            pending = self._groups.send(as_bytes(dense(tensor)), to, tag)
        return TorchWork((pending,), lambda: None, scene)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive from one rank: see ``Communicator``."""
        require_peer("source", source, self.rank, self.size)
        scene = self._scene("recv")
        with scene.guard():
            if not tensor.numel():
                return Done(tensor)
            values = dense(tensor)
            pending = self._groups.recv(as_bytes(values), source, tag)
        return TorchWork((pending,), lambda: put_back(values, tensor), scene)

    def barrier(self) -> Work[None]:
        """Complete when all have called: see ``Communicator``."""
        scene = self._scene("barrier")
        with scene.guard():
            pending = self._groups.of(torch.device("cpu")).barrier()
        return TorchWork((pending,), lambda: None, scene)

    def duplicate(self) -> "TorchDistributedCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        self._groups.of(torch.device("cpu"))
        self._num_duplicates += 1
        copy = TorchDistributedCommunicator(
            PrefixStore(f"duplicate{self._num_duplicates}", self._store),
            self.rank,
            self.size,
            timeout_s=self.timeout_s,
            is_one_host=self._is_one_host,
        )
        if self._groups.cuda_device is not None:
            # Its first call may come in another order than the original's next one.
            copy._groups.connect_nccl(self._groups.cuda_device)
        return copy

    def abort(self) -> None:
        """Close at once: see ``Communicator``."""
        with suppress(RuntimeError):
            self._groups.abort()

    def close(self) -> None:
        """Give threads and sockets back; not collective, and calls may be repeated."""
        with suppress(RuntimeError):
            self._groups.close()

    def _scene(self, name: str) -> Scene:
        return Scene(name, self.rank, self.size, self.timeout_s)

    def _gather(self, own: Tensor) -> Tensor:
        """Return every rank's vector of numbers, a row a rank; collective, blocking."""
        gathered = own.new_empty((self.size, own.numel()))
        gloo = self._groups.of(own.device)
        all_gather_even(gloo, as_bytes(gathered), as_bytes(own)).wait()
        return gathered
