"""The process groups of torch's that move the bytes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
)
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions

from ronde.collectives.engines.torch_distributed.work import Pending
from ronde.errors import CollectiveError, UsageError

# torch's stubs give the backends' methods no common type.
Backend = Any


def reduce_options(op: Any) -> AllreduceOptions:
    """Return what torch's ``allreduce`` is to be told."""
    options: Any = AllreduceOptions()
    options.reduceOp = op
    return options


def broadcast(backend: Backend, tensor: Tensor, root: int) -> Pending:
    """Copy a contiguous tensor from ``root``."""
    options: Any = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return backend.broadcast([tensor], options)


def all_gather_even(backend: Backend, gathered: Tensor, own: Tensor) -> Pending:
    """Gather equal, contiguous shares; ``gathered`` holds ``size`` times ``own``."""
    # torch gives the form without lists no public name on a backend.
    return backend._allgather_base(gathered, own)  # noqa: SLF001


class Groups:
    """The process groups of one communicator, made when they are first needed.

    Making one is collective: the first CUDA tensor comes on every rank in the same call.

    Attributes:
        gloo: The group for CPU tensors and for agreeing on sizes.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, *, is_one_host: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._is_one_host = is_one_host
        self._nccl: Backend | None = None
        self._lane: Lane | None = None
        self._is_closed = False
        self.gloo: Backend = self._make_gloo("gloo")

    def of(self, device: torch.device) -> Backend:
        """Return the group that moves tensors of ``device``.

        Raises:
            UsageError: No engine here moves such tensors.
            CollectiveError: The groups are closed.
        """
        if self._is_closed:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )
        if device.type == "cpu":
            return self.gloo
        if device.type != "cuda":
            raise UsageError(
                f"device must be cpu or cuda, got {device}. Copy the tensor to the CPU."
            )
        if self._nccl is None:
            self._nccl = self._make_nccl()
        return self._nccl

    def lane(self) -> "Lane":
        """Return the thread for reductions of several steps, and its own group."""
        if self._lane is None:
            self._lane = Lane(self._make_gloo("lane"))
        return self._lane

    def close(self) -> None:
        """End all threads and connections; what is under way fails."""
        self._is_closed = True
        lane, nccl, gloo = self._lane, self._nccl, self.gloo
        self._lane = self._nccl = self.gloo = None
        if lane is not None:
            lane.close()
        if nccl is not None:
            nccl.abort()
        if gloo is not None:
            gloo.shutdown()

    def _make_gloo(self, name: str) -> Backend:
        options: Any = ProcessGroupGloo._Options()  # noqa: SLF001  the only name in 2.11
        options._timeout = self._timeout  # noqa: SLF001  likewise
        if self._is_one_host:
            # The host's own name may lead nowhere; the loopback is always there.
            device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
        else:
            device = ProcessGroupGloo.create_default_device()
        options._devices = [device]  # noqa: SLF001  likewise
        store = PrefixStore(name, self._store)
        group: Backend = ProcessGroupGloo(store, self._rank, self._size, options)
        # Nobody leaves before all are connected: rank 0's store may go at any time.
        group.barrier().wait()
        return group

    def _make_nccl(self) -> Backend:
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise UsageError(
                "torch must be built with NCCL to reduce CUDA tensors, got "
                f"{torch.__version__}."
            ) from error
        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout  # noqa: SLF001  the only name
        store = PrefixStore("nccl", self._store)
        return ProcessGroupNCCL(store, self._rank, self._size, options)


class Lane:
    """A thread that runs collectives of several steps, in the order of the calls.

    The second step may start only when the first is over, and all ranks must start
    their steps in one order. So the steps have a group and a thread to themselves.
    """

    def __init__(self, group: Backend) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")

    def submit(self, steps: Callable[[Backend], None]) -> Future[None]:
        """Call ``steps`` with the group once all earlier steps are over."""
        return self._thread.submit(steps, self._group)

    def close(self) -> None:
        """Close the group, which fails what is under way, and end the thread."""
        self._group.shutdown()
        self._thread.shutdown(cancel_futures=True)
        self._group = None
