"""The facts of a prediction: a program, a cluster, and measured speeds.

Every fact may be unknown, that is None. An unknown fact is drawn from its prior, and
widens the interval.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from typing import NamedTuple

from ronde.parallel.buckets import BucketLimits, GradientSpec, plan_buckets
from ronde.parallel.layout import Layout
from ronde.parallel.traffic import StepSizes
from ronde.units import grouped


class Overlap(StrEnum):
    """The pieces in which gradients are sent while backward runs."""

    NONE = "none"  # all are sent after backward
    BUCKET = "bucket"
    TENSOR = "tensor"


class Exchange(StrEnum):
    """The way in which ranks exchange gradients, and weights where they are sharded."""

    ALL_REDUCE = "all_reduce"
    PARAMETER_SERVER = "parameter_server"
    SHARD_GRADIENTS = "shard_gradients"  # ZeRO-1 and -2, FSDP's SHARD_GRAD_OP
    SHARD_ALL = "shard_all"  # ZeRO-3, FSDP's FULL_SHARD

    @property
    def zero(self) -> int:
        return {"shard_gradients": 2, "shard_all": 3}.get(self, 0)


class ArrivingGradient(NamedTuple):
    """A gradient, as ``ronde bench train`` records it."""

    numel: int
    itemsize: int  # bytes of an element
    ready_s: float  # after the start of backward


class PhaseTimes(NamedTuple):
    """Measured times of a step on one rank without communication."""

    forward_s: float
    backward_s: float
    update_s: float
    load_s: float = 0.0  # input and copies to the device


class Size(NamedTuple):
    """A number of ranks, and the samples of a model copy in a step."""

    num_ranks: int
    num_nodes: int
    batch: float | None = None  # of a rank, or of the tp * pp ranks of a copy
    accumulation: float = 1  # micro-batches of that step

    @property
    def order(self) -> tuple[int, float]:
        """A key to sort sizes by."""
        return self.num_ranks, self.batch or 0.0


class Point(NamedTuple):
    """A measured or published speed."""

    size: Size
    units_per_s: float  # of all ranks


def speeds_by_size(points: Iterable[Point]) -> dict[Size, list[float]]:
    """Return the speeds of each size, in order."""
    found = grouped(points)
    return {size: found[size] for size in sorted(found, key=lambda size: size.order)}


@dataclass(frozen=True, slots=True)
class Program:
    """Facts of a training program that do not depend on the cluster."""

    name: str = ""
    unit: str = "samples"
    units_a_sample: float | None = 1.0  # None: unknown, as is the time of a step
    num_parameters: float | None = None
    itemsize: float = 4.0  # bytes of an exchanged element
    overlap: Overlap | None = None
    exchange: Exchange = Exchange.ALL_REDUCE
    algorithm: str = ""  # of ``ronde.collectives.pricing``; "" for unknown
    # The batch of a rank changes with its size while a micro-batch stays.
    is_accumulating: bool = False
    phases: PhaseTimes | None = None  # at the batch of the smallest point
    gradients: tuple[ArrivingGradient, ...] = ()  # in order of arrival
    bucket_cap_bytes: int = 25 << 20
    compression: float = 1.0  # bytes that are sent, by those of the gradients
    compute_speed: float = 1.0  # of the device, in multiples of the measured one's
    host_share: float | None = None  # measured: of a step, with 8 busy ranks a node
    jitter: float | None = None  # measured: deviation between ranks of log step times
    input_units_per_s: float | None = None  # that a shared store delivers to all ranks
    mesh: Layout = Layout()  # noqa: RUF009 - frozen
    num_blocks: int | None = None
    hidden: int | None = None  # width of the activations between blocks
    sequence: float | None = None  # tokens of a sample
    microbatches: int | None = None  # of a pipeline, in each batch of a copy
    chunks: int = 1  # stages of each rank of a pipeline
    period: float = 1.0  # steps between exchanges, as in local SGD

    @property
    def model_ranks(self) -> int:
        """The number of ranks that share a copy of the model and its work."""
        return self.mesh.tp * self.mesh.pp

    @property
    def sent_bytes(self) -> float:
        """The bytes of a rank's gradients on the line; 0 if they are unknown."""
        held = (self.num_parameters or 0.0) / self.model_ranks
        return held * self.itemsize * self.compression

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout of so many ranks: tp and pp stay, a data axis grows."""
        return _grown(self.mesh, num_ranks, is_sharded=self.exchange.zero > 0)


@cache
def _grown(mesh: Layout, num_ranks: int, *, is_sharded: bool) -> Layout:
    if -1 not in mesh.sizes.values():
        is_sharded = is_sharded and mesh.dp_replicate == 1
        mesh = replace(mesh, **{"dp_shard" if is_sharded else "dp_replicate": -1})
    return mesh.resolve(num_ranks)


@lru_cache(maxsize=64)
def buckets_of(program: Program) -> tuple[tuple[float, float], ...]:
    """Return the bytes of each bucket, and the time when it is ready in backward."""
    specs = [GradientSpec(g.numel, g.itemsize, None) for g in program.gradients]
    cap = program.bucket_cap_bytes
    limits = BucketLimits(min(BucketLimits().first_bytes, cap), cap)
    found: list[tuple[float, float]] = []
    for plan in plan_buckets(specs, range(len(specs)), limits):
        last = program.gradients[max(slot.index for slot in plan.slots)]
        numel = sum(slot.numel for slot in plan.slots)
        numel /= program.model_ranks
        sent = numel * program.itemsize * program.compression
        found.append((sent, last.ready_s))
    return tuple(found)


class LinkFacts(NamedTuple):
    """A measured latency and bandwidth, with their relative standard deviation."""

    alpha_s: float
    beta_s_per_byte: float
    spread: float = 0.05


@dataclass(frozen=True, slots=True)
class Cluster:
    """Facts of equal nodes and the links inside and between them."""

    ranks_per_node: int = 1
    node_gbit_per_s: float | None = None  # line rate of all adapters of a node
    transport: str = ""  # tcp, rdma or "" for unknown
    gpu_link_gb_per_s: float | None = None  # practical, one way, of one GPU
    alpha_us: float | None = None  # of a message between nodes
    inside: LinkFacts | None = None  # measured
    between: LinkFacts | None = None  # measured
    oversubscription: float = 1.0
    nodes_per_leaf: int = 0  # 0: all nodes are below one switch


@dataclass(frozen=True, slots=True)
class Setup:
    """All facts of one prediction."""

    program: Program
    cluster: Cluster
    points: tuple[Point, ...]  # one or more, by size

    @property
    def is_sized(self) -> bool:
        """True if the seconds of a step and the bytes of its gradients follow."""
        program = self.program
        known = program.num_parameters, program.units_a_sample
        return None not in (*known, self.points[0].size.batch)

    def units(self, size: Size) -> float:
        """Return the units of a step of all ranks.

        An unknown batch is that of the smallest point, or 1 if that is unknown, too.
        """
        base = self.points[0].size.batch
        batch = 1.0 if base is None else size.batch or base
        copies = size.num_ranks / self.program.model_ranks
        return copies * batch * (self.program.units_a_sample or 1.0)

    def step_sizes(self, size: Size) -> StepSizes:
        """Return the sizes of weights and activations on a rank; 0 if unknown."""
        program = self.program
        weights = (program.num_parameters or 0.0) * program.itemsize
        tokens = (size.batch or 0.0) * (program.sequence or 0.0)
        activations = tokens * (program.hidden or 0) * program.itemsize
        blocks = math.ceil((program.num_blocks or 1) / program.mesh.pp)
        return StepSizes(weights / program.model_ranks, activations, blocks)
