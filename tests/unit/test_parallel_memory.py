"""Bytes of model states, and FSDP2's peaks, against what was measured."""

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.parallel import (
    Layout,
    OptimizerName,
    Precision,
    RankMemory,
    Sharding,
    StepSizes,
    step_traffic,
)

BF16 = Precision.BF16


# Bytes a parameter: held whole, and divided by the ranks.
@pytest.mark.parametrize(
    ("zero", "precision", "whole", "divided"),
    [
        (0, Precision.FP32, 16, 0),
        (1, Precision.FP32, 8, 8),
        (2, Precision.FP32, 4, 12),
        (3, Precision.FP32, 0, 16),
        (0, BF16, 16, 0),
        (1, BF16, 4, 12),
        (2, BF16, 2, 14),
        (3, BF16, 0, 16),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 64])
def test_model_states_are_zeros(
    zero: int, precision: Precision, whole: int, divided: int, num_ranks: int
) -> None:
    states = Sharding(num_ranks, zero, precision).model_states(64_000)
    assert states.total_bytes == whole * 64_000 + divided * 64_000 // num_ranks
    for optimizer, less in ((OptimizerName.SGD_MOMENTUM, 4), (OptimizerName.SGD, 8)):
        other = Sharding(num_ranks, zero, precision, optimizer).model_states(64_000)
        share = 64_000 // (num_ranks if zero else 1)
        assert states.total_bytes - other.total_bytes == less * share


EQUAL = [512] * 6
UNEVEN = [512, 2048, 512, 512, 1024]


# In units of 4 bytes a parameter, by FSDPMemTracker of torch 2.13 with AdamW over
# blocks of two Linear(256, width) each: all categories but activations.
@pytest.mark.parametrize(
    ("num_ranks", "zero", "precision", "widths", "measured"),
    [
        (2, 3, Precision.FP32, EQUAL, 2.500),
        (2, 2, Precision.FP32, EQUAL, 2.833),
        (4, 3, Precision.FP32, UNEVEN, 1.972),
        (4, 2, Precision.FP32, UNEVEN, 2.083),
        (2, 3, Precision.FP32, [512, 512, 4096], 3.200),
        (2, 2, Precision.FP32, [512, 512, 4096], 3.400),
        (4, 3, BF16, UNEVEN, 1.417),
        (4, 2, BF16, UNEVEN, 1.417),
        (2, 2, BF16, EQUAL, 2.167),
    ],
)
def test_peaks_are_those_that_torch_measures(
    num_ranks: int, zero: int, precision: Precision, widths: list[int], measured: float
) -> None:
    units = [2 * 256 * width for width in widths]
    peak = Sharding(num_ranks, zero, precision).peak(units)
    assert round(peak.total_bytes / (4 * sum(units)), 3) == measured


def test_the_terms_of_a_peak_have_torchs_names() -> None:
    peak = Sharding(2, zero=3).peak([6] * 6)
    shares = {term.name: round(term.size_bytes / (4 * 36), 3) for term in peak.terms}
    assert shares == {
        "weights": 0.5,
        "Adam": 1.0,
        "gradients": 0.333,
        "gathered weights": 0.167,
        "all_gather": 0.167,
        "unit's gradients": 0.167,
        "reduce_scatter": 0.167,
    }


def test_ddp_has_buckets_beside_its_gradients() -> None:
    assert Sharding(4, zero=0).peak([10, 20]).total_bytes == (16 + 4) * 30
    assert Sharding(4, zero=1).peak([8, 24]).total_bytes == 8 * 32 + 8 * 8


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([2, 3]),
)
def test_a_peak_is_never_below_what_a_step_needs(
    units: list[int], num_ranks: int, zero: int
) -> None:
    peak = Sharding(num_ranks, zero).peak(units).total_bytes
    assert peak >= 12 * sum(units) / num_ranks + 8 * max(units)


def test_a_shortage_names_the_largest_terms() -> None:
    memory = Sharding(8, zero=1).peak([1 << 30] * 8)
    assert memory.shortage(memory.total_bytes) == ""
    assert memory.shortage(40 << 30) == (
        "a rank has 40GiB of memory, but needs 72GiB. The largest parts are "
        "weights 32GiB, gradients 32GiB, Adam 8GiB."
    )
    assert str(memory).splitlines() == [
        "weights        32GiB",
        "gradients      32GiB",
        "Adam            8GiB",
        "total          72GiB",
    ]
    assert RankMemory(()).total_bytes == 0


@pytest.mark.parametrize(
    ("num_ranks", "zero", "message"),
    [(0, 3, "num_ranks must be at least 1"), (1, 4, "zero must be 0, 1, 2 or 3")],
)
def test_numbers_out_of_range_are_refused(
    num_ranks: int, zero: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Sharding(num_ranks, zero)


def test_units_without_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="units must be a non-empty list"):
        Sharding(2, zero=3).peak([])


def test_bytes_of_a_step() -> None:
    sizes = StepSizes(weights_bytes=1200, activations_bytes=10, num_layers=3)
    layout = Layout(pp=3, dp_replicate=2, dp_shard=4, tp=2)
    assert step_traffic(layout, sizes, zero=3) == {
        "pp": 2 * 10,
        "dp_replicate": 2 * 300 / 2,
        "dp_shard": 3 * 1200 * 3 / 4,
        "tp": 4 * 3 * 2 * 10 / 2,
    }
    assert step_traffic(Layout(pp=2, dp_shard=4), sizes, zero=2) == {
        "pp": 10,
        "dp_replicate": 0,
        "dp_shard": 2 * 1200 * 3 / 4,
        "tp": 0,
    }
