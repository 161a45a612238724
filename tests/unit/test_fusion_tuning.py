"""The fusion threshold, found on a coordinator whose costs are simulated."""

import pytest

from ronde.coordination import FusionTuning
from ronde.tuning import TuningOptions

MIB = 1 << 20
DEFAULT = 128 * MIB
AMOUNT = TuningOptions(warmup_samples=1, steps_per_sample=3, num_pairs=4)


class Coordinator:
    """Spends time on what it runs: a latency a batch, and more for large batches."""

    def __init__(self, latency_s: float, large_s_per_byte: float) -> None:
        self.now_s = 100.0
        self.threshold = DEFAULT
        self.changes: list[int] = []
        self.latency_s, self.large_s_per_byte = latency_s, large_s_per_byte
        self.tuning = FusionTuning(DEFAULT, AMOUNT, self.change)

    def change(self, threshold: int) -> None:
        self.threshold = threshold
        self.changes.append(threshold)

    def step(self, names: list[str], each_bytes: int) -> None:
        self.now_s += 0.05  # what the program does meanwhile
        num_bytes = len(names) * each_bytes
        batch = max(each_bytes, min(self.threshold, num_bytes))
        cost = -(-num_bytes // batch) * self.latency_s
        self.now_s += cost + num_bytes * batch * self.large_s_per_byte
        self.tuning.ran(names, num_bytes, self.now_s)

    def finish(self, names: list[str], each_bytes: int) -> None:
        for _ in range(1000):
            if self.tuning.is_over:
                return
            self.step(names, each_bytes)
        pytest.fail("does not end")


def named(number: int) -> list[str]:
    return [f"allreduce.{i}" for i in range(number)]


def test_smaller_batches_win_where_large_ones_are_slow():
    coordinator = Coordinator(latency_s=0.0001, large_s_per_byte=1e-16)
    coordinator.finish(named(160), MIB)
    assert coordinator.threshold < DEFAULT
    assert coordinator.changes[-1] == coordinator.threshold


def test_the_default_stays_where_batches_cost_their_latency():
    coordinator = Coordinator(latency_s=0.01, large_s_per_byte=0.0)
    coordinator.finish(named(100), MIB)
    assert coordinator.threshold == DEFAULT


def test_unnamed_operations_and_empty_ones_do_not_disturb():
    coordinator = Coordinator(latency_s=0.01, large_s_per_byte=0.0)
    coordinator.tuning.ran(["barrier.noname"], 0, coordinator.now_s)
    coordinator.tuning.ran(["barrier.noname"], 0, coordinator.now_s)
    # No name comes again: a number of names counts as a step, and they are forgotten.
    for number in range(20_000):
        coordinator.step([f"allreduce.noname.{number}"], 1000)
    assert coordinator.changes
