import signal

import pytest

from ronde.launch.tail import Tail
from ronde.launch.verdict import RankEnd, judge
from ronde.render.summary import summarize

RESET = ("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3",)


def end(rank, status, at_s=1.0, *, was_stopped=False, tail=()):
    return RankEnd(rank, "h", 100 + rank, status, at_s, was_stopped, tail)


def test_all_well():
    verdict = judge([end(0, 0), end(1, 0)])
    assert (verdict.exit_code, verdict.cause) == (0, None)
    assert summarize(verdict) == ""


@pytest.mark.parametrize(
    ("status", "code"), [(3, 3), (-11, 139), (-9, 137), (255, 255)]
)
def test_the_first_to_fail_gives_the_code(status, code):
    verdict = judge([end(0, 1, 2.0), end(1, status, 1.0), end(2, 0, 0.5)])
    assert verdict.exit_code == code
    assert verdict.cause is not None
    assert verdict.cause.rank == 1
    assert [e.rank for e in verdict.also_failed] == [0]


def test_what_ended_after_the_stop_order_is_a_consequence():
    verdict = judge([end(0, -15, 0.5, was_stopped=True), end(1, 7, 1.0)])
    assert verdict.exit_code == 7
    assert [e.rank for e in verdict.ended] == [0]


def test_who_lost_its_peer_is_a_consequence_even_when_earlier():
    verdict = judge([end(0, 1, 0.5, tail=RESET), end(1, -11, 1.0)])
    assert verdict.exit_code == 139


def test_who_lost_its_peer_is_the_cause_when_nobody_else_failed():
    assert judge([end(0, 1, 0.5, tail=RESET), end(1, 0)]).exit_code == 1


def test_a_crash_whose_core_dump_took_long_is_the_cause():
    verdict = judge(
        [
            end(0, 1, 0.5, tail=RESET),
            end(1, -11, 2.0, was_stopped=True),
            end(2, -15, 0.6, was_stopped=True),
        ]
    )
    assert verdict.exit_code == 139
    assert [e.rank for e in verdict.also_failed] == [0]
    assert [e.rank for e in verdict.ended] == [2]


def test_a_crash_after_the_stop_order_does_not_hide_who_failed_by_itself():
    ends = [end(0, 3, 0.5), end(1, -11, 2.0, was_stopped=True)]
    assert judge(ends).exit_code == 3


def test_a_signal_comes_before_a_code_of_the_same_moment():
    assert judge([end(0, 1), end(1, -11)]).exit_code == 139


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143), (13, 141)])
def test_interrupted_is_the_signal_even_when_all_ranks_end_well(number, code):
    verdict = judge([end(0, 0, was_stopped=True)], interrupted_by=number)
    assert verdict.exit_code == code


def test_the_summary_says_who_why_and_where():
    verdict = judge(
        [
            end(0, -signal.SIGTERM, 2.0, was_stopped=True),
            end(1, 3, 1.25, tail=("Traceback", "ValueError: no")),
            end(2, -signal.SIGTERM, 2.0, was_stopped=True),
            end(3, -signal.SIGTERM, 2.0, was_stopped=True),
            end(4, -signal.SIGKILL, 2.0, was_stopped=True),
        ]
    )
    fates = "rank 0 (killed by SIGTERM), ranks 2-3 (killed by SIGTERM)"
    assert summarize(verdict, "/logs/job").splitlines() == [
        "ronde: rank 1 failed first, after 1.2 s: exit code 3 (pid 101 on h)",
        "ronde: the last it wrote to stderr:",
        "ronde: | Traceback",
        "ronde: | ValueError: no",
        f"ronde: ended because of that: {fates}, rank 4 (killed by SIGKILL)",
        "ronde: the output of every rank is in /logs/job",
    ]


def test_the_tail_is_the_last_lines():
    tail = Tail(num_lines=3)
    for i in range(100_000):
        tail.add(b"line %d\n" % i)
    tail.add(b"10%\r20%\r\nlast")
    assert tail.lines() == ("line 99999", "20%", "last")
