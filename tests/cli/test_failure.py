import signal
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from ronde.launch import Attempt, LostHost, RankEnd, Tail, find_awaited, judge
from ronde.render import format_ranks, parse_ranks, summarize

RESET = ("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3",)


def end(rank, status, at_s=1.0, *, was_stopped=False, tail=()):
    return RankEnd(rank, "h", 100 + rank, status, at_s, was_stopped, tail)


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143), (13, 141)])
def test_interrupted_is_the_signal_even_when_all_ranks_end_well(number, code):
    result = judge([end(0, 0, was_stopped=True)], interrupted_by=number)
    assert result.exit_code == code


def lost(host, at_s=1.0, ranks=(4, 5)):
    return LostHost(host, ranks, "no message from it for 8 s", 69, at_s)


STOPPED_BY_WATCHDOG = ("terminate: Watchdog caught collective operation timeout",)
LATE_CRASH = end(1, -11, 2.0, was_stopped=True)


@pytest.mark.parametrize(
    ("ends", "hosts", "code", "cause"),
    [
        ([end(0, 1, 2.0), end(1, -9, 1.0), end(2, 0, 0.5)], "", 137, 1),
        ([end(0, -15, 0.5, was_stopped=True), end(1, 7)], "", 7, 1),
        ([end(0, 1, 0.5, tail=RESET), end(1, -11)], "", 139, 1),
        ([end(0, 1, 0.5, tail=RESET), end(1, 0)], "", 1, 0),
        ([end(0, -6, 0.5, tail=STOPPED_BY_WATCHDOG), end(1, 7)], "", 7, 1),
        # A core dump takes long.
        ([end(0, 1, 0.5, tail=RESET), LATE_CRASH], "", 139, 1),
        ([end(0, 3, 0.5), LATE_CRASH], "", 3, 0),
        # At equal times a signal comes first.
        ([end(0, 1), end(1, -11)], "", 139, 1),
        ([end(0, 1, 0.5, tail=RESET)], "b", 69, "b"),
        ([end(0, 3, 0.5)], "ba", 3, 0),
        ([end(0, 3, 1.5)], "b", 69, "b"),
    ],
)
def test_the_first_failure_that_is_no_consequence_is_the_cause(
    ends, hosts, code, cause
):
    result = judge(ends, lost=[lost(host) for host in hosts])
    assert result.exit_code == code
    found = result.cause
    assert cause == (found.rank if isinstance(found, RankEnd) else found.host)
    others = [*result.also_failed, *result.ended, *result.also_lost]
    expected = [e for e in ends if e.status or e.was_stopped]
    assert len(others) == len(expected) + len(hosts) - 1


def test_output_before_an_exception_does_not_make_it_secondary():
    said = ("Connection closed by peer, trying again", "ValueError: no")
    by_itself = end(0, 1, tail=said)._replace(traceback="Traceback\nValueError: no")
    assert not by_itself.is_secondary
    assert end(0, 1, tail=said).is_secondary
    assert by_itself._replace(status=3).is_secondary


def named(rank):
    return (f"ronde.errors.PeerLostError: Rank {rank} is gone: it ended.",)


def test_a_rank_began_to_end_before_those_that_name_it():
    ends = [end(0, 7, 1.0), end(1, 93, 3.0), end(2, 1, 0.9, tail=named(1))]
    result = judge(ends)
    assert (result.exit_code, result.cause.rank) == (93, 1)
    assert result.cause.at_s == 0.9


@pytest.mark.parametrize(
    ("status", "is_leaving", "tail", "cause"),
    [
        (-15, False, RESET, 0),
        (-15, True, RESET, 1),
        (-9, False, named(1), 1),
        (-9, False, named(2), 0),
        (0, False, named(1), 0),
    ],
)
def test_a_stopped_rank_may_be_the_cause_of_lost_peers(status, is_leaving, tail, cause):
    late = end(1, status, 3.0, was_stopped=True)._replace(was_leaving=is_leaving)
    result = judge([end(0, 1, 1.0, tail=tail), late])
    assert (result.exit_code, result.cause.rank) == (1, cause)


