"""The time of a training step on n ranks, part by part, for draws of the unknowns.

Arrays have one element for each draw. Times are in seconds. ``docs/plan.md`` explains
the model.

Source: the directed acyclic graph of synchronous SGD with wait-free backpropagation,
Shi et al., arXiv:1805.03812 and arXiv:1711.05979; where no gradient's time is known,
``E = leak C + (1 - leak) max(0, C - window T)`` stands for the walk over its buckets.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ronde.collectives.pricing import LinkCost, LinkCosts, Seconds, all_reduce_s
from ronde.parallel.layout import RankLayout
from ronde.parallel.pipelines import Pipeline, ScheduleName
from ronde.parallel.traffic import step_traffic
from ronde.plan.priors import Draws
from ronde.plan.setup import (
    Exchange,
    Overlap,
    PhaseTimes,
    Program,
    Setup,
    Size,
    buckets_of,
)
from ronde.plan.walk import walk

PARTS = (
    *("compute", "host", "bandwidth inside", "bandwidth between", "latency"),
    *("fixed cost", "stragglers", "input", "bubble"),
)
_Group = tuple[RankLayout, LinkCosts]
_Communication = Draws  # rows of times inside, between, and of latency, if not hidden
_LEAST_WORK = 0.02  # the least share of a step that computes
_NEWTON_ROUNDS = 4
_TENSORS = 160, 25.6e6, 0.35  # tensors of a model with so many parameters; exponent
_LINE_SHARE = 0.95  # of a line, without headers and acknowledgements
_FAST_LINE_GB_PER_S = 12.5  # the slowest RDMA line that the priors have seen
_UNIT = 1 << 30  # bytes of gradients whose number is unknown
_SHARDED_PASSES = 1.5  # two gathers and a scatter, relative to an all_reduce
# Means of the largest of n draws from a normal distribution.
_MEANS = 0.0, 0.5642, 0.8463, 1.0294, 1.1630, 1.2672, 1.3522


class Hypothesis(NamedTuple):
    """Unknowns with two possible values."""

    algorithm: str = "ring"  # or two_levels
    is_ring_latency: bool = True  # min(2 (n-1), 12 lg n) messages, else 4 lg n
    are_servers_on_all: bool = True  # else their number is fixed


class StepParts(NamedTuple):
    """The time of a step, and its parts; of communication only exposed times."""

    step_s: Draws
    parts_s: Mapping[str, Draws]


@dataclass(frozen=True, slots=True)
class StepModel:
    """The step of a setup under one hypothesis, for draws of its unknowns."""

    setup: Setup
    hypothesis: Hypothesis
    draws: Mapping[str, Draws]

    def at(self, size: Size, compute_s: Draws, free: str = "") -> StepParts:
        """Return the step at a size.

        Args:
            size: The number of ranks and their batch.
            compute_s: Computing time of a model copy at the smallest measured size.
            free: One of ``PARTS``, which costs nothing.
        """
        program, busy = self.setup.program, _busy(size)
        speed = program.compute_speed * program.model_ranks
        work = compute_s * self._work(size) / speed
        host = work * self._host_share(busy) * (free != "host")
        costs = self._costs(compute_s, free)
        sent = self._communication(size, costs)
        exposed = self._exposed(size, sent.sum(0), work + host, costs)
        shown = sent * (exposed / np.maximum(sent.sum(0), 1e-30))
        fixed = self._update(size) * (free != "fixed cost")
        alone = work + host + exposed + fixed
        waited = bubble = np.zeros_like(work)
        if program.model_ranks > 1:
            model, idle = self._model_axes(size, costs)
            shown, model_s = shown + model, model.sum(0)
            bubble = (work + host + model_s) * idle / (1 - idle) * (free != "bubble")
            alone = alone + model_s + bubble
        waiting = alone * self._straggling(size) * (free != "stragglers")
        step = alone + waiting
        if program.input_units_per_s is not None and free != "input":
            least = self.setup.units(size) / program.input_units_per_s
            waited = np.maximum(0.0, least - step)
        parts = work, host, *shown, fixed, waiting, waited, bubble
        return StepParts(step + waited, dict(zip(PARTS, parts, strict=True)))

    def compute_s(self) -> Draws:
        """Return the computing time with which the smallest size is as measured."""
        size, speed = self.setup.points[0]
        step_s = self.setup.units(size) / speed
        known = step_s / (1 + self._straggling(size)) - self._update(size)
        ranks = self.setup.program.model_ranks
        floor = np.full_like(self.draws["host"], ranks * _LEAST_WORK * step_s)
        guess = np.maximum(ranks * known, floor)
        # The step is a convex function of the computing time, in straight pieces:
        # Newton's method from above ends after as many rounds as there are pieces.
        for _ in range(_NEWTON_ROUNDS):
            reached = self.at(size, guess).step_s
            below = self.at(size, guess * (1 - 1e-4)).step_s
            slope = np.maximum((reached - below) / (guess * 1e-4), 1e-9)
            guess = np.maximum(guess - (reached - step_s) / slope, floor)
        return guess

    def _work(self, size: Size) -> Draws | float:
        base = self.setup.points[0].size
        if size.batch is None or base.batch is None or size.batch == base.batch:
            return 1.0
        if self.setup.program.is_accumulating:
            return size.batch / base.batch
        # Launches take a part of each micro-batch, of any size.
        parts = size.accumulation / base.accumulation
        micro = size.batch / base.batch / parts
        return parts * (micro + self.draws["launch"] * (1 - micro))

    def _host_share(self, busy: int) -> Draws:
        measured = self.setup.program.host_share
        share = self.draws["host"]
        if measured is not None:
            share = np.full_like(share, measured)
        return share * math.log2(busy) / 3

    def _straggling(self, size: Size) -> Draws:
        jitter = self.setup.program.jitter
        if jitter is None:
            return self.draws["growth"] * math.log2(size.num_nodes)
        base = self.setup.points[0].size
        further = mean_of_largest(size.num_ranks) - mean_of_largest(base.num_ranks)
        return np.full_like(self.draws["growth"], math.expm1(jitter * further))

    def _update(self, size: Size) -> Draws:
        program, update = self.setup.program, self.draws["update"]
        if program.phases is not None:
            update = np.full_like(update, program.phases.update_s / program.model_ranks)
        elif self.setup.is_sized:
            held = (program.num_parameters or 0.0) / program.model_ranks
            update = update * held / 336e6
        else:
            return np.zeros_like(update)
        if program.exchange is Exchange.SHARD_ALL:
            return update / program.layout(size.num_ranks).dp_shard
        return update

    def _exposed(
        self, size: Size, sent_s: Draws, work: Draws, costs: LinkCosts
    ) -> Draws:
        program = self.setup.program
        is_alone = size.num_ranks == program.model_ranks
        if is_alone or program.overlap is Overlap.NONE or program.period > 1:
            return sent_s
        if program.microbatches:  # gradients are complete in the last one alone
            work = work / program.microbatches
        if program.gradients and program.phases and self.setup.is_sized:
            return self._walked(size, program.phases, work, costs)
        is_sharded = program.exchange is Exchange.SHARD_ALL
        leak = self.draws["leak_sharded" if is_sharded else "leak"]
        hidden = self.draws["window"] * work
        return leak * sent_s + (1 - leak) * np.maximum(0, sent_s - hidden)

    def _walked(
        self, size: Size, alone: PhaseTimes, work: Draws, costs: LinkCosts
    ) -> Draws:
        program = self.setup.program
        scale = work / (alone.forward_s + alone.backward_s + alone.load_s)
        backward = scale * max(alone.backward_s, program.gradients[-1].ready_s)
        pay, buckets = self._payer(size, costs), buckets_of(program)
        ready = [scale * ready_s for _, ready_s in buckets]
        cost_s = [pay(num_bytes) for num_bytes, _ in buckets]
        interference = self.draws["interference"]
        found = walk(ready, cost_s, backward, interference)
        return found.exposed_s + interference * found.overlapped_s

    def _communication(self, size: Size, costs: LinkCosts) -> _Communication:
        zero = np.zeros_like(self.draws["host"])
        program = self.setup.program
        if size.num_ranks == program.model_ranks:
            return np.array([zero] * 3)
        num_bytes = program.sent_bytes if self.setup.is_sized else _UNIT
        near, far = (link._replace(alpha_s=0.0) for link in costs[:2])
        costs_of_bytes = costs._replace(inside=near, between=far)
        bandwidth = self._payer(size, costs_of_bytes)(num_bytes)
        costs_between = costs_of_bytes._replace(inside=LinkCost(0.0, 0.0))
        between = np.minimum(bandwidth, self._payer(size, costs_between)(num_bytes))
        latency = self._latency(size, costs)
        if program.algorithm:
            is_at_once = program.overlap is Overlap.NONE
            num_calls = 1 if is_at_once else len(buckets_of(program)) or 1
            latency = num_calls * self._payer(size, costs)(1)
        return np.array([zero + bandwidth - between, zero + between, zero + latency])

    def _payer(self, size: Size, costs: LinkCosts) -> Callable[[float], Seconds]:
        """Return the function from bytes to the time of their exchange."""
        program, groups = self.setup.program, self._groups(size, costs)
        algorithm = program.algorithm or self.hypothesis.algorithm
        factor = 1 / program.period
        if program.exchange is Exchange.SHARD_ALL:
            factor = _SHARDED_PASSES * size.accumulation
        elif program.exchange is Exchange.PARAMETER_SERVER and size.num_nodes > 1:
            algorithm = "parameter_server"
            factor = self.draws["server"] / 2
            if not self.hypothesis.are_servers_on_all:
                factor = factor * size.num_nodes / 2

        def pay(num_bytes: float) -> Seconds:
            (group, links), *outer = groups
            sent = factor * all_reduce_s(algorithm, num_bytes, group, links)
            for copies, links in outer:
                share = num_bytes / group.num_ranks
                sent = sent + all_reduce_s(algorithm, share, copies, links)
            return sent

        return pay

    def _groups(self, size: Size, costs: LinkCosts) -> list[_Group]:
        """Return the groups that exchange gradients: of shards, then of copies."""
        program, mesh, busy = self.setup.program, self.setup.program.mesh, _busy(size)
        if program.model_ranks == 1 and 1 in (mesh.dp_shard, mesh.dp_replicate):
            return [(RankLayout(size.num_ranks, size.num_nodes, busy), costs)]
        layout = program.layout(size.num_ranks)
        found, stride = list[_Group](), layout.tp
        for num in (layout.dp_shard, layout.dp_replicate):
            near = max(1, min(num, busy // stride))
            group = RankLayout(num, math.ceil(num / near), near)
            found += [(group, costs.at_once(busy // near))] * (num > 1)
            stride *= num
        return found

    def _model_axes(self, size: Size, costs: LinkCosts) -> tuple[_Communication, float]:
        """Return the times of tp and pp, which nothing hides, and the idle share."""
        program, busy = self.setup.program, _busy(size)
        layout, sizes = program.layout(size.num_ranks), self.setup.step_sizes(size)
        sent = step_traffic(layout, sizes, 0)
        parts = max(1, round((program.microbatches or 1) * size.accumulation))
        schedule = ScheduleName.ONE_F_ONE_B
        idle = Pipeline(schedule, layout.pp, parts * program.chunks).idle_share
        message = max(1.0, sizes.activations_bytes / parts)
        crossing = min(busy, size.num_ranks // layout.pp)
        times = [np.zeros_like(self.draws["host"])] * 3
        for num_bytes, each, is_far, lines in (
            (sent["tp"], message / layout.tp, busy % layout.tp > 0, 1),
            (sent["pp"] * program.chunks, message, size.num_nodes > 1, crossing),
        ):
            link = costs.at_once(lines).between if is_far else costs.inside
            beta = np.maximum(link.beta_s_per_byte, costs.inside.beta_s_per_byte)
            times[is_far] = times[is_far] + num_bytes * beta
            times[2] = times[2] + num_bytes / each * link.alpha_s
        return np.array(times), idle

    def _costs(self, compute_s: Draws, free: str) -> LinkCosts:
        cluster, draws = self.setup.cluster, self.draws
        inside, between = self._betas(compute_s)
        alpha_inside = draws["alpha_rdma"] * 1e-6
        is_tcp = cluster.transport == "tcp"
        alpha = draws["alpha_tcp"] * 1e-6 if is_tcp else alpha_inside
        if cluster.alpha_us is not None:
            alpha = np.full_like(alpha, cluster.alpha_us * 1e-6)
        links = list[LinkCost]()
        for part, fact, usual in (
            ("bandwidth inside", cluster.inside, (alpha_inside, inside)),
            ("bandwidth between", cluster.between, (alpha, between)),
        ):
            alpha_s, beta_s = usual
            if fact is not None:
                alpha_s = fact.alpha_s
                beta_s = fact.beta_s_per_byte * draws["fit"] ** (fact.spread / 0.05)
            links.append(
                LinkCost(alpha_s * (free != "latency"), beta_s * (free != part))
            )
        near, far = links
        return LinkCosts(near, far, cluster.oversubscription, cluster.nodes_per_leaf)

    def _betas(self, compute_s: Draws) -> tuple[Draws, Draws]:
        """Return the seconds of a byte inside and between nodes."""
        program, cluster, draws = self.setup.program, self.setup.cluster, self.draws
        passes = _SHARDED_PASSES if program.exchange is Exchange.SHARD_ALL else 1.0
        passes *= program.model_ranks
        num_bytes = program.sent_bytes if self.setup.is_sized else _UNIT
        unknown = compute_s / passes / num_bytes
        missing = unknown * draws["missing_inside"], unknown * draws["missing_between"]
        if not self.setup.is_sized:
            return missing
        near = draws["pcie_gb_per_s"]
        if cluster.gpu_link_gb_per_s is not None:
            near = cluster.gpu_link_gb_per_s * draws["nvlink_share"]
        if cluster.node_gbit_per_s is None:
            return 1e-9 / near, missing[1]
        line = cluster.node_gbit_per_s / 8
        far = draws["tcp_gb_per_s"]
        if cluster.transport != "tcp":
            # What takes a part of a fast line, as PCIe does, is no limit to a slow one.
            far = draws["rdma_share"] * max(line, _FAST_LINE_GB_PER_S)
        return 1e-9 / near, 1e-9 / np.minimum(_LINE_SHARE * line, far)

    def _latency(self, size: Size, costs: LinkCosts) -> Draws:
        """Return the time of latency where the algorithm is unknown."""
        program = self.setup.program
        if not self.setup.is_sized:
            return np.zeros_like(self.draws["host"])
        n = size.num_ranks // program.model_ranks
        lg = math.log2(n)
        rounds = min(2 * (n - 1), 12 * lg)
        if not self.hypothesis.is_ring_latency:
            rounds = 4 * lg
        if program.exchange is Exchange.PARAMETER_SERVER:
            rounds = 2
        is_far = n * program.mesh.tp > _busy(size)
        alpha = (costs.between if is_far else costs.inside).alpha_s / program.period
        steps = size.accumulation if program.exchange is Exchange.SHARD_ALL else 1
        return np.asarray(steps * num_messages(program) * rounds * alpha)


def _busy(size: Size) -> int:
    return math.ceil(size.num_ranks / size.num_nodes)


def num_messages(program: Program) -> float:
    """Return the number of collectives in a step."""
    num = program.num_parameters or _TENSORS[1]
    if program.overlap is Overlap.TENSOR:
        typical, of, exponent = _TENSORS
        return typical * (num / of) ** exponent
    num /= program.model_ranks
    return 1 + num * program.itemsize / program.bucket_cap_bytes


def mean_of_largest(num: int) -> float:
    """Return the mean of the largest of draws from a standard normal distribution.

    Within 1 % of the true mean. Source: Royston, "Expected normal order statistics",
    1982, for up to 7 draws; the quantile 0.5264^(1/n) of Chen and Tyler, 1999, above.
    """
    if num <= len(_MEANS):
        return _MEANS[num - 1]
    return NormalDist().inv_cdf(0.5264 ** (1 / num))
