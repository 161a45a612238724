"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA.

Note [Gloo's sockets]
    By default Gloo resolves its own host's name. On many hosts the name resolves to the
    loopback address, which other hosts cannot reach. The address of the route to rank 0
    works, as the store has been reached through it.

    Gloo listens as long as its group exists, even when all ranks are connected, and
    keeps every connection. A few hundred connections from another program exhaust the
    rank's descriptors, and Gloo ends the process (``accept: Too many open files``). The
    listening socket cannot be closed while Gloo uses it, but a socket filter makes the
    kernel drop every packet to it. Open connections are separate sockets.

    Gloo has no call that ends its connections. A message that times out ends them, but
    Gloo waits up to 10 ms for each. A shutdown through their descriptors ends them at
    once. They are the connections to or from a port of a listening rank of the group.

Note [Messages that Gloo loses]
    When a connection ends, Gloo fails the waits for messages that have not begun. It
    loses messages that are partly received, messages that wait for room to be sent, and
    sends on a connection that was shut down. The waits for these last until the group's
    timeout (``Pair::signalException`` in Gloo's tcp/pair.cc). After an abort every
    connection has ended, so nothing is written into tensors any more. So waits give up
    shortly after a group was aborted. The group and the work are kept until Gloo gives
    up, too, since freeing them blocks as well.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp as TorchOp, Store
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions

from ronde.addresses import is_loopback, read_interfaces, source_towards
from ronde.collectives.arithmetic import (
    HALVES,
    PLAIN,
    reduce_stack,
    rounds_often,
    scale_,
)
from ronde.collectives.engine import (
    CPU,
    Engine,
    ErrorContext,
    MessageSteps,
    Plan,
    PollCallback,
    ReduceOp,
    Reduction,
    Work,
    closed_error,
)
from ronde.collectives.gloo_messages import (
    UNUSED_TAG,
    Backend,
    BackendWork,
    GlooMessage,
    Waiters,
    is_cut_off,
)
from ronde.collectives.lane import FutureWork
from ronde.collectives.sockets import (
    address_of,
    block_connections,
    find_listening,
    shut_down,
)
from ronde.collectives.store import (
    JobStore,
    RendezvousStore,
    base_of,
    clone_of,
    get_all,
    scope_of,
)
from ronde.collectives.torch_modes import in_mode_of_caller, writing_to
from ronde.errors import UsageError
from ronde.world.environment import select_variables

_ADDRESS_BYTES = 64
_SHORT, _TILL_SHUT = timedelta(milliseconds=1), timedelta(milliseconds=100)
_SHORTEST_PAUSE_S = 0.001
_CONNECT_LIMIT = timedelta(seconds=10)
_LAST_S = 0.05  # limit of waits after the group was aborted
_CHECK_EVERY = timedelta(milliseconds=100)
_MOST_KNOWN = 16
_CLOSE_WITHIN_S = 5.0  # for pending works, and again for NCCL's shutdown
_LAZY = "TORCH_GLOO_LAZY_INIT"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_making = threading.Lock()


Wait = Callable[[BackendWork], object]


class TorchWork(Work[None]):
    """Several of torch's works, and a function to call when they are complete."""

    __slots__ = ("_after", "_context", "_groups", "_pending")

    def __init__(
        self,
        groups: "Groups | None",
        pending: Sequence[BackendWork],
        context: ErrorContext,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(None, is_over=False)
        self._groups = groups  # None for NCCL's works
        self._pending = pending
        self._context = context
        self._after = after

    def _poll(self) -> bool:
        return all(pending.is_completed() for pending in self._pending)

    def _block(self, poll: PollCallback | None) -> bool:
        if poll is not None:
            # Only wait() orders the current stream after the work.
            return self._watch(poll)
        try:
            for pending in self._pending:
                if self._groups is None:
                    pending.wait()
                else:
                    self._groups.wait_for(pending)
        except RuntimeError as error:
            self.failure = self._context.explain(error)
            # Its traceback holds the group: see Note [Tracebacks hold groups] in scope.
            self.failure.__cause__ = error.with_traceback(None)
        else:
            if self._after is not None:
                self._after()
        self.is_over = True
        self._pending, self._after = (), None
        return True

    def _watch(self, poll: PollCallback) -> bool:
        for pending in self._pending:
            while not pending.is_completed():
                if self._groups is not None and self._groups.is_given_up(pending):
                    break
                pause_s = poll()
                if pause_s is None:
                    return False
                with suppress(RuntimeError):  # a time-out or a failure, raised later
                    pause_s = max(pause_s, _SHORTEST_PAUSE_S)
                    pending.wait(timedelta(seconds=pause_s))
        return True


class Nccl:
    """An NCCL process group; its constructor is collective."""

    # The constructor connects. If first calls connected, two groups whose first calls
    # come in different orders on two ranks would wait for ever.

    def __init__(
        self, store: Store, rank: int, size: int, limit: timedelta, device: torch.device
    ) -> None:
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise UsageError(
                f"torch {torch.__version__} was built without NCCL, which CUDA tensors "
                "need. Install a CUDA build of torch."
            ) from error
        options = ProcessGroupNCCL.Options()
        options._timeout = limit  # noqa: SLF001  the only name
        self.device = device
        self.group: Any = ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(device):
            self.group.eager_connect_single_device(device)
        self._gathered: list[GroupedMessage] = []

    def message(
        self, call: str, values: Tensor, peer: int, tag: int
    ) -> "GroupedMessage":
        """Queue a ``send`` or ``recv``; NCCL starts all queued messages together."""
        if tag:
            raise UsageError(
                f"tag must be 0 for CUDA tensors, as NCCL has no tags, got {tag}. Omit "
                "the tag, and receive messages in the order in which they are sent."
            )
        post = getattr(self.group, call)
        message = GroupedMessage(self, lambda: post([values], peer, 0))
        self._gathered.append(message)
        return message

    def start_messages(self) -> None:
        # Started one by one, two ranks that both receive first would wait for ever.
        messages, self._gathered = self._gathered, []
        if not messages:
            return
        self.group._start_coalescing()  # noqa: SLF001  the only name
        try:
            for message in messages:
                message.post()
        finally:
            work = self.group._end_coalescing()  # noqa: SLF001  the only name
        for message in messages:
            message.work = work

    def close(self) -> None:
        """End connections and threads; abort if works do not end soon."""
        # An immediate abort would drop messages for which another rank waits.
        self._gathered.clear()
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        end_s = time.monotonic() + _CLOSE_WITHIN_S
        while not done.query():
            if time.monotonic() > end_s:
                self.group.abort()
                return
            time.sleep(0.001)

        def shut_down() -> None:
            with suppress(RuntimeError), torch.cuda.device(self.device):
                self.group.shutdown()

        thread = threading.Thread(target=shut_down, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is exiting and starts no more threads
            self.group.abort()
            return
        thread.join(_CLOSE_WITHIN_S)

    def abort(self) -> None:
        self._gathered.clear()
        self.group.abort()


class GroupedMessage:
    """A send or receive of NCCL that starts together with other messages."""

    __slots__ = ("_nccl", "_post", "_ready", "work")

    def __init__(self, nccl: Nccl, post: Callable[[], object]) -> None:
        self._nccl = nccl
        self._post = post  # also keeps the tensor alive
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(nccl.device))
        self.work: Any = None

    def post(self) -> None:
        torch.cuda.current_stream(self._nccl.device).wait_event(self._ready)
        self._post()

    def is_completed(self) -> bool:
        return bool(self._started().is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> object:
        return self._started().wait(timeout)

    def _started(self) -> Any:  # noqa: ANN401  torch's stubs give works no common type
        if self.work is None:
            self._nccl.start_messages()
        if self.work is None:
            raise RuntimeError("the communicator was closed")
        return self.work


class Groups:
    """The process groups of one communicator; NCCL connects at its first use."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, *, is_one_host: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._scope = scope_of(store)
        # The host's own name may not resolve; the loopback always works.
        self._address = "127.0.0.1"
        if not is_one_host:
            addresses = PrefixStore("address", store)
            self._address = _find_own_address(addresses, rank, size, self._timeout)
        self._is_closed = False
        self._given_up_s = math.inf
        self._in_progress: set[BackendWork] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._waiters = Waiters()
        self._nccl: Nccl | None = None
        self._backends: dict[str, Backend] = {}
        self._addresses: set[bytes] = set()  # at which the ranks listen
        self._stores: list[Store] = []  # kept alive with the groups
        self._scope.add(self.abort)
        self._make_gloo("gloo", "cpu")

    def of(self, device: torch.device) -> Backend:
        self._require_open()  # see Note [Messages that Gloo loses]
        if self._nccl is not None:
            # Otherwise messages that another rank needs would wait for the next call.
            self._nccl.start_messages()
        return self._backends.get(device.type) or self.connect_nccl(device).group

    @property
    def cuda_device(self) -> torch.device | None:
        return None if self._nccl is None else self._nccl.device

    def connect_nccl(self, device: torch.device) -> Nccl:
        """Return the group for CUDA tensors; the first call is collective."""
        self._require_open()
        if device.type != "cuda":
            raise UsageError(
                f"device must be cpu or cuda, got {device}. Copy the tensor to the CPU."
            )
        if self._nccl is None:
            store = PrefixStore("nccl", self._store)
            self._nccl = Nccl(store, self._rank, self._size, self._timeout, device)
            self._backends["cuda"] = self._nccl.group
        return self._nccl

    def message(self, call: str, values: Tensor, peer: int, tag: int) -> BackendWork:
        if not values.is_cpu:
            return self.connect_nccl(values.device).message(call, values, peer, tag)
        return self._post(self.of(values.device), call, values, peer, tag)

    def _post(
        self, gloo: Backend, call: str, values: Tensor, peer: int, tag: int
    ) -> GlooMessage:
        work = getattr(gloo, call)([values], peer, tag)
        return GlooMessage(work, self._waiters, partial(is_cut_off, gloo, peer))

    def track(self, work: BackendWork) -> BackendWork:
        known = self._in_progress
        known.add(work)
        if len(known) > _MOST_KNOWN:
            done = [each for each in known.copy() if each.is_completed()]
            known.difference_update(done)
        return work

    def wait_for(self, work: BackendWork) -> None:
        """Wait for a work on CPU tensors; see Note [Messages that Gloo loses]."""
        while not work.is_completed():
            if self.is_given_up(work):
                raise RuntimeError("connection closed")
            with suppress(RuntimeError):  # a time-out or a failure, raised below
                work.wait(_CHECK_EVERY)
        self._in_progress.discard(work)
        work.wait()

    def run_messages(self, steps: MessageSteps) -> None:
        """Run steps that exchange CPU tensors, in a thread that can be abandoned."""
        # One thread runs all, as a hand-over of each message would cost two switches.
        gloo, awaited = self.of(CPU), deque[GlooMessage](maxlen=1)

        def wait(message: GlooMessage) -> None:
            awaited.append(message)
            message.wait()

        call = in_mode_of_caller(steps)
        outcome = self._waiters.start(lambda: call(partial(self._post, gloo), wait))
        try:
            while True:
                with suppress(TimeoutError):
                    outcome.result(_CHECK_EVERY.total_seconds())
                    return
                if awaited and self.is_given_up(awaited[0]):
                    raise RuntimeError("connection closed")
        finally:
            del outcome  # see Note [Tracebacks hold groups] in scope.py

    def is_given_up(self, work: BackendWork) -> bool:
        """Return True if the wait for an incomplete work should end."""
        is_lost = isinstance(work, GlooMessage) and work.is_lost()
        return is_lost or time.monotonic() > self._given_up_s

    def submit(
        self, context: ErrorContext, steps: Callable[[Backend, Wait], None]
    ) -> FutureWork[None]:
        # All ranks must run their steps in the same order, one after the other, so the
        # steps have their own group and thread.
        self._require_open()
        if self._thread is None:
            self._make_gloo("lane", "steps")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")
        group = self._backends["steps"]

        def run() -> None:
            with context:
                steps(group, lambda work: self.wait_for(self.track(work)))

        return FutureWork(self._thread.submit(in_mode_of_caller(run)))

    def abort(self) -> None:
        """Close; calls in progress fail here and on the other ranks."""
        with suppress(RuntimeError):
            self._disconnect()
        self._given_up_s = min(self._given_up_s, time.monotonic() + _LAST_S)
        # In the background: Gloo takes up to 10 ms to end a group's thread.
        self._scope.call_later(self._free)

    def _free(self) -> None:
        groups, works = list(self._backends.values()), self._in_progress.copy()
        for work in works:
            with suppress(RuntimeError):
                self.wait_for(work)
        if left := [work for work in works if not work.is_completed()]:
            threading.Thread(target=_hold, args=(groups, left), daemon=True).start()
        self.close()

    def close(self) -> None:
        self._is_closed = True
        nccl, self._nccl = self._nccl, None
        self._backends.pop("cuda", None)
        if nccl is not None:
            nccl.close()
        with suppress(KeyError):  # another thread may end some of them
            while True:
                self._backends.popitem()[1].shutdown()
        self._waiters.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _disconnect(self) -> None:
        self._is_closed = True
        shut_down(self._addresses)
        for name in ("steps", "cpu"):
            if name in self._backends:
                self._end_messages(self._backends[name])
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()

    def _end_messages(self, gloo: Backend) -> None:
        """Wait until no connection moves data: see Note [Gloo's sockets]."""
        for peer in range(self._size):
            if peer == self._rank:
                continue
            nothing = [torch.empty(1, device="cpu")]
            limit = _TILL_SHUT if self._addresses else _SHORT
            try:
                gloo.recv(nothing, peer, UNUSED_TAG).wait(limit)
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return  # other errors mean that this peer is gone

    def _require_open(self) -> None:
        if self._is_closed:
            self._scope.check()
            raise closed_error()

    def _make_gloo(self, name: str, use: str) -> None:
        store: Store = PrefixStore(name, self._store)
        # torch connects two ranks when they first exchange data.
        text = select_variables([_LAZY]).get(_LAZY, "0")
        is_lazy = text.lower() in ("1", "true", "yes", "y")
        if not is_lazy:
            store = RendezvousStore(store, self._size)
            self._stores.append(store)
        gloo: Any = ProcessGroupGloo
        # After an abort a thread may wait this long for lost ranks.
        limit = _CONNECT_LIMIT if self._scope.is_live else self._timeout
        options: Any = limit
        listening: dict[int, int] = {}
        if self._address:
            options = gloo._Options()  # noqa: SLF001  the only name in torch 2.11
            options._timeout = limit  # noqa: SLF001  the only name
            with _making:  # another thread may open sockets at the same time
                before = find_listening(self._address)
                device = gloo.create_device(hostname=self._address)
                after = find_listening(self._address)
            listening = {fd: i for fd, i in after.items() if before.get(fd) != i}
            options._devices = [device]  # noqa: SLF001  the only name
        rank, size = self._rank, self._size
        group: Backend = self._scope.run(lambda: gloo(store, rank, size, options))
        group._set_default_timeout(self._timeout)  # noqa: SLF001  its name in torch
        self._backends[use] = group
        if self._scope.failure is not None:
            self.abort()
        own = b"" if is_lazy else address_of(listening)
        # Waits for all ranks to connect, as rank 0 and its store may end after this.
        sent = torch.frombuffer(bytearray(own.ljust(_ADDRESS_BYTES)), dtype=torch.uint8)
        gathered = sent.new_empty(size * _ADDRESS_BYTES)
        work = group._allgather_base(gathered, sent)  # noqa: SLF001  its name in torch
        self.wait_for(self.track(work))
        rows = gathered.view(size, _ADDRESS_BYTES)
        self._addresses.update({row.numpy().tobytes().strip() for row in rows} - {b""})
        if not is_lazy:
            block_connections(listening)


def _hold(_groups: Sequence[Backend], works: Sequence[BackendWork]) -> None:
    """Keep groups alive until their works are over."""
    for work in works:
        with suppress(RuntimeError):
            work.wait()


def _find_own_address(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return this host's address on the route to the store; collective.

    Empty if there is no route, or if the user named another interface; torch then
    chooses the address. The store's own host uses the address that other ranks use,
    since its name may resolve to the loopback address.
    """
    target = _find_target(store)
    own = source_towards(target) if target else ""
    is_near = not own or is_loopback(own)
    store.set(f"target/{rank}", "" if is_near else target)
    # The last rank is the most likely to be on another host.
    others = [r for r in reversed(range(size)) if is_near and r != rank]
    for asked in filter(None, (others[:1], others[1:])):
        texts = get_all(store, [f"target/{other}" for other in asked], timeout)
        theirs = dict.fromkeys(text.decode() for text in texts)
        if found := next((a for a in theirs if a and source_towards(a) == a), ""):
            own = found
            break
    named = select_variables([_INTERFACE]).get(_INTERFACE)
    addresses = [i.address for i in read_interfaces() if i.interface == named]
    return "" if named and own not in addresses else own


def _find_target(store: Store) -> str:
    base = base_of(store)
    host = base.address if isinstance(base, JobStore) else getattr(base, "host", "")
    if not host:
        return ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    # The same order on all hosts, as Gloo cannot connect IPv4 to IPv6.
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda a: ":" in a)
    return next((a for a in addresses if source_towards(a)), "")


_TORCH_OPS = {
    ReduceOp.SUM: TorchOp.SUM,
    ReduceOp.MIN: TorchOp.MIN,
    ReduceOp.MAX: TorchOp.MAX,
    ReduceOp.PRODUCT: TorchOp.PRODUCT,
    ReduceOp.AVERAGE: TorchOp.AVG,  # used with NCCL only
}


class TorchDistributedEngine(Engine):
    """Moves tensors through its own process groups, not torch's default group."""

    name = "gloo"
    devices = frozenset({"cpu", "cuda"})

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, is_one_host: bool
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store, self._scope = store, scope_of(store)
        self._is_one_host = is_one_host
        self._num_clones = 0
        self._options: dict[ReduceOp, Any] = {}
        for op in ReduceOp:
            self._options[op] = AllreduceOptions()
            self._options[op].reduceOp = _TORCH_OPS[op]
        with self._context("connecting"):
            self._groups = Groups(store, rank, size, timeout_s, is_one_host=is_one_host)
        self._all_reduce_context = self._context("all_reduce")

    def require_open(self) -> None:
        self._groups.of(CPU)

    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction | None:
        # Gloo rounds a sum of 16-bit floats once for each rank: see ``rounds_often``.
        # NCCL's average divides them first. Instead, ``_reduce_by_shares`` rounds once.
        dtype = like.dtype
        if call == "reduce_scatter":
            return Reduction(op, scales=True)
        is_average = op is ReduceOp.AVERAGE
        if dtype in HALVES and like.is_cuda:
            return Reduction(op)
        is_product = dtype.is_complex and op is ReduceOp.PRODUCT
        if is_product or rounds_often(dtype, op, self.size):
            return Reduction(op, scales=True)
        if dtype.is_floating_point or (dtype in PLAIN and not is_average):
            return Reduction(ReduceOp.SUM if is_average else op)
        return None

    def all_reduce(
        self, source: Tensor, out: Tensor, reduction: Reduction
    ) -> Work[None]:
        backend, context = self._groups.of(out.device), self._all_reduce_context
        if not reduction.scales:
            try:
                pending = backend.allreduce([out], self._options[reduction.op])
            except RuntimeError as error:
                raise context.explain(error) from error
            return self._work((pending,), out.device, context)

        def steps(backend: Backend, wait: Wait) -> None:
            _reduce_by_shares(backend, wait, source, out, reduction)

        if not out.is_cuda:
            return self._groups.submit(context, steps)
        with context:
            # The stream keeps the steps in order; the host does not wait.
            steps(self._groups.of(out.device), lambda work: work.wait())
        return Work(None)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> Work[None]:
        own = counts[self.rank]
        received = source.new_empty(self.size * own)
        if reduction.prescale != 1.0:
            source = source.clone()
            scale_(source, reduction.prescale)
        itemsize = source.element_size()

        def start(backend: Backend) -> BackendWork:
            return backend.alltoall_base(
                received.view(torch.uint8),
                source.view(torch.uint8),
                [own * itemsize] * self.size,
                [count * itemsize for count in counts],
            )

        def finish() -> None:
            stack = received.view(self.size, own)
            with writing_to((out, received)):
                out.copy_(reduce_stack(stack, reduction.op, reduction.postscale))

        return self._start("reduce_scatter", source.device, start, finish)

    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[None]:
        context = self._context(call)
        with context:
            backend = self._groups.of(out.device)
            if len(set(counts)) == 1:
                pending = backend._allgather_base(out, own)  # noqa: SLF001  the only name
                return self._work((pending,), out.device, context)
            # torch cannot gather uneven parts, so every rank broadcasts its part.
            parts: tuple[Tensor, ...] = torch.split(out, list(counts))
            parts[self.rank].copy_(own)
            pending = [
                _broadcast(backend, part, root)
                for root, part in enumerate(parts)
                if part.numel()
            ]
        return self._work(pending, out.device, context)

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[None]:
        arriving, leaving = [row[self.rank] for row in plan], list(plan[self.rank])

        def start(backend: Backend) -> BackendWork:
            return backend.alltoall_base(received, sent, arriving, leaving)

        return self._start("all_to_all", sent.device, start)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        def start(backend: Backend) -> BackendWork:
            return _broadcast(backend, data, root)

        return self._start("broadcast", data.device, start)

    def send(self, data: Tensor, to: int, tag: int) -> Work[None]:
        return self._message("send", data, to, tag)

    def recv(self, data: Tensor, source: int, tag: int) -> Work[None]:
        return self._message("recv", data, source, tag)

    def _message(self, name: str, data: Tensor, peer: int, tag: int) -> Work[None]:
        context = self._context(name)
        with context:
            message = self._groups.message(name, data.view(torch.uint8), peer, tag)
        return TorchWork(self._groups if data.is_cpu else None, (message,), context)

    def run_messages(self, call: str, steps: MessageSteps) -> None:
        with self._context(call):
            self._groups.run_messages(steps)

    def barrier(self) -> Work[None]:
        return self._start("barrier", CPU, lambda backend: backend.barrier())

    def clone(self) -> "TorchDistributedEngine":
        self.require_open()
        self._num_clones += 1
        copy = TorchDistributedEngine(
            PrefixStore(f"duplicate{self._num_clones}", clone_of(self._store)),
            self.rank,
            self.size,
            timeout_s=self.timeout_s,
            is_one_host=self._is_one_host,
        )
        if self._groups.cuda_device is not None:
            # Not at the clone's first call, which may come before or after the
            # original's calls on different ranks.
            copy._groups.connect_nccl(self._groups.cuda_device)
        return copy

    def abort(self) -> None:
        with suppress(RuntimeError):
            self._groups.abort()

    def close(self) -> None:
        with suppress(RuntimeError):
            self._groups.close()

    def _start(
        self,
        name: str,
        device: torch.device,
        start: Callable[[Backend], BackendWork],
        after: Callable[[], None] | None = None,
    ) -> TorchWork:
        context = self._context(name)
        with context:
            pending = start(self._groups.of(device))
            return self._work((pending,), device, context, after)

    def _work(
        self,
        pending: Sequence[BackendWork],
        device: torch.device,
        context: ErrorContext,
        after: Callable[[], None] | None = None,
    ) -> TorchWork:
        if device.type != "cpu":
            return TorchWork(None, pending, context, after)
        for each in pending:
            self._groups.track(each)
        return TorchWork(self._groups, pending, context, after)

    def _context(self, name: str) -> ErrorContext:
        return ErrorContext(name, self.rank, self.size, self.timeout_s, self._scope)


def _broadcast(backend: Backend, tensor: Tensor, root: int) -> BackendWork:
    options: Any = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return backend.broadcast([tensor.view(torch.uint8)], options)


def _reduce_by_shares(
    backend: Backend, wait: Wait, source: Tensor, out: Tensor, reduction: Reduction
) -> None:
    """Reduce a share on each rank, rounding once, then gather the shares."""
    numel, size = source.numel(), backend.size()
    share = -(-numel // size)
    shares = torch.zeros(size * share, dtype=source.dtype, device=source.device)
    shares[:numel] = source
    scale_(shares, reduction.prescale)
    received = torch.empty_like(shares)
    sent: Any = shares.view(torch.uint8)
    wait(backend.alltoall_base(received.view(torch.uint8), sent, [], []))
    reduced = reduce_stack(
        received.view(size, share), reduction.op, reduction.postscale
    )
    wait(backend._allgather_base(sent, reduced.view(torch.uint8)))  # noqa: SLF001
    out.copy_(shares[:numel])
