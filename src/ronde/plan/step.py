"""The time of a training step on n ranks, part by part, for draws of the unknowns.

Arrays have one element for each draw. Times are in seconds.

Source: the directed acyclic graph of synchronous SGD with wait-free backpropagation,
Shi et al., arXiv:1805.03812 and arXiv:1711.05979; where no gradient's time is known,
``E = leak C + (1 - leak) max(0, C - window T)`` stands for the walk over its buckets.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.plan.setup import Cluster, Exchange, Overlap, Program, Setup, Size

Draws = NDArray[np.float64]
PARTS = (
    *("compute", "host", "bandwidth inside", "bandwidth between", "latency"),
    *("fixed cost", "stragglers"),
)
_LEAST_WORK = 0.02  # the least share of a step that computes
_NEWTON_ROUNDS = 4
_BUCKET_BYTES = 25 << 20
_TENSORS = 160, 25.6e6, 0.35  # tensors of a model with so many parameters; exponent


class Hypothesis(NamedTuple):
    """The unknowns that are either one thing or another."""

    algorithm: str = "ring"  # or two_levels
    is_ring_latency: bool = True  # min(2 (n-1), 12 lg n) messages, else 4 lg n
    are_servers_on_all: bool = True  # else their number is fixed


class StepParts(NamedTuple):
    """A step's time and its parts; exposed times only."""

    step_s: Draws
    parts_s: Mapping[str, Draws]


