"""What a table's own figures tell of its test and its ranks."""

import pytest
from hypothesis import given, strategies as st
from tests.bench.log_writing import side

from ronde.bench import (
    COLLECTIVES,
    RankCount,
    RankSource,
    Row,
    agrees,
    infer_ranks,
    infer_tests,
)


def rows_of(test: str, num_ranks: int, algbw: float) -> list[Row]:
    """Return a row as nccl-tests prints it."""
    known = COLLECTIVES[test]
    figures = side(100, algbw, algbw * known.factor.value_for(num_ranks))
    redop = "sum" if known.has_op or test == "sendrecv" else known.redop
    root = 0 if known.has_root else -1
    return [Row(1 << 30, 1 << 28, "float", redop, root, figures, figures)]


SENSITIVE = [name for name, test in COLLECTIVES.items() if "n" in test.factor]


@given(st.sampled_from(SENSITIVE), st.integers(2, 4000), st.floats(1, 900))
def test_the_true_number_is_never_ruled_out(test: str, n: int, algbw: float) -> None:
    rows = rows_of(test, n, algbw)
    assert agrees(test, n, rows)
    ranks = infer_ranks(test, rows)
    assert (ranks.low or 0) <= n <= (ranks.high or n)
    if ranks.value is not None:
        assert ranks.source is RankSource.RATIO
        assert (ranks.low or 0) <= ranks.value <= (ranks.high or 0)


@given(st.sampled_from(list(COLLECTIVES)), st.integers(3, 4000), st.floats(1, 900))
def test_the_true_test_is_always_among_the_candidates(
    test: str, n: int, algbw: float
) -> None:
    rows = rows_of(test, n, algbw)
    assert test in infer_tests(rows, None)
    assert test in infer_tests(rows, n)


@pytest.mark.parametrize(
    ("test", "candidates"),
    [
        ("all_reduce", {"all_reduce"}),
        ("reduce", {"reduce"}),
        ("broadcast", {"broadcast"}),
        ("reduce_scatter", {"reduce_scatter"}),
        ("sendrecv", {"sendrecv"}),
        ("hypercube", {"hypercube"}),
        ("all_gather", {"all_gather", "alltoall", "alltoallv"}),
        ("gather", {"gather", "scatter"}),
    ],
)
def test_eight_ranks_distinguish_most_tests(test: str, candidates: set[str]) -> None:
    assert set(infer_tests(rows_of(test, 8, 200.0), 8)) == candidates


def test_nothing_is_known_of_nothing() -> None:
    empty = [Row(8, 2, "float", "sum", -1, side(10, 0, 0), None)]
    for rows in ([], empty):
        assert infer_ranks("all_reduce", rows) == RankCount()
        assert infer_tests(rows, None) == []
        assert agrees("all_reduce", 5, rows)
    assert infer_ranks("broadcast", rows_of("broadcast", 8, 200.0)) == RankCount()