def test_a_rank_that_exited_with_0_may_be_the_cause():
    result = judge([end(0, 1, 1.1, tail=named(1)), end(1, 0, 1.0), end(2, 0, 0.9)])
    assert (result.exit_code, result.cause.rank) == (1, 1)
    assert "rank 1 left first, after 1.0 s: exit code 0" in summarize(result)
    assert judge([end(0, 3, 1.1), end(1, 0, 1.0)]).cause.rank == 0


def test_the_cause_is_awaited_among_those_that_may_be_it():
    assert find_awaited(end(0, 1, tail=named(1)), {1, 2}) == {1}
    assert find_awaited(end(0, 1, tail=named(1)), {2}) == set()
    assert find_awaited(end(0, 1, tail=RESET), {1, 2}) == {1, 2}
    assert find_awaited(end(0, 1, tail=("KeyError: 1",)), {1, 2}) == set()


@given(
    st.lists(
        st.builds(
            RankEnd,
            rank=st.integers(0, 9),
            host=st.just("h"),
            pid=st.just(1),
            status=st.sampled_from([0, 1, 3, -6, -9, -11, -15]),
            at_s=st.sampled_from([0.0, 1.0, 2.0]),
            was_stopped=st.booleans(),
            stderr_tail=st.sampled_from([(), RESET]),
        ),
        unique_by=lambda each: each.rank,
    ),
    st.lists(
        st.builds(
            lost,
            st.just("b"),
            st.sampled_from([0.0, 1.5]),
            st.integers(10, 13).map(lambda rank: (rank,)),
        ),
        unique_by=lambda each: each.ranks,
    ),
    st.randoms(),
)
def test_each_failure_is_reported_once_in_any_order_of_events(ends, hosts, random):
    result = judge(ends, lost=hosts)
    again = judge(random.sample(ends, len(ends)), lost=hosts[::-1])
    assert result == again
    told = [*result.also_failed, *result.also_lost, *result.ended]
    told += [result.cause] if result.cause is not None else []
    silent = [e for e in ends if e.status == 0 and not e.was_stopped]
    assert len(told) == len(ends) - len(silent) + len(hosts)
    is_bad = bool(hosts) or any(e.status != 0 for e in ends)
    assert (result.exit_code != 0) is is_bad


def test_a_restart_is_worth_trying_unless_a_rank_says_no_or_the_user_ended_it():
    failed = judge([end(0, 1), end(1, 93, 2.0)])
    assert failed.is_worth_restart({94})
    assert not failed.is_worth_restart({93})
    assert not judge([end(0, 0)]).is_worth_restart(())
    assert not judge([end(0, 1)], interrupted_by=2).is_worth_restart(())
    assert judge([], lost=[lost("b")]).is_worth_restart({93})


def test_the_summary_has_all_ranks_and_reasons():
    traceback = "Traceback (most recent call last):\n  File x\nValueError: no"
    cause = end(1, 1, 1.25, tail=("ValueError: no", "more noise"))
    result = judge(
        [
            end(0, -signal.SIGTERM, 2.0, was_stopped=True),
            cause._replace(traceback=traceback, evidence="core dumped to /c"),
            end(2, -signal.SIGTERM, 2.0, was_stopped=True),
            end(3, -signal.SIGTERM, 2.0, was_stopped=True)._replace(host="i"),
            end(4, -signal.SIGKILL, 2.0, was_stopped=True),
            end(5, 1, 1.3, tail=RESET),
            end(6, 3, 1.3, tail=("other",)),
            end(7, 1, 1.3, tail=("ValueError: no",)),
        ]
    )
    said = summarize(result, Attempt("job", 1, ("h",) * 8), "/logs").splitlines()
    assert said[0].startswith("+-- ronde: the job failed at start 2, exit code 1 -----")
    assert said[-1] == "+" + "-" * 77
    assert said[1:-1] == [
        "| rank 1 failed first, after 1.2 s: exit code 1 (pid 101 on h)",
        "| core dumped to /c",
        "|",
        "|     Traceback (most recent call last):",
        "|       File x",
        "|     ValueError: no",
        "|",
        "| failed alike:    rank 7 on h",
        "| failed too:      rank 6 on h, exit code 3: other",
        "| lost their peer: rank 5 on h",
        "| ended then:      ranks 0, 2-3 on h, i, killed by SIGTERM",
        "| ended then:      rank 4 on h, killed by SIGKILL",
        "| logs:            /logs/job/attempt_1",
    ]


