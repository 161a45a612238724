"""The facts of a prediction: a program, a cluster, and measured speeds.

Every fact may be unknown, that is None. An unknown fact is drawn from its prior, and
widens the interval.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from ronde.parallel.buckets import BucketLimits, GradientSpec, plan_buckets
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
    """A number of ranks, and the samples that a rank processes in a step."""

    num_ranks: int
    num_nodes: int
    batch: float | None = None  # samples of a rank in an optimizer step
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

    @property
    def sent_bytes(self) -> float:
        """The bytes of all gradients on the line; 0 if their number is unknown."""
        return (self.num_parameters or 0.0) * self.itemsize * self.compression


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
        known = (
            program.num_parameters,
            program.units_a_sample,
            self.points[0].size.batch,
        )
        return None not in known

    def units(self, size: Size) -> float:
        """Return the units of a step of all ranks.

        An unknown batch is that of the smallest point, or 1 if that is unknown, too.
        """
        base = self.points[0].size.batch
        batch = 1.0 if base is None else size.batch or base
        return size.num_ranks * batch * (self.program.units_a_sample or 1.0)
