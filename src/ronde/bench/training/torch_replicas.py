"""Replicas of torch: all-reduce, parameter server, and torch's own strategies.

Also the arrival of gradients during backward, without communication.
"""

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

import ronde.torch as hvd
from ronde.bench.timing import marks_of
from ronde.bench.training.models import build
from ronde.bench.training.outcome import (
    GradientArrival,
    Phase,
    ReducedBuckets,
    TrainOptions,
    Variant,
)
from ronde.bench.training.replica import (
    Replica,
    Stopwatch,
    batches,
    digest_of,
    free_address,
)
from ronde.data_parallel import Reducer


@contextmanager
def torch_replicas(
    options: TrainOptions,
    device: torch.device,
    build_model: Callable[[], nn.Module] | None = None,
) -> Generator[Callable[[Variant], Replica]]:
    """Make replicas of the options' model, or of the models that a function builds."""
    with ExitStack() as exits:
        if device.type == "cuda":
            exits.enter_context(torch.cuda.device(device))
            flags = torch.backends.cudnn.flags(enabled=True, benchmark=True)
            exits.enter_context(flags)
        if options.is_peered and hvd.size() > 1:
            address = hvd.broadcast_object(free_address())
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{address}",
                rank=hvd.rank(),
                world_size=hvd.size(),
            )
            exits.callback(hvd.barrier)  # the store is in rank 0's process
            exits.callback(distributed.destroy_process_group)
        yield partial(TorchReplica, options, device, build_model=build_model)


def has_data_parallel(device: torch.device) -> bool:
    """Return True if rank 0 can train on the GPUs of all ranks."""
    is_one_host = hvd.local_size() == hvd.size()
    return device.type == "cuda" and is_one_host and hvd.size() > 1


def _build(options: TrainOptions) -> nn.Module:
    model: Any = build(options.model.name)
    is_last = options.is_channels_last
    return model.to(memory_format=torch.channels_last) if is_last else model


class TorchReplica:
    """A model in torch with its optimizer and data."""

    def __init__(
        self,
        options: TrainOptions,
        device: torch.device,
        variant: Variant,
        build_model: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._device = device
        self.is_split_apart = device.type != "cpu"
        self.marks = marks_of(device)
        self._reducer: Reducer | None = None
        self._is_mixed = options.dtype == "bfloat16"
        self._batches = batches(options, device, seed=hvd.rank())
        torch.manual_seed(0)
        build_model = build_model or partial(_build, options)
        self.model = model = build_model().to(device)
        optimizer: Optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if options.optimizer == "adam":
            optimizer = Adam(model.parameters(), lr=1e-4)
        self._forward: Callable[[Tensor], Tensor] = model
        self._server: ParameterServer | None = None
        match variant:
            case Variant.ALL_RANKS:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
                optimizer = hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=model.named_parameters(),
                    compression=getattr(hvd.Compression, options.compression),
                )
                self._reducer = optimizer.reducer
            case Variant.PARAMETER_SERVER:
                self._server = ParameterServer(model)
            case Variant.PEER:
                self._forward = DistributedDataParallel(model)
            case Variant.DATA_PARALLEL:
                self._forward = nn.DataParallel(model, list(range(hvd.size())))
                larger = replace(options, batch=options.batch * hvd.size())
                self._batches = batches(larger, device, seed=0)
            case _:
                pass
        self._optimizer = optimizer
        torch.manual_seed(hvd.rank())  # so that dropout differs between ranks

    def step(self, clock: Stopwatch) -> None:
        clock.start()
        inputs, labels = next(self._batches)
        clock.mark(Phase.INPUT)
        inputs = inputs.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        clock.mark(Phase.HOST_TO_DEVICE)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_mixed):
            loss = loss_of(self._forward(inputs), labels)
        clock.mark(Phase.FORWARD)
        loss.backward()
        if self._server is not None:
            self._server.average()
        clock.mark(Phase.BACKWARD)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self._server is None)
        clock.mark(Phase.UPDATE)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def buckets(self) -> ReducedBuckets | None:
        """Return the last step's buckets; None without ``DistributedOptimizer``."""
        if self._reducer is None:
            return None
        rounds = self._reducer.rounds
        return ReducedBuckets(
            tuple(bucket.memory.nbytes for bucket in rounds.buckets),
            tuple(len(bucket.slots) for bucket in rounds.buckets),
            rounds.limits.first_bytes,
            rounds.limits.other_bytes,
        )

    @torch.no_grad()
    def digest(self) -> int:
        return digest_of(p for p in self.model.parameters() if p.requires_grad)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


class ParameterServer:
    """Averages gradients through rank 0, as a parameter server does.

    All gradients of a model are views of one vector. Every rank sends it to rank 0,
    which adds the vectors and sends the mean to all. Workers compute, too; rank 0 is a
    worker and the server.
    """

    def __init__(self, model: nn.Module) -> None:
        weights = list(model.parameters())
        first, num_elements = weights[0], sum(each.numel() for each in weights)
        self._gradients = first.detach().new_zeros(num_elements)
        start = 0
        for each in weights:
            part = self._gradients[start : start + each.numel()]
            each.grad = part.view_as(each)
            start += each.numel()

    @torch.no_grad()
    def average(self) -> None:
        """Replace the gradients by their mean over all ranks; collective."""
        size, own = hvd.size(), self._gradients
        splits = [own.numel(), *[0] * (size - 1)]
        received, _ = hvd.alltoall(own, splits, name="parameter_server.gather")
        if hvd.rank() == 0:
            torch.mean(received.view(size, -1), 0, out=own)
        hvd.broadcast_(own, 0, name="parameter_server.broadcast")


_BEGUN = list(Phase).index(Phase.FORWARD) - len(Phase)  # counted from a step's end


def measure_arrivals(
    replica: TorchReplica, num_steps: int
) -> tuple[GradientArrival, ...]:
    """Return the gradients in order of arrival; collective.

    All ranks step without communication. Times are medians over the steps of all ranks.
    Hooks exist during these steps only. Unused weights are left out.
    """
    weights: list[Any] = [w for w in replica.model.parameters() if w.requires_grad]
    mark, between = replica.marks
    ready: dict[Tensor, Any] = {}
    ends: list[Any] = []  # of the step's phases

    def arrive(weight: Tensor) -> None:
        ready[weight] = mark()

    hooks = [each.register_post_accumulate_grad_hook(arrive) for each in weights]
    clock, rows = Stopwatch(lambda: ends.append(mark())), list[list[float]]()
    hvd.barrier()
    for _ in range(1 + num_steps):
        ready.clear()
        ends.clear()
        replica.step(clock)
        replica.synchronize()
        stamps = [ready.get(each) for each in weights]
        rows.append([between(ends[_BEGUN], s) if s else math.nan for s in stamps])
    for hook in hooks:
        hook.remove()
    # The first step brings the replica's memory back into the caches.
    everyone: Any = hvd.allgather(torch.tensor(rows[1:], dtype=torch.float64))
    medians_ms: list[float] = (everyone.quantile(0.5, dim=0) * 1e3).tolist()
    arrivals = [
        GradientArrival(weight.numel(), weight.element_size(), ready_ms)
        for weight, ready_ms in zip(weights, medians_ms, strict=True)
        if not math.isnan(ready_ms)
    ]
    return tuple(sorted(arrivals, key=lambda each: each.ready_ms))
