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
    ReduceOp as TorchOp,
    Store,
)
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions

from ronde.collectives.engines.torch_distributed.listener import (
    let_nobody_in,
    make_listening,
)
from ronde.collectives.engines.torch_distributed.nccl import Nccl
from ronde.collectives.engines.torch_distributed.own_address import find_own_address
from ronde.collectives.engines.torch_distributed.work import Awaited, Pending
from ronde.collectives.inference import in_mode_of_caller
from ronde.errors import CollectiveError, UsageError

# torch's stubs give the backends' methods no common type.
Backend = Any
_UNUSED_TAG = (1 << 31) - 1
_SHORT = timedelta(milliseconds=1)


def reduce_options(op: TorchOp.RedOpType) -> AllreduceOptions:
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
    return backend._allgather_base(gathered, own)  # noqa: SLF001  it has no other name


class Groups:
    """The process groups of one communicator, made when they are first needed.

    Making one is collective: the first CUDA tensor comes in the same call on all ranks.
    Gloo's is made at once: all ranks agree on sizes through it.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, *, is_one_host: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)
        # A host's own name may lead nowhere; the loopback is always there.
        self._address = (
            "127.0.0.1"
            if is_one_host
            else find_own_address(
                PrefixStore("address", store), rank, size, self._timeout
            )
        )
        self._is_closed = False
        self._lane: Lane | None = None
        self._nccl: Nccl | None = None
        self._backends: dict[str, Backend] = {"cpu": self._make_gloo("gloo")}

    def of(self, device: torch.device) -> Backend:
        """Return the group that moves tensors of ``device``.

        Raises:
            UsageError: No engine here moves such tensors.
            CollectiveError: The groups are closed.
        """
        if self._nccl is not None:
            # Else what another rank waits for would wait for what is called now.
            self._nccl.start_messages()
        backend = self._backends.get(device.type)
        if backend is None:
            backend = self.connect_nccl(device).group
        return backend

    @property
    def cuda_device(self) -> torch.device | None:
        """The device that NCCL is connected on; None where it is not."""
        return None if self._nccl is None else self._nccl.device

    def connect_nccl(self, device: torch.device) -> Nccl:
        """Return the group that moves CUDA tensors; collective the first time.

        Raises:
            UsageError: No engine here moves tensors of ``device``.
            CollectiveError: The groups are closed, or the ranks do not come together.
        """
        self._require_open()
        if device.type != "cuda":
            raise UsageError(
                f"device must be cpu or cuda, got {device}. Copy the tensor to the CPU."
            )
        if self._nccl is None:
            self._nccl = Nccl(
                PrefixStore("nccl", self._store),
                self._rank,
                self._size,
                timeout=self._timeout,
                device=device,
            )
            self._backends["cuda"] = self._nccl.group
        return self._nccl

    def send(self, values: Tensor, to: int, tag: int) -> Pending:
        """Send contiguous bytes to one rank."""
        if not values.is_cpu:
            return self.connect_nccl(values.device).send(values, to, tag)
        return Awaited(self.of(values.device).send([values], to, tag))

    def recv(self, values: Tensor, source: int, tag: int) -> Pending:
        """Receive contiguous bytes from one rank."""
        if not values.is_cpu:
            return self.connect_nccl(values.device).recv(values, source, tag)
        return Awaited(self.of(values.device).recv([values], source, tag))

    def lane(self) -> "Lane":
        """Return the thread for reductions of several steps, and its own group."""
        self._require_open()
        if self._lane is None:
            self._lane = Lane(self._make_gloo("lane"))
        return self._lane

    def abort(self) -> None:
        """Close, and make what is under way fail here and on the other ranks.

        Gloo has no call for that, and its groups live on in what is under way. But one
        message that times out ends all connections of its group.
        """
        gloo = self._backends.get("cpu")
        groups = [self._lane.group] if self._lane else []
        for group in [*groups, *([gloo] if gloo else [])]:
            _break_off(group, self._rank, self._size)
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None
        self.close()

    def close(self) -> None:
        """End all threads and connections."""
        self._is_closed = True
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        nccl, self._nccl = self._nccl, None
        self._backends.pop("cuda", None)
        if nccl is not None:
            nccl.close()
        while self._backends:
            self._backends.popitem()[1].shutdown()

    def _require_open(self) -> None:
        if self._is_closed:
            raise CollectiveError(
                "communicator must be open, got a closed one. Connect again."
            )

    def _make_gloo(self, name: str) -> Backend:
        store = PrefixStore(name, self._store)
        gloo: Any = ProcessGroupGloo
        options: Any = self._timeout
        listening: dict[int, int] = {}
        if self._address:
            options = gloo._Options()  # noqa: SLF001  the only name in torch 2.11
            options._timeout = self._timeout  # noqa: SLF001  likewise
            device, listening = make_listening(
                lambda: gloo.create_device(hostname=self._address), self._address
            )
            options._devices = [device]  # noqa: SLF001  likewise
        group: Backend = gloo(store, self._rank, self._size, options)
        # Nobody leaves before all are connected: rank 0's store may go at any time.
        group.barrier().wait()
        let_nobody_in(listening)
        return group


def _break_off(gloo: Backend, rank: int, size: int) -> None:
    for peer in range(size):
        if peer == rank:
            continue
        try:
            gloo.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(_SHORT)
        except RuntimeError as error:
            if "Timed out" in str(error):
                return  # with a peer that is gone it is no time-out


class Lane:
    """A thread that runs collectives of several steps, in the order of the calls.

    The second step may start only when the first is over, and all ranks must start
    their steps in one order. So the steps have a group and a thread to themselves.

    Attributes:
        group: The group; None once closed.
    """

    def __init__(self, group: Backend) -> None:
        self.group: Any = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")

    def submit(self, steps: Callable[[Backend], None]) -> Future[None]:
        """Call ``steps`` with the group once all earlier steps are over."""
        return self._thread.submit(in_mode_of_caller(steps), self.group)

    def close(self) -> None:
        """Close the group, which fails what is under way, and end the thread."""
        self.group.shutdown()
        self._thread.shutdown(cancel_futures=True)
        self.group = None
