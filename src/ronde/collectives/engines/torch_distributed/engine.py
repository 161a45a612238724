"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp as TorchOp, Store
from torch.distributed.distributed_c10d import AllreduceOptions

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
    Native,
    ReduceOp,
    Reduction,
    Work,
)
from ronde.collectives.engines.torch_distributed.groups import (
    Backend,
    BackendWork,
    Groups,
    TorchWork,
    all_gather_even,
    broadcast,
)
from ronde.collectives.torch_modes import writing_to

_TORCH_OPS = {
    ReduceOp.SUM: TorchOp.SUM,
    ReduceOp.MIN: TorchOp.MIN,
    ReduceOp.MAX: TorchOp.MAX,
    ReduceOp.PRODUCT: TorchOp.PRODUCT,
    ReduceOp.AVERAGE: TorchOp.AVG,  # NCCL's alone
}


class TorchDistributedEngine(Engine):
    """Moves tensors by process groups of its own.

    torch's default group (``init_process_group``) is left to the program.
    """

    name = "gloo"
    devices = frozenset({"cpu", "cuda"})

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, is_one_host: bool
    ) -> None:
        """Connect to all other ranks; collective.

        Raises:
            CollectiveError: Not all ranks came in time.
        """
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store = store
        self._is_one_host = is_one_host
        self._num_clones = 0
        self._options: dict[ReduceOp, Any] = {}
        for op in ReduceOp:
            self._options[op] = AllreduceOptions()
            self._options[op].reduceOp = _TORCH_OPS[op]
        with self._context("connecting").guard():
            self._groups = Groups(store, rank, size, timeout_s, is_one_host=is_one_host)
        self._all_reduce_context = self._context("all_reduce")

    def require_open(self) -> None:
        self._groups.of(CPU)

    def native(
        self, call: str, dtype: torch.dtype, op: ReduceOp, device_type: str
    ) -> Native | None:
        """Say what torch reduces: see ``Engine``.

        Gloo rounds a sum of 16-bit floats once a rank, so only two ranks' go that way;
        their average does not, since the sum of two float16 may overflow where the
        average fits. NCCL's average of them divides first. The rest goes by shares.
        """
        if call == "reduce_scatter":
            return Native(op, scales=True)
        is_average = op is ReduceOp.AVERAGE
        if dtype in HALVES and device_type == "cuda":
            native = Native(op)
        elif rounds_often(dtype, op, self.size) or (
            dtype.is_complex and op is ReduceOp.PRODUCT
        ):
            native = Native(op, scales=True)
        elif dtype.is_floating_point or (dtype in PLAIN and not is_average):
            native = Native(ReduceOp.SUM if is_average else op)
        else:
            native = None
        return native

    def all_reduce(self, source: Tensor, out: Tensor, what: Reduction) -> Work[None]:
        backend = self._groups.of(out.device)
        if source is not out or self._goes_by_shares(out, what):
            return self._all_reduce_by_shares(source, out, what)
        try:
            pending = backend.allreduce([out], self._options[what.op])
        except RuntimeError as error:
            raise self._all_reduce_context.explain(error) from error
        return TorchWork((pending,), self._all_reduce_context)

    def _goes_by_shares(self, vector: Tensor, what: Reduction) -> bool:
        if vector.dtype in PLAIN:
            return False
        native = self.native("all_reduce", vector.dtype, what.op, vector.device.type)
        return native is not None and native.scales

    def _all_reduce_by_shares(
        self, source: Tensor, out: Tensor, what: Reduction
    ) -> Work[None]:
        def steps(backend: Backend) -> None:
            _reduce_by_shares(backend, self.size, source, out, what)

        if not out.is_cuda:
            return self._groups.submit(self._all_reduce_context, steps)
        with self._all_reduce_context.guard():
            # The stream keeps the steps in order; the host does not wait.
            steps(self._groups.of(out.device))
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

        def start() -> BackendWork:
            return self._groups.of(source.device).alltoall_base(
                received.view(torch.uint8),
                source.view(torch.uint8),
                [own * itemsize] * self.size,
                [count * itemsize for count in counts],
            )

        def finish() -> None:
            stack = received.view(self.size, own)
            with writing_to((out, received)):
                out.copy_(reduce_stack(stack, what.op, what.postscale))

        return self._start("reduce_scatter", start, finish)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        gathered = own.new_empty((self.size, own.numel()))
        with self._context(call).guard():
            gloo = self._groups.of(own.device)
            place = gathered.view(-1).view(torch.uint8)
            all_gather_even(gloo, place, own.view(torch.uint8)).wait()
        return gathered

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> Work[None]:
        context = self._context("all_gather")
        with context.guard():
            backend = self._groups.of(out.device)
            if len(set(counts)) == 1:
                return TorchWork((all_gather_even(backend, out, own),), context)
            # torch gathers no uneven shares: every rank broadcasts its own into place.
            parts: tuple[Tensor, ...] = torch.split(out, list(counts))
            parts[self.rank].copy_(own)
            pending = [
                broadcast(backend, part, root)
                for root, part in enumerate(parts)
                if part.numel()
            ]
        return TorchWork(pending, context)

    def all_to_all(
        self, sent: Tensor, received: Tensor, plan: Sequence[Sequence[int]]
    ) -> Work[None]:
        def start() -> BackendWork:
            arriving = [row[self.rank] for row in plan]
            backend = self._groups.of(sent.device)
            return backend.alltoall_base(
                received, sent, arriving, list(plan[self.rank])
            )

        return self._start("all_to_all", start)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        def start() -> BackendWork:
            return broadcast(self._groups.of(data.device), data.view(torch.uint8), root)

        return self._start("broadcast", start)

    def send(self, data: Tensor, to: int, tag: int) -> Work[None]:
        values = data.view(torch.uint8)
        return self._start("send", lambda: self._groups.send(values, to, tag))

    def recv(self, data: Tensor, source: int, tag: int) -> Work[None]:
        values = data.view(torch.uint8)
        return self._start("recv", lambda: self._groups.recv(values, source, tag))

    def barrier(self) -> Work[None]:
        return self._start("barrier", lambda: self._groups.of(CPU).barrier())

    def clone(self) -> "TorchDistributedEngine":
        self.require_open()
        self._num_clones += 1
        copy = TorchDistributedEngine(
            PrefixStore(f"duplicate{self._num_clones}", self._store),
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
        start: Callable[[], BackendWork],
        after: Callable[[], None] | None = None,
    ) -> TorchWork:
        context = self._context(name)
        with context.guard():
            return TorchWork((start(),), context, after)

    def _context(self, name: str) -> ErrorContext:
        return ErrorContext(name, self.rank, self.size, self.timeout_s)


def _reduce_by_shares(
    backend: Backend, size: int, source: Tensor, out: Tensor, what: Reduction
) -> None:
    """Have each rank reduce one share of all, then gather the shares.

    As many bytes travel as in a ring. Sums are rounded once, not once a rank.
    """
    numel = source.numel()
    share = -(-numel // size)
    shares = torch.zeros(size * share, dtype=source.dtype, device=source.device)
    shares[:numel] = source
    scale_(shares, what.prescale)
    received = torch.empty_like(shares)
    sent: Any = shares.view(torch.uint8)
    backend.alltoall_base(received.view(torch.uint8), sent, [], []).wait()
    reduced = reduce_stack(received.view(size, share), what.op, what.postscale)
    all_gather_even(backend, sent, reduced.view(torch.uint8)).wait()
    out.copy_(shares[:numel])
