"""Layouts: their sizes, their groups and their text."""

import math

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.parallel import AXES, Layout

SIZES = st.tuples(*[st.integers(1, 4)] * len(AXES))


@given(SIZES, st.sampled_from(AXES))
def test_groups_divide_all_ranks_and_differ_along_their_axis(
    sizes: tuple[int, ...], axis: str
) -> None:
    layout = Layout(*sizes)
    groups = layout.groups(axis)
    assert sorted(sum(groups, ())) == list(range(math.prod(sizes)))
    assert list(groups) == sorted(groups)
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        assert [place[axis] for place in places] == list(range(layout.sizes[axis]))
        others = [{**place, axis: 0} for place in places]
        assert others == others[:1] * len(others)


def test_tp_is_innermost_and_pp_outermost() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=4)
    assert layout.groups("tp")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups("dp_shard")[:2] == ((0, 4), (1, 5))
    assert layout.groups("pp")[-1] == (7, 15)
    assert layout.groups("cp")[3] == (3,)
    assert layout.coordinates(13) == {
        "pp": 1,
        "dp_replicate": 0,
        "dp_shard": 1,
        "cp": 0,
        "tp": 1,
    }
    with pytest.raises(UsageError, match=r"rank must be in 0\.\.15, got 16"):
        layout.coordinates(16)


@given(SIZES, st.sampled_from(AXES))
def test_what_is_left_is_found(sizes: tuple[int, ...], axis: str) -> None:
    layout = Layout(*sizes)
    assert layout.resolve(layout.num_ranks) == layout
    opened = Layout(**{**layout.sizes, axis: -1})
    assert opened.resolve(layout.num_ranks) == layout
    assert Layout.parse(str(opened)) == opened
    assert Layout.parse(str(layout)) == layout


def test_the_text_has_what_is_not_1() -> None:
    assert str(Layout(pp=2, dp_shard=-1, tp=8)) == "pp=2,dp_shard=-1,tp=8"
    assert str(Layout()) == "dp_shard=1"
    assert Layout.parse(" tp=8, pp=02") == Layout(pp=2, tp=8)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "message"),
    [
        (
            Layout(pp=2, dp_shard=3, tp=2),
            16,
            (
                "pp*dp_replicate*dp_shard*cp*tp must be the number of ranks, 16, "
                "got 2*1*3*1*2 = 12. dp_shard=4 fits."
            ),
        ),
        (
            Layout(dp_replicate=3, tp=2),
            16,
            (
                "pp*dp_replicate*dp_shard*cp*tp must be the number of ranks, 16, "
                "got 1*3*1*1*2 = 6. Use 6 ranks, or other sizes."
            ),
        ),
        (
            Layout(pp=3, dp_shard=-1, tp=2),
            16,
            (
                "pp*dp_replicate*cp*tp must divide the number of ranks, as dp_shard is "
                "-1: 3*1*1*2 = 6, got 16 ranks. Use a multiple of 6 ranks, "
                "or other sizes."
            ),
        ),
    ],
)
def test_what_does_not_fit_is_an_equation(
    layout: Layout, num_ranks: int, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        layout.resolve(num_ranks)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "axis must be pp, dp_replicate, dp_shard, cp or tp, got ''. Write it as"),
        ("dp=2", "axis must be pp, dp_replicate, dp_shard, cp or tp, got 'dp'."),
        ("tp=2,pp=2,tp=4", "tp is given twice."),
        ("tp", "tp must be a whole number of at least 1, or -1, got ''."),
        ("tp=0", "tp must be a whole number of at least 1, or -1, got '0'."),
        ("tp=2=2", "tp must be a whole number of at least 1, or -1, got '2=2'."),
        ("tp=1234567890", "tp must be a whole number of at least 1, or -1,"),
        ("pp=-1,tp=-1", "only one axis may be -1, got pp and tp."),
    ],
)
def test_words_that_are_no_layout_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Layout.parse(text)
    assert str(refused.value).startswith(message)


def test_a_size_below_1_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^cp must be at least 1, or -1, got 0"):
        Layout(cp=0)


def test_groups_need_all_sizes() -> None:
    with pytest.raises(
        UsageError, match=r"^layout must not contain -1, got dp_shard=-1"
    ):
        Layout(dp_shard=-1).groups("tp")
