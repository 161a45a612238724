"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA.

Note [Gloo's sockets]
    Left alone, Gloo looks its own host's name up, which on many a host leads to the
    loopback, where no other host reaches it. The way to rank 0 is known to work: the
    store is there.

    Gloo goes on to listen for as long as its group lives, though nobody is to come any
    more, and keeps every connection that comes: some hundred of a stranger's use up the
    rank's descriptors, and Gloo ends the process (``accept: Too many open files``). The
    socket cannot be closed under Gloo's hands. But a socket filter can have the kernel
    drop every packet to it: open connections are sockets of their own.

    Gloo has no call that ends its connections. What ends them is a message that times
    out, and then Gloo waits up to 10 ms for each of them. Shut down by their
    descriptors, they end at once: they are those to or from a port where a rank of the
    group listens.

Note [What Gloo forgets]
    When a connection ends, Gloo lets those know who wait for a message that has not
    begun. A message that is half received, or that waits for room to be sent, it
    forgets, and so does a send that finds the connection shut down: who waits for it
    waits until the group's time-out (``Pair::signalException`` in Gloo's tcp/pair.cc).
    As every connection has ended by then, nothing comes any more that could be written
    into a tensor. So whoever waits gives up a moment after a group was broken off, for
    which all ranks stand still; the group and the work live until Gloo gives up as
    well, since freeing them waits, too.
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
from torch.distributed import (
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp as TorchOp,
    Store,
)
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
    Look,
    MessageSteps,
    Plan,
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
    find_listening,
    let_nobody_in,
    place_of,
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

_PLACE_BYTES = 64
_SHORT, _TILL_SHUT = timedelta(milliseconds=1), timedelta(milliseconds=100)
_SHORTEST_PAUSE_S = 0.001
_CONNECT_LIMIT = timedelta(seconds=10)
_LAST_S = 0.05  # for a work whose group was broken off
_LOOK = timedelta(milliseconds=100)
_MOST_KNOWN = 16
_CLOSE_WITHIN_S = 5.0  # for what is under way to end, and for peers to let go
_LAZY = "TORCH_GLOO_LAZY_INIT"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_making = threading.Lock()


Wait = Callable[[BackendWork], object]