@dataclass(frozen=True, slots=True)
class StepModel:
    """The step of a setup under one hypothesis, for draws of its unknowns."""

    setup: Setup
    hypothesis: Hypothesis
    draws: Mapping[str, Draws]

    def at(self, size: Size, compute_s: Draws) -> StepParts:
        """Return the step at a size, if computing takes ``compute_s`` at the base."""
        base = self.setup.points[0].size
        work = compute_s * self._work(size, base)
        host = work * self._host_share(size)
        inside, between, latency = self._communication(size, work)
        total = inside + between + latency
        exposed = self._exposed(total, work)
        share = exposed / np.maximum(total, 1e-30)
        fixed = self._update(size)
        alone = work + host + exposed + fixed
        waiting = alone * self._straggling(size)
        parts = (work, host, inside * share, between * share, latency * share)
        named = dict(zip(PARTS, (*parts, fixed, waiting), strict=True))
        return StepParts(alone + waiting, named)

    def compute_s(self, step_s: float) -> Draws:
        """Return the base's computing time with which its step takes ``step_s``."""
        size = self.setup.points[0].size
        known = step_s / (1 + self._straggling(size)) - self._update(size)
        floor = np.maximum(_LEAST_WORK * step_s, 1e-12)
        guess = np.maximum(known, floor)
        # The step is a convex function of the computing time, in straight pieces:
        # Newton's method from above ends after as many rounds as there are pieces.
        for _ in range(_NEWTON_ROUNDS):
            reached = self.at(size, guess).step_s
            slope = (reached - self.at(size, guess * (1 - 1e-4)).step_s) / (guess * 1e-4)
            guess = np.maximum(guess - (reached - step_s) / slope, floor)
        return guess

    def _work(self, size: Size, base: Size) -> Draws | float:
        if size.batch is None or base.batch is None or size.batch == base.batch:
            return 1.0
        ratio = size.batch / base.batch
        if self.setup.program.is_accumulating:
            return ratio
        return ratio + self.draws["launch"] * (1 - ratio)

    def _host_share(self, size: Size) -> Draws:
        busy = math.ceil(size.num_ranks / size.num_nodes)
        return self.draws["host"] * math.log2(busy) / 3

    def _straggling(self, size: Size) -> Draws:
        return self.draws["growth"] * math.log2(size.num_nodes)

    def _update(self, size: Size) -> Draws:
        num = self.setup.program.num_parameters
        if num is None or not self.setup.is_sized:
            return np.zeros_like(self.draws["update"])
        if self.setup.program.exchange is Exchange.SHARD_ALL:
            num /= size.num_ranks
        return self.draws["update"] * num / 336e6

    def _exposed(self, total: Draws, work: Draws) -> Draws:
        if self.setup.program.overlap is Overlap.NONE:
            return total
        is_sharded = self.setup.program.exchange is Exchange.SHARD_ALL
        leak = self.draws["leak_sharded" if is_sharded else "leak"]
        window = self.draws["window"]
        return leak * total + (1 - leak) * np.maximum(0, total - window * work)

    def _communication(self, size: Size, work: Draws) -> tuple[Draws, Draws, Draws]:
        """Return the times of bytes inside and between nodes, and of latency."""
        zero = np.zeros_like(work)
        if size.num_ranks == 1:
            return zero, zero, zero
        n, num_nodes = size.num_ranks, size.num_nodes
        g = math.ceil(n / num_nodes)
        inside_s, between_s = self._pass_times(work, size)
        program = self.setup.program
        steps = size.accumulation if program.exchange is Exchange.SHARD_ALL else 1
        passes = 1.5 * steps if program.exchange is Exchange.SHARD_ALL else 1.0
        latency = self._latency(size) * steps
        if program.exchange is Exchange.PARAMETER_SERVER and num_nodes > 1:
            more = 1.0 if self.hypothesis.are_servers_on_all else num_nodes / 2
            slower = np.maximum(between_s * more, inside_s)
            return zero, slower * self.draws["server"], latency
        volume = passes * 2
        if self.hypothesis.algorithm == "two_levels" and num_nodes > 1:
            return (
                volume * (g - 1) / g * inside_s,
                volume * (num_nodes - 1) / num_nodes * between_s,
                latency,
            )
        volume *= (n - 1) / n
        if num_nodes == 1:
            return volume * inside_s, zero, latency
        is_between = between_s >= inside_s if g > 1 else np.full(work.shape, fill_value=True)
        return (
            np.where(is_between, 0.0, volume * inside_s),
            np.where(is_between, volume * between_s, 0.0),
            latency,
        )

    def _pass_times(self, work: Draws, size: Size) -> tuple[Draws, Draws]:
        """Return the times in which the gradients once pass a link inside, between."""
        program, cluster, draws = self.setup.program, self.setup.cluster, self.draws
        base_work = work / self._work(size, self.setup.points[0].size)
        if program.exchange is Exchange.SHARD_ALL:
            base_work = base_work / 1.5
        missing = draws["missing_inside"], draws["missing_between"]
        if not self.setup.is_sized:
            return base_work * missing[0], base_work * missing[1]
        num_bytes = (program.num_parameters or 0.0) * program.itemsize
        inside = num_bytes / (inside_rate(cluster, draws) * 1e9)
        rate = between_rate(cluster, draws)
        if rate is None:
            return inside, base_work * missing[1]
        return inside, num_bytes / (rate * 1e9)

    def _latency(self, size: Size) -> Draws:
        program = self.setup.program
        if not self.setup.is_sized:
            return np.zeros_like(self.draws["alpha_rdma"])
        n, lg = size.num_ranks, math.log2(size.num_ranks)
        rounds = min(2 * (n - 1), 12 * lg)
        if not self.hypothesis.is_ring_latency:
            rounds = 4 * lg
        if program.exchange is Exchange.PARAMETER_SERVER:
            rounds = 2
        is_tcp = self.setup.cluster.transport == "tcp"
        alpha_us = self.draws["alpha_tcp"] if is_tcp else self.draws["alpha_rdma"]
        return num_messages(program) * rounds * alpha_us * 1e-6


def num_messages(program: Program) -> float:
    """Return the number of collectives in a step."""
    num = program.num_parameters or _TENSORS[1]
    if program.overlap is Overlap.TENSOR:
        typical, of, exponent = _TENSORS
        return program.num_tensors or typical * (num / of) ** exponent
    return 1 + num * program.itemsize / _BUCKET_BYTES


def inside_rate(cluster: Cluster, draws: Mapping[str, Draws]) -> Draws:
    """Return the GB/s of a rank's link inside a node; PCIe's if none is known."""
    if cluster.gpu_link_gb_per_s is None:
        return draws["pcie_gb_per_s"]
    return cluster.gpu_link_gb_per_s * draws["nvlink_share"]


def between_rate(cluster: Cluster, draws: Mapping[str, Draws]) -> Draws | None:
    """Return the GB/s of a node; None without a known line."""
    if cluster.node_gbit_per_s is None:
        return None
    line = cluster.node_gbit_per_s / 8
    if cluster.transport == "tcp":
        return np.minimum(0.95 * line, draws["tcp_gb_per_s"])
    return line * draws["rdma_share"]
