"""Options and results of measured training steps; does not import torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain
from math import log, sqrt
from statistics import fmean
from typing import Any, Literal, NamedTuple

from ronde.bench.training.catalogue import MODELS, PORTABLE, ModelFacts
from ronde.errors import UsageError

DeviceKind = Literal["auto", "cpu", "cuda"]  # auto is CUDA if torch has a device
Framework = Literal["torch", "tensorflow", "keras", "jax"]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of ``ronde bench train``."""

    model: ModelFacts
    batch: int  # samples per step and rank, in every variant
    rounds: int = 5  # blocks of steps of each variant; figures are medians over them
    steps: int | None = None  # steps per block; None for about 0.4 s
    warmup: int = 3  # untimed steps of each replica
    dtype: Literal["float32", "bfloat16"] = "float32"  # of autocast
    device: DeviceKind = "auto"
    optimizer: Literal["sgd", "adam"] = "sgd"
    compression: Literal["none", "fp16", "bf16"] = "none"
    # Two alternating batches, or new random samples in each step, as from a loader.
    input: Literal["prepared", "gathered"] = "prepared"
    engine: str = ""  # empty: as in the environment
    is_channels_last: bool = False
    framework: Framework = "torch"
    # With the parameter server, all-reduce is measured, too.
    reduce: Literal["all_reduce", "parameter_server"] = "all_reduce"
    is_peered: bool = False  # measure the framework's own strategy, too

    def __post_init__(self) -> None:
        least = {"batch": 1, "rounds": 1, "steps": 1, "warmup": 0}
        for name, value in least.items():
            given: int | None = getattr(self, name)
            if given is not None and given < value:
                raise UsageError(
                    f"{name} must be at least {value}, got {given}. "
                    f"Type: --{name} {max(value, 1)}"
                )
        if self.is_channels_last and not self.model.is_of_maps:
            raise UsageError(
                "--channels-last needs a model whose input is images, got "
                f"{self.model.name}. Leave it out."
            )
        if self.framework != "torch":
            self._require_portable()

    def _require_portable(self) -> None:
        if self.model.name not in PORTABLE:
            raise UsageError(
                f"model must be one of {', '.join(PORTABLE)} with --framework "
                f"{self.framework}, got {self.model.name}. Leave --framework out."
            )
        for option, is_given in (
            ("--reduce parameter_server", self.reduce != "all_reduce"),
            ("--dtype bfloat16", self.dtype != "float32"),
            ("--channels-last", self.is_channels_last),
            ("--device cuda", self.device == "cuda"),
        ):
            if is_given:
                raise UsageError(
                    f"{option} needs --framework torch, got {self.framework}. "
                    f"Leave out one of the two."
                )


def find_model(name: str) -> ModelFacts:
    if name not in MODELS:
        raise UsageError(
            f"model must be one of {', '.join(sorted(MODELS))}, got {name!r}. "
            "Type: ronde bench train --help"
        )
    return MODELS[name]


class Phase(StrEnum):
    """The phases of a training step, in order."""

    INPUT = "input"
    HOST_TO_DEVICE = "host_to_device"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Variant(StrEnum):
    """The variants of training that a run compares."""

    ONE_RANK = "one_rank"
    ALL_RANKS = "all_ranks"
    NO_COMMUNICATION = "no_communication"
    PARAMETER_SERVER = "parameter_server"
    BARE = "bare"  # a loop without Keras' trainer, with ronde on Keras' backend
    PEER = "peer"  # the framework's own strategy
    DATA_PARALLEL = "data_parallel"  # torch's, with one process for all GPUs


COMMUNICATING = (
    *(Variant.ALL_RANKS, Variant.PARAMETER_SERVER),
    *(Variant.BARE, Variant.PEER),
)
ALONE = (Variant.ONE_RANK, Variant.DATA_PARALLEL)  # the other ranks wait


