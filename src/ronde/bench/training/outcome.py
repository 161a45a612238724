"""What a measurement of training steps says: medians, ratios, the record's values."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ronde.bench.training.options import TrainOptions
from ronde.bench.training.phases import Phase, Round, Variant

KIND = "bench_train"
"""The kind of the records."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where it was measured.

    Attributes:
        num_ranks: Ranks that trained together.
        num_threads: Threads that each rank computes with.
        device: ``cpu`` or ``cuda``.
        device_name: The processor's or accelerator's model.
        engine: What moved the gradients; empty with one rank.
        torch: Version of torch.
    """

    num_ranks: int
    num_threads: int
    device: str
    device_name: str
    engine: str
    torch: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rounds of one measurement.

    Attributes:
        options: What was asked for.
        setting: Where it was measured.
        num_steps: Steps of a block.
        rounds: The blocks; with one rank there is only ``Variant.ONE_RANK``.
        is_in_step: Whether all ranks' weights were equal, bit for bit, at the end.
    """

    options: TrainOptions
    setting: Setting
    num_steps: int
    rounds: tuple[Round, ...]
    is_in_step: bool

    def variants(self) -> list[Variant]:
        """Return what was measured, in the order in which it is told."""
        return [variant for variant in Variant if variant in self.rounds[0]]

    def step_s(self, variant: Variant) -> float:
        """Return what a step took."""
        return self._median(lambda each: each[variant].step_s)

    def units_per_s(self, variant: Variant) -> float:
        """Return images or tokens a second of all ranks that step."""
        num_ranks = 1 if variant is Variant.ONE_RANK else self.setting.num_ranks
        units = self.options.batch * self.options.model.units_per_sample
        return num_ranks * units / self.step_s(variant)

    def phase_s(self, variant: Variant, phase: Phase) -> float:
        """Return what a part took; of ``backward()`` only what is not exposed."""
        is_split = phase is Phase.BACKWARD and variant is Variant.ALL_RANKS
        source = Variant.NO_COMMUNICATION if is_split else variant
        return self._median(lambda each: each[source].phases_s[phase])

    def exposed_s(self) -> float:
        """Return the communication of a step that backward does not hide.

        It is what ``backward()`` takes longer with communication than without, the
        median of the rounds' differences. Noise can make it negative; it is not cut.
        """
        return self._median(
            lambda each: (
                each[Variant.ALL_RANKS].phases_s[Phase.BACKWARD]
                - each[Variant.NO_COMMUNICATION].phases_s[Phase.BACKWARD]
            )
        )

    def speed_up(self) -> float:
        """Return how many times one rank's throughput all ranks reach together."""
        return self.setting.num_ranks * self._median(
            lambda each: each[Variant.ONE_RANK].step_s / each[Variant.ALL_RANKS].step_s
        )

    def efficiency(self) -> float:
        """Return the speed-up by the number of ranks."""
        return self.speed_up() / self.setting.num_ranks

    def fraction_of_ceiling(self) -> float:
        """Return the throughput by that of the same ranks without communication."""
        return self._median(
            lambda each: (
                each[Variant.NO_COMMUNICATION].step_s / each[Variant.ALL_RANKS].step_s
            )
        )

    def _median(self, figure: Callable[[Round], float]) -> float:
        return statistics.median(figure(each) for each in self.rounds)


def record_values(outcome: Outcome) -> dict[str, Any]:
    """Return a record's values: settings, medians, and every round's figures."""
    values = _asked(outcome) | _where(outcome.setting)
    values |= {
        "num_steps": outcome.num_steps,
        "is_in_step": outcome.is_in_step,
        "variants": {str(v): _figures(outcome, v) for v in outcome.variants()},
    }
    if outcome.setting.num_ranks > 1:
        values |= {
            "exposed_communication_ms": outcome.exposed_s() * 1e3,
            "speed_up": outcome.speed_up(),
            "efficiency": outcome.efficiency(),
            "fraction_of_ceiling": outcome.fraction_of_ceiling(),
        }
    return values


def _asked(outcome: Outcome) -> dict[str, Any]:
    options = outcome.options
    return {
        "model": options.model.name,
        "unit": str(options.model.unit),
        "num_parameters": options.model.num_parameters,
        "forward_macs_a_sample": options.model.forward_macs,
        "batch_a_rank": options.batch,
        "dtype": str(options.dtype),
        "optimizer": str(options.optimizer),
        "compression": str(options.compression),
        "input": str(options.input),
        "is_channels_last": options.is_channels_last,
        "is_compiled": options.is_compiled,
    }


def _where(setting: Setting) -> dict[str, Any]:
    return {
        "num_ranks": setting.num_ranks,
        "num_threads": setting.num_threads,
        "device": setting.device,
        "device_name": setting.device_name,
        "engine": setting.engine,
        "torch": setting.torch,
    }


def _figures(outcome: Outcome, variant: Variant) -> dict[str, Any]:
    return {
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
