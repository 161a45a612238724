"""Collectives on torch's process groups: Gloo for the CPU, NCCL for CUDA."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp as TorchOp, Store

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
    Submitted,
    TorchWork,
    all_gather_even,
    broadcast,
    reduce_options,
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

        Args:
            store: Where the ranks meet, empty under the keys used here.
            rank: This process.
            size: Number of processes.
            timeout_s: How long any collective, and this call, may wait for a rank.
            is_one_host: All ranks are on this host; they use the loopback then.

        Raises:
            CollectiveError: Not all ranks came in time.
        """
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store = store
        self._is_one_host = is_one_host
        self._num_clones = 0
        self._options = {op: reduce_options(_TORCH_OPS[op]) for op in ReduceOp}
        with self._context("connecting").guard():
            self._groups = Groups(store, rank, size, timeout_s, is_one_host=is_one_host)
        self._all_reduce_context = self._context("all_reduce")

    def require_open(self) -> None:
        """Refuse once closed: see ``Engine``."""
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
        """Reduce as torch does, or by shares. This is on every training step's path."""
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
        with self._all_reduce_context.guard():
            if out.is_cuda:
                # The stream keeps the steps in order; the host does not wait.
                _reduce_by_shares(
                    self._groups.of(out.device), self.size, source, out, what
                )
                return Work(None)
            outcome = self._groups.lane().submit(
                lambda backend: _reduce_by_shares(backend, self.size, source, out, what)
            )
        return TorchWork((Submitted(outcome),), self._all_reduce_context)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], what: Reduction
    ) -> Work[None]:
        """Send every rank its parts, and reduce what has come."""
        own = counts[self.rank]
        received = source.new_empty(self.size * own)
        if what.prescale != 1.0:
            source = source.clone()
            scale_(source, what.prescale)
        itemsize = source.element_size()
        context = self._context("reduce_scatter")
        with context.guard():
            pending = self._groups.of(source.device).alltoall_base(
                received.view(torch.uint8),
                source.view(torch.uint8),
                [own * itemsize] * self.size,
                [count * itemsize for count in counts],
            )

        def finish() -> None:
            stack = received.view(self.size, own)
            with writing_to((out, received)):
                out.copy_(reduce_stack(stack, what.op, what.postscale))

        return TorchWork((pending,), context, finish)

    def gather_numbers(self, own: Tensor, call: str) -> Tensor:
        """Return every rank's vector of numbers; blocks."""
        gathered = own.new_empty((self.size, own.numel()))
        with self._context(call).guard():
            gloo = self._groups.of(own.device)
            place = gathered.view(-1).view(torch.uint8)
            all_gather_even(gloo, place, own.view(torch.uint8)).wait()
        return gathered

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> Work[None]:
        """Concatenate the ranks' bytes."""
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
        """Send every rank its part of the bytes."""
        context = self._context("all_to_all")
        with context.guard():
            pending: BackendWork = self._groups.of(sent.device).alltoall_base(
                received,
                sent,
                [row[self.rank] for row in plan],
                list(plan[self.rank]),
            )
        return TorchWork((pending,), context)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        """Copy ``root``'s elements into everybody's."""
        context = self._context("broadcast")
        with context.guard():
            backend = self._groups.of(data.device)
            pending = broadcast(backend, data.view(torch.uint8), root)
        return TorchWork((pending,), context)

    def send(self, data: Tensor, to: int, tag: int) -> Work[None]:
        """Send to one rank."""
        context = self._context("send")
        with context.guard():
            pending = self._groups.send(data.view(torch.uint8), to, tag)
        return TorchWork((pending,), context)

    def recv(self, data: Tensor, source: int, tag: int) -> Work[None]:
        """Receive from one rank."""
        context = self._context("recv")
        with context.guard():
            pending = self._groups.recv(data.view(torch.uint8), source, tag)
        return TorchWork((pending,), context)

    def barrier(self) -> Work[None]:
        """Be over when all have called."""
        context = self._context("barrier")
        with context.guard():
            pending = self._groups.of(CPU).barrier()
        return TorchWork((pending,), context)

    def clone(self) -> "TorchDistributedEngine":
        """Make another of the same ranks: see ``Engine``."""
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
        """Close at once: see ``Engine``."""
        with suppress(RuntimeError):
            self._groups.abort()

    def close(self) -> None:
        """Give threads and sockets back; not collective, and calls may be repeated."""
        with suppress(RuntimeError):
            self._groups.close()

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