class TorchWork(Work[None]):
    """torch's works and what is left to do after them; one thread at a time waits."""

    __slots__ = ("_after", "_context", "_groups", "_pending")

    def __init__(
        self,
        groups: "Groups | None",
        pending: Sequence[BackendWork],
        context: ErrorContext,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(None, is_over=False)
        self._groups = groups  # where Gloo's are waited for
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
                if self._groups is None:
                    pending.wait()
                else:
                    self._groups.wait_for(pending)
        except RuntimeError as error:
            self.failure = self._context.explain(error)
            # Its frames hold the group: see Note [What a failure holds] of scope.py.
            self.failure.__cause__ = error.with_traceback(None)
        else:
            if self._after is not None:
                self._after()
        self.is_over = True
        self._pending, self._after = (), None
        return True

    def _watch(self, look: Look) -> bool:
        for pending in self._pending:
            while not pending.is_completed():
                if self._groups is not None and self._groups.is_given_up(pending):
                    break
                pause_s = look()
                if pause_s is None:
                    return False
                with suppress(RuntimeError):  # also of a failure: it is raised later
                    pause_s = max(pause_s, _SHORTEST_PAUSE_S)
                    pending.wait(timedelta(seconds=pause_s))
        return True


class Nccl:
    """One process group of NCCL's; collective to make."""

    # It is connected at once. Left to the first calls, two groups whose first calls
    # come in another order on another rank would wait for ever.

    def __init__(
        self,
        store: Store,
        place: tuple[int, int],
        limit: timedelta,
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
        options._timeout = limit  # noqa: SLF001  the only name
        self.device = device
        self.group: Any = ProcessGroupNCCL(store, *place, options)
        with torch.cuda.device(device):
            self.group.eager_connect_single_device(device)
        self._gathered: list[GroupedMessage] = []

    def message(
        self, call: str, values: Tensor, peer: int, tag: int
    ) -> "GroupedMessage":
        """Note a ``send`` or ``recv`` down, to be started with others."""
        if tag:
            raise UsageError(
                f"tag must be 0 for CUDA tensors, got {tag}: NCCL has no tags. Leave "
                "it out, and receive in the order in which the other rank sends."
            )
        post = getattr(self.group, call)
        message = GroupedMessage(self, lambda: post([values], peer, 0))
        self._gathered.append(message)
        return message

    def start_messages(self) -> None:
        """Start what was gathered, as one group."""
        # Started one by one, two ranks that both first receive would wait for ever.
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
        """End connections and threads: gracefully if that is soon done, or else not."""
        # Aborted at once, NCCL would drop what another rank waits for.
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
        except RuntimeError:  # Python itself ends, and starts no thread any more
            self.group.abort()
            return
        thread.join(_CLOSE_WITHIN_S)

    def abort(self) -> None:
        self._gathered.clear()
        self.group.abort()


class GroupedMessage:
    """A send or receive that has started, or will with others."""

    __slots__ = ("_nccl", "_post", "_ready", "work")

    def __init__(self, nccl: Nccl, post: Callable[[], object]) -> None:
        self._nccl = nccl
        self._post = post  # holds the tensor, too
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
    """The process groups of one communicator: Gloo's, and NCCL's at first use."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, *, is_one_host: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._scope = scope_of(store)
        # A host's own name may lead nowhere; the loopback is always there.
        self._address = "127.0.0.1"
        if not is_one_host:
            addresses = PrefixStore("address", store)
            self._address = _find_own_address(addresses, rank, size, self._timeout)
        self._is_closed = False
        self._given_up_s = math.inf
        self._under_way: set[BackendWork] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._waiters = Waiters()
        self._nccl: Nccl | None = None
        self._backends: dict[str, Backend] = {}
        self._places: set[bytes] = set()
        self._stores: list[Store] = []  # as long as the groups
        self._scope.add(self.abort)
        self._make_gloo("gloo", "cpu")

    def of(self, device: torch.device) -> Backend:
        self._require_open()  # see Note [What Gloo forgets]
        if self._nccl is not None:
            # Else what another rank waits for would wait for what is called now.
            self._nccl.start_messages()
        return self._backends.get(device.type) or self.connect_nccl(device).group

    @property
    def cuda_device(self) -> torch.device | None:
        return None if self._nccl is None else self._nccl.device

    def connect_nccl(self, device: torch.device) -> Nccl:
        """Return the group that moves CUDA tensors; collective the first time."""
        self._require_open()
        if device.type != "cuda":
            raise UsageError(
                f"device must be cpu or cuda, got {device}. Copy the tensor to the CPU."
            )
        if self._nccl is None:
            store, place = PrefixStore("nccl", self._store), (self._rank, self._size)
            self._nccl = Nccl(store, place, self._timeout, device)
            self._backends["cuda"] = self._nccl.group
        return self._nccl

    def message(self, call: str, values: Tensor, peer: int, tag: int) -> BackendWork:
        """Start a ``send`` or ``recv``."""
        if not values.is_cpu:
            return self.connect_nccl(values.device).message(call, values, peer, tag)
        return self._post(self.of(values.device), call, values, peer, tag)

    def _post(
        self, gloo: Backend, call: str, values: Tensor, peer: int, tag: int
    ) -> GlooMessage:
        work = getattr(gloo, call)([values], peer, tag)
        return GlooMessage(work, self._waiters, partial(is_cut_off, gloo, peer))

    def begun(self, work: BackendWork) -> BackendWork:
        """Return a collective of Gloo's, known from now on until it is waited for."""
        known = self._under_way
        known.add(work)
        if len(known) > _MOST_KNOWN:
            done = [each for each in known.copy() if each.is_completed()]
            known.difference_update(done)
        return work

    def wait_for(self, work: BackendWork) -> None:
        """Wait for a work on CPU tensors; see Note [What Gloo forgets]."""
        while not work.is_completed():
            if self.is_given_up(work):
                raise RuntimeError("connection closed")
            with suppress(RuntimeError):  # also of a failure: it is raised below
                work.wait(_LOOK)
        self._under_way.discard(work)
        work.wait()

    def run_messages(self, steps: MessageSteps) -> None:
        """Call what sends and receives on the CPU, in a thread that may be left."""
        # Handed over one by one, each message would cost two switches of threads.
        gloo, awaited = self.of(CPU), deque[GlooMessage](maxlen=1)

        def wait(message: GlooMessage) -> None:
            awaited.append(message)
            message.wait()

        call = in_mode_of_caller(steps)
        outcome = self._waiters.start(lambda: call(partial(self._post, gloo), wait))
        try:
            while True:
                with suppress(TimeoutError):
                    outcome.result(_LOOK.total_seconds())
                    return
                if awaited and self.is_given_up(awaited[0]):
                    raise RuntimeError("connection closed")
        finally:
            del outcome  # see Note [What a failure holds] of scope.py

    def is_given_up(self, work: BackendWork) -> bool:
        """Say whether nobody waits any longer for what is still under way."""
        is_lost = isinstance(work, GlooMessage) and work.is_lost()
        return is_lost or time.monotonic() > self._given_up_s

    def submit(
        self, context: ErrorContext, steps: Callable[[Backend, Wait], None]
    ) -> FutureWork[None]:
        """Call ``steps`` in a thread, once all earlier ones are over."""
        # All ranks must start their steps in one order, the second when the first is
        # over. So the steps have a group and a thread to themselves.
        self._require_open()
        if self._thread is None:
            self._make_gloo("lane", "steps")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ronde-lane")
        group = self._backends["steps"]

        def run() -> None:
            with context:
                steps(group, lambda work: self.wait_for(self.begun(work)))

        return FutureWork(self._thread.submit(in_mode_of_caller(run)))

    def abort(self) -> None:
        """Close, and make what is under way fail here and on the other ranks."""
        with suppress(RuntimeError):
            self._break_off()
        self._given_up_s = min(self._given_up_s, time.monotonic() + _LAST_S)
        # Gloo takes up to 10 ms to end a group's thread; nobody waits for that.
        self._scope.call_later(self._free)

    def _free(self) -> None:
        groups, works = list(self._backends.values()), self._under_way.copy()
        for work in works:
            with suppress(RuntimeError):
                self.wait_for(work)
        if left := [work for work in works if not work.is_completed()]:
            keeping = threading.Thread(target=_keep, args=(groups, left), daemon=True)
            keeping.start()
        self.close()

    def close(self) -> None:
        self._is_closed = True
        nccl, self._nccl = self._nccl, None
        self._backends.pop("cuda", None)
        if nccl is not None:
            nccl.close()
        with suppress(KeyError):  # none is left; another thread may end some of them
            while True:
                self._backends.popitem()[1].shutdown()
        self._waiters.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _break_off(self) -> None:
        self._is_closed = True
        shut_down(self._places)
        for name in ("steps", "cpu"):
            if name in self._backends:
                self._end_messages(self._backends[name])
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()

    def _end_messages(self, gloo: Backend) -> None:
        """Return when no connection moves anything: see Note [Gloo's sockets]."""
        for peer in range(self._size):
            if peer == self._rank:
                continue
            nothing = [torch.empty(1, device="cpu")]
            limit = _TILL_SHUT if self._places else _SHORT
            try:
                gloo.recv(nothing, peer, UNUSED_TAG).wait(limit)
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return  # with a peer that is gone it is no time-out

    def _require_open(self) -> None:
        if self._is_closed:
            self._scope.check()
            raise closed_error()

    def _make_gloo(self, name: str, use: str) -> None:
        store: Store = PrefixStore(name, self._store)
        is_lazy = _is_lazy()
        if not is_lazy:
            store = RendezvousStore(store, self._size)
            self._stores.append(store)
        gloo: Any = ProcessGroupGloo
        # Where it is broken off a thread still waits for ranks that are gone.
        limit = _CONNECT_LIMIT if self._scope.is_live else self._timeout
        options: Any = limit
        listening: dict[int, int] = {}
        if self._address:
            options = gloo._Options()  # noqa: SLF001  the only name in torch 2.11
            options._timeout = limit  # noqa: SLF001  likewise
            with _making:  # another thread's sockets still wait for its ranks
                before = find_listening(self._address)
                device = gloo.create_device(hostname=self._address)
                after = find_listening(self._address)
            listening = {fd: i for fd, i in after.items() if before.get(fd) != i}
            options._devices = [device]  # noqa: SLF001  likewise
        place = self._rank, self._size
        group: Backend = self._scope.run(lambda: gloo(store, *place, options))
        group._set_default_timeout(self._timeout)  # noqa: SLF001  its name in torch
        self._backends[use] = group
        if self._scope.failure is not None:
            self.abort()
        own = b"" if is_lazy else place_of(listening)
        # Nobody leaves before all are connected: rank 0's store may go at any time.
        sent = torch.frombuffer(bytearray(own.ljust(_PLACE_BYTES)), dtype=torch.uint8)
        places = sent.new_empty(self._size * _PLACE_BYTES)
        work = group._allgather_base(places, sent)  # noqa: SLF001  its name in torch
        self.wait_for(self.begun(work))
        rows = places.view(self._size, _PLACE_BYTES)
        self._places.update({row.numpy().tobytes().strip() for row in rows} - {b""})
        if not is_lazy:
            let_nobody_in(listening)


def _keep(_groups: Sequence[Backend], works: Sequence[BackendWork]) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()


def _is_lazy() -> bool:
    """Return whether torch connects two ranks when they first need it."""
    text = select_variables([_LAZY]).get(_LAZY, "0")
    return text.lower() in ("1", "true", "yes", "y")


def _find_own_address(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return the address of this host that leads to where the ranks meet; collective.

    Empty where the user has named an interface that does not lead there, or where no
    route does: torch then decides. On the store's own host it is what others use: its
    name may lead to the loopback there, and only the others know the address.
    """
    target = _find_target(store)
    own = source_towards(target) if target else ""
    is_near = not own or is_loopback(own)
    store.set(f"target/{rank}", "" if is_near else target)
    # The last rank is the likeliest to be on another host.
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
    # In one order on all hosts: Gloo connects no IPv4 to IPv6.
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda a: ":" in a)
    return next((a for a in addresses if source_towards(a)), "")


_TORCH_OPS = {
    ReduceOp.SUM: TorchOp.SUM,
    ReduceOp.MIN: TorchOp.MIN,
    ReduceOp.MAX: TorchOp.MAX,
    ReduceOp.PRODUCT: TorchOp.PRODUCT,
    ReduceOp.AVERAGE: TorchOp.AVG,  # NCCL's alone
}


class TorchDistributedEngine(Engine):
    """Moves tensors by process groups of its own; torch's default is the program's."""

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
        """Say what torch reduces."""
        # Gloo rounds a sum of 16-bit floats once a rank: see ``rounds_often``. NCCL's
        # average of them divides first. The rest goes by shares.
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

    def all_reduce(self, source: Tensor, out: Tensor, what: Reduction) -> Work[None]:
        backend, context = self._groups.of(out.device), self._all_reduce_context
        if not what.scales:
            try:
                pending = backend.allreduce([out], self._options[what.op])
            except RuntimeError as error:
                raise context.explain(error) from error
            return self._work((pending,), out.device, context)

        def steps(backend: Backend, wait: Wait) -> None:
            _reduce_by_shares(backend, wait, source, out, what)

        if not out.is_cuda:
            return self._groups.submit(context, steps)
        with context:
            # The stream keeps the steps in order; the host does not wait.
            steps(self._groups.of(out.device), lambda work: work.wait())
        return Work(None)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], what: Reduction
    ) -> Work[None]:
        own = counts[self.rank]
        received = source.new_empty(self.size * own)
        if what.prescale != 1.0:
            source = source.clone()
            scale_(source, what.prescale)
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
                out.copy_(reduce_stack(stack, what.op, what.postscale))

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
            # torch gathers no uneven shares: every rank broadcasts its own into place.
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
            # Its first call may come in another order than the original's next one.
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
            self._groups.begun(each)
        return TorchWork(self._groups, pending, context, after)

    def _context(self, name: str) -> ErrorContext:
        return ErrorContext(name, self.rank, self.size, self.timeout_s, self._scope)


def _broadcast(backend: Backend, tensor: Tensor, root: int) -> BackendWork:
    options: Any = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return backend.broadcast([tensor.view(torch.uint8)], options)


def _reduce_by_shares(
    backend: Backend, wait: Wait, source: Tensor, out: Tensor, what: Reduction
) -> None:
    """Have each rank reduce one share of all, rounding once, then gather the shares."""
    numel, size = source.numel(), backend.size()
    share = -(-numel // size)
    shares = torch.zeros(size * share, dtype=source.dtype, device=source.device)
    shares[:numel] = source
    scale_(shares, what.prescale)
    received = torch.empty_like(shares)
    sent: Any = shares.view(torch.uint8)
    wait(backend.alltoall_base(received.view(torch.uint8), sent, [], []))
    reduced = reduce_stack(received.view(size, share), what.op, what.postscale)
    wait(backend._allgather_base(sent, reduced.view(torch.uint8)))  # noqa: SLF001
    out.copy_(shares[:numel])