def test_a_lost_host_is_named_with_its_ranks():
    result = judge([], lost=[lost("b", 2.5), lost("c", 3.0, (6,))])
    assert summarize(result).splitlines()[1:-1] == [
        "| b was lost first, after 2.5 s: no message from it for 8 s",
        "| it had ranks 4-5",
        "|",
        "| lost too:        c (rank 6): no message from it for 8 s",
    ]


def test_256_ranks_of_8_hosts_fit_one_screen():
    long = ["Traceback (most recent call last):", *map(str, range(500)), "x" * 5000]
    ends = [
        end(r, 1 + r % 50, r / 1000, was_stopped=r % 3 == 0)._replace(
            host=f"node{r % 8}", traceback="\n".join([*long, f"E: {r}"])
        )
        for r in range(256)
    ]
    said = summarize(judge(ends), Attempt("j", 0, ()), "/logs").splitlines()
    assert len(said) <= 50
    assert max(map(len, said)) < 500
    assert "|     [473 lines]" in said


@given(st.sets(st.integers(0, 300)))
def test_ranks_in_words_are_read_back(ranks):
    words = format_ranks(ranks)
    if ranks and "more" not in words:
        chosen = parse_ranks(words, "--only").among(["h"] * 301)
        assert chosen == ranks


def test_the_tail_is_the_last_lines():
    tail = Tail(num_lines=3)
    for i in range(100_000):
        tail.add(b"line %d\n" % i)
    tail.add(b"10%\r20%\r\nlast")
    assert tail.lines() == ("line 99999", "20%", "last")


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
@pytest.mark.parametrize(
    "program",
    [
        "1 / 0",
        "def f(): f()\nf()",
        "raise ValueError('two\\nlines')",
        "try:\n  1 / 0\nexcept Exception as e:\n  raise KeyError from e",
        "try:\n  1 / 0\nexcept Exception:\n  {}[1]",
        "try:\n  int('x')\nexcept Exception as e:\n  raise ExceptionGroup('g', [e])",
    ],
)
def test_a_traceback_is_found_whole_between_other_lines(program, prefix):
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], stderr=subprocess.PIPE, check=False
    )
    written = done.stderr.decode().rstrip("\n")
    tail = Tail()
    tail.add(b"Traceback (most recent call last):\n  an older one\nE\n\nbefore\n")
    for line in written.split("\n"):
        tail.add(b"\x1b[31m" + (prefix + line).encode() + b"\x1b[0m\n")
    tail.add(b"\n" + b"wandb: Find logs at: x\n" * 30)
    assert tail.traceback() == written
    assert tail.lines() == ("wandb: Find logs at: x",) * 20
    tail.add(b"epoch 2\n")
    assert tail.traceback() == ""


@pytest.mark.parametrize(
    ("ending", "last"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("atexit.register(print, file=3)\nraise ValueError('no')", "ValueError: no"),
        ("a = Bad()\nraise ValueError('no')", "ValueError: no"),
        ("sys.stderr.write('[W1123 a.cpp:1] hm\\n')", "KeyError: 'old'"),
        # A message may have several lines.
        ("sys.exit('no data')", "no data"),
        ("sys.exit('\\nno data')", ""),
        ("t = threading.Thread(target=fail)\nt.start()\nt.join()\nsys.exit('no')", ""),
    ],
)
def test_only_a_traceback_that_is_the_last_word_counts(ending, last):
    program = (
        "import atexit, sys, threading, traceback\n"
        "class Bad:\n  def __del__(self): fail()\n"
        "def fail(): raise OSError('ignored')\n"
        f"try:\n  {{}}['old']\nexcept KeyError: traceback.print_exc()\n{ending}"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], stderr=subprocess.PIPE, check=False
    )
    tail = Tail()
    tail.add(done.stderr)
    assert tail.traceback().rpartition("\n")[2] == last, done.stderr.decode()
