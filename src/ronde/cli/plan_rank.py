"""Run one rank of ``ronde plan validate``: time steps and all_reduce; rank 0 reports.

Note [Emulated compute]
    There are often more ranks than cores. So a layer of an emulated model computes
    nothing: its backward sleeps until its gradient is due. Gradients, reducer, engine,
    network and the optimizer's update are real.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

import ronde.torch as hvd
from ronde.bench.timing import Marks
from ronde.bench.training.outcome import Phase, TrainOptions, Variant, find_model
from ronde.bench.training.replica import Stopwatch
from ronde.bench.training.torch_replicas import TorchReplica, measure_arrivals
from ronde.parallel.buckets import BucketLimits, GradientSpec, plan_buckets
from ronde.plan.validation import SIZES_BYTES, MeasuredSteps, StepRequest
from ronde.session.session import current_session

_NUM_WARM_UP = 2
_NUM_BUCKETS = 8
_NUM_BATCHES = 5
_NUM_SMALL_CALLS, _SMALL_BYTES = 8, 1 << 16


def run_rank(text: str) -> None:
    """Measure as one rank; rank 0 prints one line of JSON."""
    request = StepRequest(*json.loads(text))
    torch.set_num_threads(1)
    hvd.init()
    try:
        figures = _measure(request)
        if hvd.rank() == 0:
            print(json.dumps(figures._asdict()), flush=True)
    finally:
        hvd.shutdown()


def _measure(request: StepRequest) -> MeasuredSteps:
    found = MeasuredSteps(hvd.size(), hvd.local_size())
    make: Any = partial(_EmulatedReplica, request)
    groups = _groups(request) if request.compute == "emulated" else ()
    if not groups:
        model = find_model(request.model)
        options = TrainOptions(model, model.batch)
        make = partial(TorchReplica, options, torch.device("cpu"))
    if request.is_base:
        alone: Any = make(Variant.ONE_RANK)
        clock = Stopwatch(lambda: None)
        arrivals = measure_arrivals(alone, 1)  # warms it up, too
        num_alone = -(-request.num_steps // 2)
        steps_s, cpu_s = _time_steps(alone, num_alone, clock)
        phases_s = clock.seconds_a_step(num_alone)
        specs = [GradientSpec(each.numel, each.itemsize, "") for each in arrivals]
        plans = plan_buckets(specs, range(len(specs)), BucketLimits(), groups)
        latest = [max(slot.index for slot in plan.slots) for plan in plans]
        found = found._replace(
            steps_s=steps_s,
            cpu_s=cpu_s,
            alone_s=median(steps_s),
            alone_cpu_s=cpu_s,
            backward_s=phases_s[Phase.BACKWARD],
            update_s=phases_s[Phase.UPDATE],
            bucket_bytes=[specs[0].itemsize * plan.numel for plan in plans],
            ready_s=[arrivals[index].ready_ms / 1e3 for index in latest],
        )
    if hvd.size() > 1:
        both = make(Variant.ALL_RANKS)
        for _ in range(_NUM_WARM_UP):
            both.step(Stopwatch())
        steps_s, cpu_s = _time_steps(both, request.num_steps, Stopwatch())
        sizes = SIZES_BYTES if request.is_base else SIZES_BYTES[:1]
        times_s = [_time_all_reduce(size) for size in sizes]
        found = found._replace(steps_s=steps_s, cpu_s=cpu_s, times_s=times_s)
    return found


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, _weight: Tensor, wait: Any) -> Tensor:  # noqa: ANN401
        ctx.wait = wait
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        return grads[0], ctx.wait(), None


class _Descent:
    """The update of SGD; torch's own class imports a compiler, for a second of work."""

    def __init__(self, weights: Sequence[Any]) -> None:
        self.param_groups, self.state = [{"params": weights}], {}

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.sub_(weight.grad, alpha=0.1)

    def zero_grad(self, **_set_to_none: bool) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.grad = None


class _EmulatedReplica:
    """An emulated model and its optimizer."""

    marks = Marks()

    def __init__(self, request: StepRequest, variant: Variant) -> None:
        self._forward_s, layers = request.emulated_layers()
        self._ready_s = [ready_s for _, ready_s in layers]
        self._begun_s = 0.0
        self._weights = [nn.Parameter(torch.zeros(numel)) for numel, _ in layers]
        self._gradients = [torch.full_like(each, 1e-3) for each in self._weights]
        self.model = nn.ParameterList(self._weights)
        self._optimizer: Any = _Descent(self._weights)
        if variant is Variant.ALL_RANKS:
            groups = [[self._weights[i] for i in group] for group in _groups(request)]
            named = self.model.named_parameters()
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer, named, groups=groups
            )

    def step(self, clock: Stopwatch) -> None:
        clock.start()
        time.sleep(self._forward_s)
        value = torch.zeros(1, requires_grad=True)
        # Backward runs from the last layer that was applied to the first.
        for index, weight in reversed(list(enumerate(self._weights))):
            wait = partial(self._wait, index)
            value = cast("Tensor", _Layer.apply(value, weight, wait))
        clock.mark(Phase.FORWARD)
        self._begun_s = time.perf_counter()
        value.backward()
        clock.mark(Phase.BACKWARD)
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark(Phase.UPDATE)

    def synchronize(self) -> None:
        pass

    def _wait(self, index: int) -> Tensor:
        due_s = self._begun_s + self._ready_s[index]
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return self._gradients[index]


def _groups(request: StepRequest) -> list[range]:
    """Return the layers of each bucket; fewer buckets would overlap less."""
    num_layers = len(request.emulated_layers()[1])
    step = -(-num_layers // _NUM_BUCKETS)
    return [range(i, min(i + step, num_layers)) for i in range(0, num_layers, step)]


def _time_steps(
    replica: Any,  # noqa: ANN401
    num_steps: int,
    clock: Stopwatch,
) -> tuple[list[float], float]:
    """Return steps' seconds, and one step's of processors, as means; collective."""
    hvd.barrier()
    ends_s, used_s = [time.perf_counter()], time.process_time()
    for _ in range(num_steps):
        replica.step(clock)
        ends_s.append(time.perf_counter())
    used_s = (time.process_time() - used_s) / num_steps
    steps_s = torch.tensor(ends_s, dtype=torch.float64).diff()
    own_s = torch.cat([steps_s, steps_s.new_tensor([used_s])])
    *steps, cpu_s = cast("list[float]", hvd.allreduce(own_s).tolist())
    return steps, cpu_s


def _time_all_reduce(num_bytes: int) -> float:
    """Return the slowest rank's seconds, the median of several calls; collective."""
    communicator = current_session().states[0].communicator
    tensor = communicator.allocate(num_bytes // 4, torch.float32)
    num_calls = _NUM_SMALL_CALLS if num_bytes <= _SMALL_BYTES else 1
    times_s: list[float] = []
    for _ in range(1 + _NUM_BATCHES):
        communicator.barrier().wait()
        begun_s = time.perf_counter()
        for _ in range(num_calls):
            communicator.all_reduce(tensor).wait()
        times_s.append((time.perf_counter() - begun_s) / num_calls)
    own_s = torch.tensor(times_s[1:], dtype=torch.float64)
    return float(hvd.allreduce(own_s, op=hvd.Max).median())