Block = tuple[tuple[float, ...], ...]  # seconds, by rank and step


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Mean times per step, over a block of steps."""

    step_s: float  # the slowest rank's, measured without phases
    phases_s: Mapping[Phase, float]
    steps_s: Block = ()  # single steps; empty if they cannot be told apart


_QUANTILES = (5, 25, 50, 75, 95, 99)  # in percent
Round = Mapping[Variant, StepTimes]  # one block of steps of every variant
KIND = "bench_train"


@dataclass(frozen=True, slots=True)
class Setting:
    """Ranks, device and engine of a measurement."""

    num_ranks: int
    num_threads: int  # per rank
    device: str  # ``cpu`` or ``cuda``
    device_name: str
    engine: str  # the engine of the gradients' all-reduce; empty with one rank
    torch: str  # version
    framework_version: str = ""
    backend: str = "torch"  # what computes: of Keras its backend, else the framework
    algorithm: str = ""  # the engine's schedule; empty if its backend chooses
    collective_backend: str = ""  # the library that moves bytes between ranks
    hosts: tuple[int, ...] = (1,)  # ranks on each host


class GradientArrival(NamedTuple):
    """A gradient that backward has finished."""

    numel: int
    itemsize: int
    ready_ms: float  # after the start of backward


class ReducedBuckets(NamedTuple):
    """The buckets of gradients that a ``DistributedOptimizer`` reduces, in order."""

    num_bytes: tuple[int, ...]  # of the reduced memory, with padding and control flags
    num_gradients: tuple[int, ...]
    first_bytes: int  # the size at which the first bucket is full
    other_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The options, setting and times of one measurement."""

    options: TrainOptions
    setting: Setting
    num_steps: int  # steps per block
    rounds: tuple[Round, ...]
    is_in_step: bool  # all ranks' weights were equal at the end, bit for bit
    gradients: tuple[GradientArrival, ...] = ()  # in order of arrival; empty if unknown
    buckets: ReducedBuckets | None = None

    def variants(self) -> list[Variant]:
        return [variant for variant in Variant if variant in self.rounds[0]]

    def step_s(self, variant: Variant) -> float:
        return statistics.median(each[variant].step_s for each in self.rounds)

    def units_per_s(self, variant: Variant) -> float:
        num_ranks = 1 if variant is Variant.ONE_RANK else self.setting.num_ranks
        units = self.options.batch * self.options.model.units_per_sample
        return num_ranks * units / self.step_s(variant)

    def phase_s(self, variant: Variant, phase: Phase) -> float:
        """Return a phase's median time; backward excludes exposed communication."""
        is_split = phase is Phase.BACKWARD and variant in COMMUNICATING
        source = Variant.NO_COMMUNICATION if is_split else variant
        return statistics.median(each[source].phases_s[phase] for each in self.rounds)

    def exposed_s(self, variant: Variant = Variant.ALL_RANKS) -> float:
        """Return the communication time per step that backward does not hide."""
        # The time of ``backward()`` with communication minus the time without; noise
        # can make it negative.
        variants, phase = (variant, Variant.NO_COMMUNICATION), Phase.BACKWARD
        pairs = [[each[v].phases_s[phase] for v in variants] for each in self.rounds]
        return statistics.median(longer - shorter for longer, shorter in pairs)

    def speed_up(self) -> float:
        return self.setting.num_ranks * self._ratio(Variant.ONE_RANK)

    def efficiency(self) -> float:
        return self.speed_up() / self.setting.num_ranks

    def fraction_of_ceiling(self) -> float:
        return self._ratio(Variant.NO_COMMUNICATION)

    def speed_over(self) -> dict[Variant, float]:
        """Return all ranks' speed in multiples of each other way to reduce."""
        runs = (Variant.ONE_RANK, Variant.ALL_RANKS, Variant.NO_COMMUNICATION)
        return {v: self._ratio(v) for v in self.variants() if v not in runs}

    def blocks_s(self, variant: Variant) -> list[Block]:
        return [r[variant].steps_s for r in self.rounds if variant in r]

    def _ratio(self, variant: Variant) -> float:
        whole = Variant.ALL_RANKS
        steps = [(each[variant].step_s, each[whole].step_s) for each in self.rounds]
        return statistics.median(own / all_ranks for own, all_ranks in steps)


