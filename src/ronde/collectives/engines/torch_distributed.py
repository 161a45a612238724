"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp as TorchOp, Store
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions

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
    Plan,
    ReduceOp,
    Reduction,
    Work,
)
from ronde.collectives.process_groups import (
    Backend,
    BackendWork,
    Groups,
    TorchWork,
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
    """Moves tensors by process groups of its own; torch's default is the program's."""

    name = "gloo"
    devices = frozenset({"cpu", "cuda"})

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, is_one_host: bool
    ) -> None:
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

    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction | None:
        """Say what torch reduces.

        Gloo rounds a sum of 16-bit floats once a rank: see ``rounds_often``. NCCL's
        average of them divides first. The rest goes by shares.
        """
        dtype = like.dtype
        if call == "reduce_scatter":
            return Reduction(op, scales=True)
        is_average = op is ReduceOp.AVERAGE
        if dtype in HALVES and like.is_cuda:
            native = Reduction(op)
        elif rounds_often(dtype, op, self.size) or (
            dtype.is_complex and op is ReduceOp.PRODUCT
        ):
            native = Reduction(op, scales=True)
        elif dtype.is_floating_point or (dtype in PLAIN and not is_average):
            native = Reduction(ReduceOp.SUM if is_average else op)
        else:
            native = None
        return native

    def all_reduce(self, source: Tensor, out: Tensor, what: Reduction) -> Work[None]:
        backend = self._groups.of(out.device)
        if what.scales:
            return self._all_reduce_by_shares(source, out, what)
        try:
            pending = backend.allreduce([out], self._options[what.op])
        except RuntimeError as error:
            raise self._all_reduce_context.explain(error) from error
        return TorchWork((pending,), self._all_reduce_context)

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

    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[None]:
        context = self._context(call)
        with context.guard():
            backend = self._groups.of(out.device)
            if len(set(counts)) == 1:
                return TorchWork((_all_gather_even(backend, out, own),), context)
            # torch gathers no uneven shares: every rank broadcasts its own into place.
            parts: tuple[Tensor, ...] = torch.split(out, list(counts))
            parts[self.rank].copy_(own)
            pending = [
                _broadcast(backend, part, root)
                for root, part in enumerate(parts)
                if part.numel()
            ]
        return TorchWork(pending, context)

    def all_to_all(self, sent: Tensor, received: Tensor, plan: Plan) -> Work[None]:
        arriving, leaving = [row[self.rank] for row in plan], list(plan[self.rank])

        def start() -> BackendWork:
            backend = self._groups.of(sent.device)
            return backend.alltoall_base(received, sent, arriving, leaving)

        return self._start("all_to_all", start)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        def start() -> BackendWork:
            return _broadcast(
                self._groups.of(data.device), data.view(torch.uint8), root
            )

        return self._start("broadcast", start)

    def send(self, data: Tensor, to: int, tag: int) -> Work[None]:
        values = data.view(torch.uint8)
        return self._start(
            "send", lambda: self._groups.message("send", values, to, tag)
        )

    def recv(self, data: Tensor, source: int, tag: int) -> Work[None]:
        values = data.view(torch.uint8)
        return self._start(
            "recv", lambda: self._groups.message("recv", values, source, tag)
        )

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


def _broadcast(backend: Backend, tensor: Tensor, root: int) -> BackendWork:
    options: Any = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return backend.broadcast([tensor.view(torch.uint8)], options)


def _all_gather_even(backend: Backend, gathered: Tensor, own: Tensor) -> BackendWork:
    """Gather equal, contiguous shares; ``gathered`` holds ``size`` times ``own``."""
    return backend._allgather_base(gathered, own)  # noqa: SLF001  it has no other name


def _reduce_by_shares(
    backend: Backend, size: int, source: Tensor, out: Tensor, what: Reduction
) -> None:
    """Have each rank reduce one share of all, rounding once, then gather the shares."""
    numel = source.numel()
    share = -(-numel // size)
    shares = torch.zeros(size * share, dtype=source.dtype, device=source.device)
    shares[:numel] = source
    scale_(shares, what.prescale)
    received = torch.empty_like(shares)
    sent: Any = shares.view(torch.uint8)
    backend.alltoall_base(received.view(torch.uint8), sent, [], []).wait()
    reduced = reduce_stack(received.view(size, share), what.op, what.postscale)
    _all_gather_even(backend, sent, reduced.view(torch.uint8)).wait()
    out.copy_(shares[:numel])
