"""Medians, ratios, table and record of rounds that are written down here."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ronde.bench import (
    KIND,
    MODELS,
    Phase,
    Setting,
    StepTimes,
    TrainingOutcome,
    TrainOptions,
    Variant,
    record_values,
    split_by_differences,
    spread_of,
)
from ronde.records import Record, read_records
from ronde.render import draw_models, draw_training

STUDY = Path(__file__).parents[2] / "benchmarks" / "frameworks-2026-11-30"


def times(step_s, backward_s):
    phases = dict.fromkeys(Phase, 0.001) | {Phase.BACKWARD: backward_s}
    return StepTimes(step_s, phases)


def a_round(one, both, ceiling):
    """Give each variant a step and a backward, in seconds."""
    return {
        Variant.ONE_RANK: times(*one),
        Variant.ALL_RANKS: times(*both),
        Variant.NO_COMMUNICATION: times(*ceiling),
    }


# The machine halves its speed in the last round: ratios of a round do not see that.
ROUNDS = (
    a_round((0.100, 0.045), (0.125, 0.070), (0.110, 0.055)),
    a_round((0.100, 0.045), (0.125, 0.070), (0.100, 0.050)),
    a_round((0.200, 0.090), (0.250, 0.140), (0.220, 0.110)),
)


def outcome(rounds=ROUNDS, num_ranks=2, name="resnet50", **settings):
    setting = Setting(num_ranks, 1, "cpu", "a processor", "gloo", "2.13.0", **settings)
    options = TrainOptions(MODELS[name], batch=8)
    return TrainingOutcome(options, setting, 4, tuple(rounds), is_in_step=True)


def test_figures_are_medians():
    found = outcome()
    assert found.step_s(Variant.ALL_RANKS) == 0.125
    assert found.units_per_s(Variant.ONE_RANK) == pytest.approx(8 / 0.100)
    assert found.units_per_s(Variant.ALL_RANKS) == pytest.approx(2 * 8 / 0.125)
    assert found.units_per_s(Variant.NO_COMMUNICATION) == pytest.approx(2 * 8 / 0.110)


def test_ratios_are_of_the_same_round():
    found = outcome()
    assert found.speed_up() == pytest.approx(2 * 0.8)
    assert found.efficiency() == pytest.approx(0.8)
    assert found.fraction_of_ceiling() == pytest.approx(0.88)


def test_backward_is_split_into_compute_and_exposed_communication():
    found = outcome()
    assert found.exposed_s() == pytest.approx(0.020)
    assert found.phase_s(Variant.ALL_RANKS, Phase.BACKWARD) == pytest.approx(0.055)
    assert found.phase_s(Variant.ONE_RANK, Phase.BACKWARD) == pytest.approx(0.045)
    noisy = draw_training(outcome([a_round((0.1, 0.05), (0.1, 0.048), (0.1, 0.05))]))
    assert "-2.00" in noisy
    assert "below 0" in noisy


def test_tokens_are_counted():
    found = outcome(name="transformer")
    assert found.units_per_s(Variant.ONE_RANK) == pytest.approx(8 * 64 / 0.100)
    assert "tokens/s" in draw_training(found)


def test_a_row_each_with_its_split():
    lines = draw_training(outcome()).splitlines()
    heading, one, both, ceiling = (
        " ".join(line.split()) for line in lines if not line.startswith("#")
    )
    assert heading == "images/s step input to-device forward backward exposed update"
    assert one == "1 rank 80.0 100.00 1.00 1.00 1.00 45.00 - 1.00"
    assert both == "2 ranks 128.0 125.00 1.00 1.00 1.00 55.00 20.00 1.00"
    assert ceiling.endswith("145.5 110.00 1.00 1.00 1.00 55.00 - 1.00")
    assert "speed-up 1.60, efficiency 80.0%, 88.0% of the ceiling" in lines[-1]


def test_compiled_steps_are_split_by_differences():
    """A step without communication has parts of 10, 35 and 40 ms."""
    names = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    parts = dict.fromkeys(Phase, 0.001) | dict(
        zip(names, (0.010, 0.035, 0.040), strict=True)
    )
    nothing = dict.fromkeys(Phase, 0.0)
    found = split_by_differences(
        {
            Variant.PEER: StepTimes(0.070, nothing),
            Variant.NO_COMMUNICATION: StepTimes(0.042, parts),
            Variant.ALL_RANKS: StepTimes(0.050, nothing),
            Variant.ONE_RANK: StepTimes(0.042, parts),
        }
    )
    for variant, exposed_s in (
        (Variant.ONE_RANK, 0.0),
        (Variant.NO_COMMUNICATION, 0.0),
        (Variant.ALL_RANKS, 0.008),
        (Variant.PEER, 0.028),
    ):
        shown = [found[variant].phases_s[phase] for phase in Phase]
        assert shown == pytest.approx([0.001, 0.001, 0.010, 0.025 + exposed_s, 0.005])
        assert found[variant].step_s == pytest.approx(0.042 + exposed_s)


def test_one_rank_has_no_ratios():
    rounds = [{Variant.ONE_RANK: times(0.1, 0.05)}]
    found = outcome(rounds, num_ranks=1)
    assert found.variants() == [Variant.ONE_RANK]
    assert "speed-up" not in draw_training(found)
    assert "speed_up" not in record_values(found)


def test_the_record_keeps_every_round():
    values = json.loads(Record(KIND, record_values(outcome())).to_json())["values"]
    assert values["variants"]["all_ranks"]["rounds_step_ms"] == [125.0, 125.0, 250.0]
    assert values["exposed_communication_ms"] == pytest.approx(20.0)
    assert values["variants"]["one_rank"]["phases_ms"]["forward"] == pytest.approx(1.0)
    assert values["num_parameters"] == 25_557_032


def test_single_steps_are_quantiles_of_all_ranks_together():
    blocks = [((0.001, 0.003), (0.002, 0.004)), ((0.005,), (0.006,))]
    rounds = [
        {Variant.ONE_RANK: replace(times(0.1, 0.05), steps_s=block)} for block in blocks
    ]
    (found,) = record_values(outcome(rounds, num_ranks=1))["steps_ms"].values()
    assert found["50"] == pytest.approx(3.5)
    assert found["95"] == pytest.approx(5.75)
    assert list(found) == ["5", "25", "50", "75", "95", "99"]
    rounds = [{Variant.ONE_RANK: replace(times(0.1, 0.05), steps_s=((0.1,),))}]
    values = record_values(outcome(rounds, num_ranks=1))
    assert set(values["steps_ms"]["one_rank"].values()) == {100.0}
    assert values["spread"] is None


@given(st.floats(0, 0.3), st.floats(0, 0.3), st.integers(2, 5), st.integers(1, 6))
def test_the_spread_is_split_between_ranks_and_steps(between, common, ranks, pairs):
    """Half of the ranks, or steps, are slower by one factor, half faster."""
    signs = [1, -1] * pairs
    num_ranks, num_steps = 2 * ranks, len(signs)
    block = tuple(
        tuple(math.exp((-1) ** rank * between + common * sign) for sign in signs)
        for rank in range(num_ranks)
    )
    # Deviations of a sample whose values are all as far from the mean.
    of_ranks = between * math.sqrt(num_ranks / (num_ranks - 1))
    of_means = common * math.sqrt(num_steps / (num_steps - 1))
    of_steps = math.sqrt(max(0.0, of_means**2 - of_ranks**2 / num_ranks))
    found = spread_of([block])
    assert found["between_ranks"] == pytest.approx(of_ranks, abs=1e-7)
    # A difference of squares that cancel: half of the digits.
    assert found["common"] == pytest.approx(of_steps, abs=1e-7)
    assert spread_of([block[:1]]) is None
    assert spread_of([((0.1,), (0.2,))]) is None


def test_an_old_record_is_read_and_its_keys_are_still_there():
    old = read_records(STUDY / "records.jsonl", KIND)
    assert {each.values["framework"] for each in old} >= {"torch", "jax"}
    new = record_values(outcome())
    for each in old:
        assert set(each.values) <= set(new)


def test_models_are_listed_with_their_size():
    text = draw_models(list(MODELS.values()))
    assert "resnet50" in text
    assert "25,557,032" in text
    assert "4.09 GMAC for an image" in text
    assert "55.1 MMAC for 64 tokens" in text
