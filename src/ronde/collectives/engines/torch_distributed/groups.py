"""torch's process groups, and their works."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
)
from torch.distributed.distributed_c10d import BroadcastOptions

from ronde.collectives.engine import ErrorContext, Look, Work, closed_error
from ronde.collectives.engines.torch_distributed.gloo_sockets import (
    find_own_address,
    let_nobody_in,
    make_listening,
)
from ronde.collectives.lane import FutureWork
from ronde.collectives.torch_modes import in_mode_of_caller
from ronde.errors import UsageError

_FOR_EVER = timedelta(0)
"""What torch takes for it."""
# torch's stubs give the backends' methods no common type.
Backend = Any
_UNUSED_TAG = (1 << 31) - 1
_SHORT = timedelta(milliseconds=1)
_SHORTEST_PAUSE_S = 0.001
_CLOSE_WITHIN_S = 5.0
"""How long what is under way may take to end by itself, and the peers to let go."""


class BackendWork(Protocol):
    """The part of ``torch.distributed.Work`` that is used here."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = _FOR_EVER) -> object:
        """Block until the bytes are there; raises RuntimeError after the timeout."""
        ...


class TorchWork(Work[None]):
    """One or more of torch's works and what is left to do after them.

    Only one thread at a time may wait for it.
    """

    __slots__ = ("_after", "_context", "_pending")

    def __init__(
        self,
        pending: Sequence[BackendWork],
        context: ErrorContext,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(None, is_over=False)
        self._pending = pending
        self._context = context
        self._after = after

    def _poll(self) -> bool:
        return all(pending.is_completed() for pending in self._pending)

    def _block(self, look: Look | None) -> bool:
        if look is not None:
            # Only wait() orders the stream that is current then.
            return self._watch(look)
        try:
            for pending in self._pending:
                pending.wait()
        except RuntimeError as error:
            self.failure = self._context.explain(error)
            self.failure.__cause__ = error
        else:
            if self._after is not None:
                self._after()
        self.is_over = True
        self._pending, self._after = (), None
        return True

    def _watch(self, look: Look) -> bool:
        for pending in self._pending:
            while not pending.is_completed():
                pause_s = look()
                if pause_s is None:
                    return False
                with suppress(RuntimeError):  # also of a failure: it is raised later
                    pause_s = max(pause_s, _SHORTEST_PAUSE_S)
                    pending.wait(timedelta(seconds=pause_s))
        return True


class AwaitedMessage:
    """A send or receive: torch tells only whoever waits that it is over.

    So a thread waits, from the first ``is_completed()`` on.
    """

    __slots__ = ("_inner", "_outcome")

    def __init__(self, inner: BackendWork) -> None:
        self._inner = inner
        self._outcome: Future[object] | None = None

    def is_completed(self) -> bool:
        if self._outcome is None:
            self._outcome = Future()
            threading.Thread(
                target=self._wait_into, args=(self._outcome,), daemon=True
            ).start()
        return self._outcome.done()

    def wait(self, timeout: timedelta = _FOR_EVER) -> object:
        if self._outcome is None:
            return self._inner.wait(timeout)
        if timeout and not wait((self._outcome,), timeout.total_seconds()).done:
            raise RuntimeError("Operation timed out!")
        return self._outcome.result()

    def _wait_into(self, outcome: Future[object]) -> None:
        try:
            outcome.set_result(self._inner.wait())
        except RuntimeError as error:
            outcome.set_exception(error)


class Nccl:
    """One process group of NCCL's, connected; collective to make.

    Connected at once, since the first call would do it, and wait there for the other
    ranks: two groups whose first calls come in another order on another rank would wait
    for ever.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise UsageError(
                "torch must be built with NCCL to reduce CUDA tensors, got "
                f"{torch.__version__}."
            ) from error
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001  the only name
        self.device = device
        self.group: Any = ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(device):
            self.group.eager_connect_single_device(device)
        self._gathered: list[GroupedMessage] = []

    def send(self, values: Tensor, to: int, tag: int) -> BackendWork:
        return self._gather(tag, lambda: self.group.send([values], to, 0))

    def recv(self, values: Tensor, source: int, tag: int) -> BackendWork:
        return self._gather(tag, lambda: self.group.recv([values], source, 0))

    def start_messages(self) -> None:
        """Start what was gathered, as one group.

        A message keeps the stream until its counterpart runs. Started one by one, two
        ranks that both receive first and then send would wait for ever.
        """
        messages, self._gathered = self._gathered, []
        if not messages:
            return
        self.group._start_coalescing()  # noqa: SLF001  it has no other name
        try:
            for message in messages:
                message.post()
        finally:
            work = self.group._end_coalescing()  # noqa: SLF001  likewise
        for message in messages:
            message.work = work

    def close(self) -> None:
        """End connections and threads: gracefully if that is soon done, or else not.

        Aborted at once, NCCL would drop what the network has not yet taken, which
        another rank waits for. But a peer that is gone is waited for in vain.
        """
        self._gathered.clear()
        if not self._is_idle():
            self.group.abort()
            return

        def shut_down() -> None:
            with suppress(RuntimeError), torch.cuda.device(self.device):
                self.group.shutdown()

        thread = threading.Thread(target=shut_down, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python itself ends, and starts no thread any more
            self.group.abort()
            return
        thread.join(_CLOSE_WITHIN_S)

    def abort(self) -> None:
        self._gathered.clear()
        self.group.abort()

    def _gather(self, tag: int, post: Callable[[], object]) -> "GroupedMessage":
        if tag:
            raise UsageError(
                f"tag must be 0 for CUDA tensors, got {tag}: NCCL has no tags. Leave "
                "it out, and receive in the order in which the other rank sends."
            )
        message = GroupedMessage(self, post)
        self._gathered.append(message)
        return message

    def _is_idle(self) -> bool:
        """Wait a moment for the stream; say whether it has done all it was given."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        end_s = time.monotonic() + _CLOSE_WITHIN_S
        while not done.query():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.001)
        return True


