"""Views: texts, the order of ranks, and a view from the one before it."""

import pytest
from hypothesis import given, strategies as st

from ronde.errors import LaunchError
from ronde.membership import (
    FROM_RANK,
    NEW,
    NO_VIEW,
    TO_RANK,
    AskStep,
    AtStep,
    Done,
    Entered,
    Failed,
    Finish,
    Leave,
    Save,
    Settled,
    StopAfter,
    View,
    ViewBegins,
    ViewEnded,
    Worker,
    decode_text,
    encode_text,
    order_ranks,
)

BEGINS = ViewBegins(3, "key", 2, (4,), (Worker(9, "b", 1),), 1, 7, False, "why")
A, B = "a", "b"


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        (Settled(NO_VIEW, NEW, NEW, ""), FROM_RANK),
        (AtStep(3, 12), FROM_RANK),
        (Entered(3, 7), FROM_RANK),
        (Done(3, 99), FROM_RANK),
        (Failed(3, 7, "ValueError: wrong"), FROM_RANK),
        (ViewEnded(3, 'rank 2 on "ä" was\nkilled'), TO_RANK),
        (AskStep(3), TO_RANK),
        (StopAfter(3, 14, "node2 is to be left"), TO_RANK),
        (Save(3), TO_RANK),
        (BEGINS, TO_RANK),
        (Leave("node2 is to be left"), TO_RANK),
        (Finish(), TO_RANK),
    ],
)
def test_a_message_is_one_line_and_comes_back(message, kinds):
    text = encode_text(message)
    assert "\n" not in text
    assert decode_text(text, kinds) == message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "[]",
        "{}",
        '{"is": "Settled"}',
        '{"is": "Settled", "view": "0", "step": 1, "reason": ""}',
        '{"is": "Settled", "view": 0, "step": true, "reason": ""}',
        '{"is": "Entered", "view": 0, "more": 1}',
        encode_text(Finish()),
        encode_text(BEGINS),
    ],
)
def test_malformed_messages_are_refused(text):
    with pytest.raises(LaunchError, match="malformed membership message: "):
        decode_text(text, FROM_RANK)


@pytest.mark.parametrize(
    ("survivors", "newcomers", "order"),
    [
        ([], [7, 8], [7, 8]),
        ([(0, 0), (1, 1), (3, 3)], [9], [0, 1, 9, 3]),
        ([(1, 1), (2, 2), (3, 3)], [9], [1, 9, 2, 3]),
        ([(0, 0), (3, 3)], [], [0, 3]),
        ([(3, 3)], [8, 9], [3, 8, 9]),
        ([(0, 0), (1, 1)], [8, 9], [0, 1, 8, 9]),
        ([(0, 0), (5, 5)], [9], [0, 9, 5]),
    ],
)
def test_newcomers_take_lost_ranks_but_never_rank_0(survivors, newcomers, order):
    assert order_ranks(survivors, newcomers) == order


def test_local_ranks_go_by_slot_and_cross_ranks_by_host():
    members = (Worker(5, A, 3), Worker(1, B, 0), Worker(2, A, 0), Worker(7, A, 1))
    view = View(0, members)
    assert [view.world_of(n).local_rank for n in (5, 1, 2, 7)] == [2, 0, 0, 1]
    own = view.world_of(2)
    assert (own.rank, own.size, own.local_size) == (2, 4, 3)
    assert (own.cross_rank, own.cross_size) == (0, 2)
    alone = view.world_of(5)
    assert (alone.cross_rank, alone.cross_size) == (0, 1)


@st.composite
def changes(draw: st.DrawFn) -> tuple[View, list[int], list[Worker]]:
    """Return a view, who of it is gone, and who is new."""
    numbers = draw(st.permutations(range(draw(st.integers(1, 12)))))
    workers = tuple(Worker(n, f"h{n % 3}", n // 3) for n in numbers)
    gone = draw(st.lists(st.sampled_from(numbers), unique=True, max_size=len(numbers)))
    new = range(len(numbers), len(numbers) + draw(st.integers(0, 4)))
    return View(4, workers), gone, [Worker(n, "new", n) for n in new]


@given(changes())
def test_survivors_keep_their_order_and_rank_0_is_one(change):
    view, gone, new = change
    after = view.next(ViewBegins(5, "k", 4, tuple(gone), tuple(new), 0, 0, True, ""))
    kept = [worker for worker in view.members if worker.id not in gone]
    assert [worker for worker in after.members if worker not in new] == kept
    assert [worker for worker in after.members if worker in new] == new
    assert len(set(after.members)) == len(after.members) == len(kept) + len(new)
    if kept:
        assert after.members[0] == kept[0]
    if len(gone) == len(new) and kept:
        same = [p for r, p in enumerate(view.members) if r and p.id not in gone]
        stay = [p for p in same if p != after.members[0]]
        assert all(after.members[view.members.index(p)] == p for p in stay)


@given(changes())
def test_a_whole_view_needs_no_view_before(change):
    view, _, new = change
    whole = ViewBegins(5, "k", NO_VIEW, (), view.members, 0, 0, True, "")
    assert View(NO_VIEW, ()).next(whole).members == view.members
    assert View(3, tuple(new)).next(whole).members == view.members
