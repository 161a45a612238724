"""The choice of a setting, with costs that are simulated."""

import csv
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.tuning import Tuner, TuningLog, TuningOptions

OPTIONS = st.builds(
    TuningOptions,
    warmup_samples=st.integers(0, 3),
    steps_per_sample=st.integers(1, 7),
    max_samples=st.integers(1, 30),
    num_pairs=st.integers(3, 7),
    min_gain=st.floats(0, 0.5),
)
COSTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=12)


@dataclass
class Machine:
    """Takes longer than it should, up to ``noise`` times, and at times much longer."""

    costs: list[float]
    noise: float
    random: object
    num_steps: int = 0

    def run(self, setting: int, options: TuningOptions) -> float:
        place = self.num_steps % options.num_fed
        self.num_steps += 1
        # Fewer than half of a sample's steps, and the one after a change.
        if place == 0 or place <= (options.steps_per_sample - 1) // 2:
            return self.costs[setting] * self.random.uniform(1, 100)
        return self.costs[setting] * self.random.uniform(1, 1 + self.noise)


def tune(machine: Machine, options: TuningOptions) -> Tuner[int]:
    tuner = Tuner(range(len(machine.costs)), options, "", dict)
    while not tuner.is_over:
        tuner.feed(machine.run(tuner.setting, options))
    return tuner


@given(COSTS, OPTIONS, st.floats(0, 0.5), st.randoms(use_true_random=False))
def test_never_worse_than_the_default_beyond_the_noise(costs, options, noise, random):
    tuner = tune(Machine(costs, noise, random), options)
    chosen = costs[tuner.setting]
    assert tuner.setting == 0 or chosen <= costs[0] * (1 - options.min_gain) * (
        1 + noise
    ) * (1 + 1e-12)


@given(COSTS, OPTIONS, st.floats(0, 0.5), st.randoms(use_true_random=False))
def test_ends_within_its_budget(costs, options, noise, random):
    machine = Machine(costs, noise, random)
    tune(machine, options)
    num_samples = options.warmup_samples + options.max_samples + 2 * options.num_pairs
    assert machine.num_steps <= num_samples * options.num_fed


@given(COSTS, st.randoms(use_true_random=False))
def test_finds_the_best_on_a_quiet_machine(costs, random):
    options = TuningOptions(max_samples=30)
    tuner = tune(Machine(costs, 0.0, random), options)
    best = min(costs)
    if best < costs[0] * (1 - options.min_gain) * (1 - 1e-12):
        assert costs[tuner.setting] == best
    else:
        assert tuner.setting == 0


def test_a_slow_time_of_the_machine_makes_no_winner():
    """The default ran while the machine was slow: the last comparison shows it."""
    options = TuningOptions(warmup_samples=0, steps_per_sample=1)
    tuner = Tuner(["default", "other"], options, "", dict)
    while not tuner.is_over:
        is_slow = tuner.setting == "default" and not tuner.samples
        tuner.feed(3.0 if is_slow else 1.0)
    assert [sample.phase for sample in tuner.samples[:2]] == ["search", "search"]
    assert any(sample.phase == "final" for sample in tuner.samples)
    assert tuner.setting == "default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_samples": -1}, "warmup_samples must be >= 0, got -1"),
        ({"steps_per_sample": 0}, "steps_per_sample must be >= 1, got 0"),
        ({"max_samples": 0}, "max_samples must be >= 1, got 0"),
        ({"num_pairs": 2}, "num_pairs must be >= 3, got 2"),
        ({"min_gain": 1.0}, "min_gain must be >= 0 and < 1, got 1.0"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(UsageError, match=message):
        TuningOptions(**options)


def test_log(tmp_path):
    path = tmp_path / "tuning.csv"
    path.write_text("old\n")
    log = TuningLog(path)
    log.add("gradients", "search", {"first_bucket_bytes": 5, "bucket_bytes": 7}, 0.25)
    log.add("fusion", "best", {"tensor_fusion_threshold": 9}, 0.5)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["score"] for row in rows] == ["4", "2"]
    assert rows[0]["bucket_bytes"] == "7"
    assert rows[0]["tensor_fusion_threshold"] == ""
    assert rows[1]["tuned"] == "fusion"