class GroupedMessage:
    """A send or receive that has started, or will with others: torch's ``Work``."""

    __slots__ = ("_nccl", "_post", "_ready", "work")

    def __init__(self, nccl: Nccl, post: Callable[[], object]) -> None:
        self._nccl = nccl
        self._post = post  # holds the tensor, too
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(nccl.device))
        self.work: Any = None

    def post(self) -> None:
        """Give it to NCCL, on whichever stream is current by now."""
        torch.cuda.current_stream(self._nccl.device).wait_event(self._ready)
        self._post()

    def is_completed(self) -> bool:
        return bool(self._started().is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> object:
        """Order the current stream after them; with a timeout, block the thread."""
        return self._started().wait(timeout)

    def _started(self) -> Any:  # noqa: ANN401  torch's stubs give works no common type
        if self.work is None:
            self._nccl.start_messages()
        if self.work is None:
            raise RuntimeError("the communicator was closed")
        return self.work


def broadcast(backend: Backend, tensor: Tensor, root: int) -> BackendWork:
    options: Any = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return backend.broadcast([tensor], options)


def all_gather_even(backend: Backend, gathered: Tensor, own: Tensor) -> BackendWork:
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
        self._address = "127.0.0.1"
        if not is_one_host:
            addresses = PrefixStore("address", store)
            self._address = find_own_address(addresses, rank, size, self._timeout)
        self._is_closed = False
        self._thread: ThreadPoolExecutor | None = None
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

    def send(self, values: Tensor, to: int, tag: int) -> BackendWork:
        if not values.is_cpu:
            return self.connect_nccl(values.device).send(values, to, tag)
        return AwaitedMessage(self.of(values.device).send([values], to, tag))

    def recv(self, values: Tensor, source: int, tag: int) -> BackendWork:
        if not values.is_cpu:
            return self.connect_nccl(values.device).recv(values, source, tag)
        return AwaitedMessage(self.of(values.device).recv([values], source, tag))

    def submit(
        self, context: ErrorContext, steps: Callable[[Backend], None]
    ) -> FutureWork[None]:
        """Call ``steps`` in a thread, once all earlier ones are over.

        The second step may start only when the first is over, and all ranks must start
        their steps in one order. So the steps have a group and a thread to themselves.
        """
        self._require_open()
        if self._thread is None:
            self._backends["steps"] = self._make_gloo("lane")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")
        group = self._backends["steps"]

        def run() -> None:
            with context.guard():
                steps(group)

        return FutureWork(self._thread.submit(in_mode_of_caller(run)))

    def abort(self) -> None:
        """Close, and make what is under way fail here and on the other ranks.

        Gloo has no call for that, and its groups live on in what is under way. But one
        message that times out ends all connections of its group.
        """
        for name in ("steps", "cpu"):
            if name in self._backends:
                _break_off(self._backends[name], self._rank, self._size)
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None
        self.close()

    def close(self) -> None:
        self._is_closed = True
        nccl, self._nccl = self._nccl, None
        self._backends.pop("cuda", None)
        if nccl is not None:
            nccl.close()
        while self._backends:
            self._backends.popitem()[1].shutdown()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed_error()

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