def record_values(outcome: TrainingOutcome) -> dict[str, Any]:
    options, setting = outcome.options, outcome.setting
    kinds = ("framework", "reduce", "dtype", "optimizer", "compression", "input")
    values: dict[str, Any] = {
        "model": options.model.name,
        "unit": str(options.model.unit),
        "num_parameters": options.model.num_parameters,
        "forward_macs_a_sample": options.model.forward_macs,
        "batch_a_rank": options.batch,
        **{kind: getattr(options, kind) for kind in kinds},
        "is_channels_last": options.is_channels_last,
        **asdict(setting),
        "num_steps": outcome.num_steps,
        "is_in_step": outcome.is_in_step,
        "gradients": [list(each) for each in outcome.gradients] or None,
        "buckets": outcome.buckets._asdict() if outcome.buckets else None,
        "steps_ms": _quantiles_ms(outcome),
        "spread": spread_of(outcome.blocks_s(Variant.NO_COMMUNICATION)),
        "variants": {str(v): _figures(outcome, v) for v in outcome.variants()},
    }
    if setting.num_ranks > 1:
        values |= {
            "exposed_communication_ms": outcome.exposed_s() * 1e3,
            "speed_up": outcome.speed_up(),
            "efficiency": outcome.efficiency(),
            "fraction_of_ceiling": outcome.fraction_of_ceiling(),
            "speed_over": {str(v): r for v, r in outcome.speed_over().items()},
        }
    return values


def _quantiles_ms(outcome: TrainingOutcome) -> dict[str, dict[str, float]] | None:
    """Return quantiles of single steps of all ranks together, by variant."""
    found: dict[str, dict[str, float]] = {}
    for variant in (Variant.ONE_RANK, Variant.ALL_RANKS, Variant.NO_COMMUNICATION):
        steps = [s * 1e3 for block in outcome.blocks_s(variant) for s in chain(*block)]
        if steps:
            steps *= 2 if len(steps) == 1 else 1
            cuts = statistics.quantiles(steps, n=100, method="inclusive")
            found[variant] = {str(q): cuts[q - 1] for q in _QUANTILES}
    return found or None


def spread_of(blocks: Sequence[Block]) -> dict[str, float] | None:
    """Return standard deviations of the logarithm of single steps.

    ``between_ranks`` is that of ranks in one step; ``common`` that of steps, as far as
    all ranks share it. Both are needed: None for one rank or one step.
    """
    steps = [
        list(map(log, step)) for block in blocks for step in zip(*block, strict=True)
    ]
    if len(steps) < 2 or len(steps[0]) < 2:
        return None
    between = fmean(map(statistics.variance, steps))
    of_means = statistics.variance(map(fmean, steps))
    # The mean over ranks varies, too, if they have nothing in common.
    common = max(0.0, of_means - between / len(steps[0]))
    return {"between_ranks": sqrt(between), "common": sqrt(common)}


def _figures(outcome: TrainingOutcome, variant: Variant) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if variant in COMMUNICATING:
        figures["exposed_ms"] = outcome.exposed_s(variant) * 1e3
    return figures | {
        "step_ms": outcome.step_s(variant) * 1e3,
        "units_per_s": outcome.units_per_s(variant),
        "phases_ms": {
            str(phase): outcome.phase_s(variant, phase) * 1e3 for phase in Phase
        },
        "rounds_step_ms": [each[variant].step_s * 1e3 for each in outcome.rounds],
        "rounds_phases_ms": [
            {str(p): s * 1e3 for p, s in each[variant].phases_s.items()}
            for each in outcome.rounds
        ],
    }
