"""The policy against hosts and workers that obey it."""

from math import inf

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.unit.membership_environment import IN_VIEW, LAST_STEP, Doing, Environment

from ronde.membership import (
    NEW,
    RESET_LIMIT_EXCEEDED_MESSAGE,
    AskStep,
    AtStep,
    Blacklisted,
    Connect,
    Finish,
    Kill,
    Leave,
    Release,
    Rules,
    Send,
    StartWorker,
    Stop,
    StopAfter,
    ViewBegins,
    ViewEnded,
    ViewPhase,
    Worker,
)

NAMES = ["a", "b", "c"]
PICKS = st.integers(0, 999)


class Faults(RuleBasedStateMachine):
    """Anything may happen at any time; afterwards the job comes to its end."""

    env: Environment

    @initialize(
        least=st.sampled_from([0, 1, 1, 2, 2, 3, 4]),
        more=st.integers(0, 3),
        spares=st.integers(0, 2),
        is_host_domain=st.booleans(),
        awaits_joining=st.booleans(),
        formation_s=st.sampled_from([10.0, 600.0, 600.0]),
        reset_limit=st.sampled_from([None, None, 5]),
        cooldown_s=st.sampled_from([(0.0, 0.0), (1.0, 3.0), (30.0, 3600.0)]),
        is_begun=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        least: int,
        more: int,
        spares: int,
        is_begun: bool,  # noqa: FBT001 - Hypothesis passes it by name
        **others: object,
    ) -> None:
        rules = Rules(least, max(1, least + more), spares, **others)  # type: ignore[arg-type]
        self.env = Environment.of(rules, a=2, b=2)
        if is_begun:
            self.env.begin()

    @rule(pick=PICKS, count=st.integers(1, 40))
    def answer(self, pick: int, count: int) -> None:
        for _ in range(count):
            if (can := self.env.answers()) and not self.env.is_over:
                can[pick % len(can)]()

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 31.0, 700.0]) | st.none())
    def wait(self, seconds: float | None) -> None:
        until_due_s = max(0.0, self.env.membership.due_s - self.env.now_s)
        if seconds is not None or until_due_s < inf:
            self.env.wait(until_due_s if seconds is None else seconds)

    @rule(pick=PICKS, code=st.sampled_from([-9, -9, 1, 1, 0]))
    def end_process(self, pick: int, code: int) -> None:
        if numbers := list(self.env.processes):
            self.env.end(numbers[pick % len(numbers)], code)

    @rule(pick=PICKS)
    def fail(self, pick: int) -> None:
        members = self.env.view.members
        if able := [w.id for w in members if w.id in self.env.processes]:
            self.env.fail(able[pick % len(able)])

    @rule(pick=PICKS)
    def stall(self, pick: int) -> None:
        if processes := list(self.env.processes.values()):
            processes[pick % len(processes)].is_stalled = True

    @rule(pick=PICKS)
    def lose_peer(self, pick: int) -> None:
        able = [p for p in self.env.members if p.doing in IN_VIEW and not p.is_stalled]
        if able:
            self.env.settle(able[pick % len(able)].worker.id, "lost a peer")

    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        """Say the last step is done while the view ends: the two cross."""
        able = [p for p in self.env.members if p.doing is Doing.ASKED]
        at_last = [p for p in able if p.step == LAST_STEP]
        if at_last:
            self.env.finish(at_last[pick % len(at_last)].worker.id)

    @rule(name=st.sampled_from(NAMES), joins_itself=st.booleans())
    def fail_host(self, name: str, joins_itself: bool) -> None:  # noqa: FBT001
        host = self.env.hosts.get(name)
        if host and (host.is_ready or host.is_connecting):
            self.env.fail_host(name, joins_itself=joins_itself)

    @rule(name=st.sampled_from(NAMES), joins_itself=st.booleans())
    def leave_host(self, name: str, joins_itself: bool) -> None:  # noqa: FBT001
        if name in self.env.hosts and self.env.hosts[name].is_ready:
            self.env.leave_host(name, joins_itself=joins_itself)

    @rule(slots=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)))
    def find_hosts(self, slots: dict[str, int]) -> None:
        self.env.find(slots)

    def teardown(self) -> None:
        if hasattr(self, "env") and not self.env.is_over:
            self.env.find({"a": 2, "b": 2, "c": 2})
            self.env.run()


TestFaults = Faults.TestCase
TestFaults.settings = settings(stateful_step_count=40, report_multiple_bugs=False)


def running(rules: Rules, **slots: int) -> Environment:
    """Return a job in its first view."""
    env = Environment.of(rules, **slots)
    env.begin()
    return env


def ordered(env, *kinds):
    """Return the orders of some kinds since the last call."""
    found = [order for order in env.orders if isinstance(order, kinds)]
    env.orders.clear()
    return found


def sent(env, *kinds):
    """Return the messages of some kinds since the last call."""
    return [t.message for t in ordered(env, Send) if isinstance(t.message, kinds)]


def ranks(env):
    return [worker.id for worker in env.view.members]


def train(env, step):
    """Train until all have applied so many steps."""
    env.run(lambda: all(process.step == step for process in env.members))


def test_the_first_view_waits_for_all_hosts_and_processes():
    env = Environment.of(Rules(1, 4), a=2, b=2)
    assert ordered(env, Connect) == [Connect("a"), Connect("b")]
    env.answers()[0]()
    env.settle(0)
    env.settle(1)
    assert ranks(env) == []
    env.begin()
    (view,) = sent(env, ViewBegins)
    assert [worker[1:] for worker in view.new] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert (view.view, view.source, view.step, view.is_equal) == (0, 0, NEW, False)


def test_a_host_that_does_not_get_ready_is_not_waited_for():
    env = Environment.of(Rules(2, 4), a=2, b=2)
    env.fail_host("b")
    env.begin()
    assert ranks(env) == [0, 1]
    env.wait(30.0)
    assert ordered(env, Connect)[-1] == Connect("b")
    env.run(lambda: len(ranks(env)) == 4)


def test_a_host_that_joins_by_itself_is_used_as_soon_as_it_is_there_again():
    env = running(Rules(1, 4), a=2, b=2)
    env.orders.clear()
    env.fail_host("b", joins_itself=True)
    env.settle(0)
    env.settle(1)
    env.wait(1000.0)
    assert ordered(env, Connect) == []
    env.find({"a": 2, "b": 2})
    assert ordered(env, Connect) == [Connect("b")]
    env.run(lambda: len(ranks(env)) == 4)
    env.orders.clear()
    env.leave_host("b", joins_itself=True)
    env.run(lambda: not env.hosts["b"].is_found)
    assert ordered(env, Connect, Release) == [Release("b")]
    env.find({"a": 2, "b": 2})
    assert ordered(env, Connect) == [Connect("b")]


def test_survivors_go_on_at_once_and_the_replacement_takes_the_lost_rank():
    env = running(Rules(2, 4), a=2, b=2)
    train(env, 3)
    env.orders.clear()
    env.end(1, -9)
    assert env.orders == [Send((0, 2, 3), ViewEnded(0, "rank 1 on a has ended"))]
    for number in (3, 0, 2):
        assert len(env.orders) == 1
        env.settle(number)
    _, (told, view), start = env.orders
    assert isinstance(view, ViewBegins)
    assert told == (0, 2, 3)
    assert ranks(env) == [0, 2, 3]
    assert (view.gone, view.new, view.step, view.is_equal) == ((1,), (), 3, True)
    assert view.reason == "rank 1 on a has ended"
    assert start == StartWorker(Worker(4, "a", 1))
    env.run(lambda: len(ranks(env)) == 4)
    assert ranks(env) == [0, 2, 3, 4]
    *_, pause, view, whole = sent(env, StopAfter, ViewBegins)
    assert pause.reason == view.reason == "a rank joins on a"
    assert whole.new == env.view.members


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (1, "rank 0 on a has ended"),
        (2, "rank 0 on a has ended and rank 1 on a has ended"),
        (4, "rank 0 on a has ended, and 3 more were lost"),
    ],
)
@pytest.mark.parametrize("has_settled", [False, True])
def test_the_reason_has_all_lost_workers(
    number: int, reason: str, *, has_settled: bool
):
    env = running(Rules(1, 6), a=6)
    env.end(0, -9)
    for other in range(1, number):
        if has_settled:
            env.settle(other)
        env.end(other, -9)
    env.run(lambda: env.view.view == 1)
    assert sent(env, ViewBegins)[-1].reason == reason


def test_a_failed_worker_is_not_awaited_but_keeps_its_slot():
    env = running(Rules(2, 4), a=2, b=2)
    train(env, 3)
    env.orders.clear()
    env.fail(1)
    for number in (0, 2, 3):
        env.settle(number)
    assert ranks(env) == [0, 2, 3]
    assert not ordered(env, StartWorker)
    env.end(1, 1)
    (start,) = ordered(env, StartWorker)
    assert start.worker == Worker(4, "a", 1)


def test_a_spare_takes_the_lost_rank():
    env = running(Rules(2, 3, spares=1), a=2, b=2)
    train(env, 1)
    env.end(1, -9)
    env.begin()
    assert ranks(env) == [0, 3, 2]
    change, view = sent(env, ViewBegins)[1:]
    assert change == view._replace(base=0, gone=(1,), new=(Worker(3, "b", 1),))
    assert (view.source, view.step, view.is_equal) == (0, 1, False)


def test_too_few_for_too_long_stop_with_what_was_missing():
    env = running(Rules(3, 4, formation_s=600.0), a=2, b=2)
    env.now_s = 100.0
    env.fail_host("b")
    env.find({"a": 2})
    for number in (0, 1):
        env.settle(number)
    assert env.membership.due_s == 130.0  # when b may be used again
    env.wait(599.0)
    assert env.phase is ViewPhase.FORMING
    env.wait(1.0)
    assert ordered(env, Stop) == [
        Stop(
            "2 ranks for 600 s, but --min-ranks is 3: b was lost. "
            "Hosts: a:2. Lower --min-ranks, or bring a host back.",
            is_too_few=True,
        )
    ]


def test_the_first_start_is_not_counted_as_time_with_too_few():
    env = Environment.of(Rules(2, 2, formation_s=10.0), a=2)
    env.answers()[0]()
    env.settle(0)
    env.wait(300.0)
    assert env.phase is ViewPhase.FORMING
    env.begin()
    assert ranks(env) == [0, 1]


@pytest.mark.parametrize("is_first_to_wait", [True, False])
def test_an_exit_with_0_before_the_first_view_ends_the_job(is_first_to_wait):
    env = Environment.of(Rules(1, 2), a=2)
    env.answers()[0]()
    if is_first_to_wait:
        env.settle(0)
    env.end(1, 0)
    if not is_first_to_wait:
        env.settle(0)
    assert ordered(env, Stop) == [
        Stop(
            "worker 1 on a has ended, while the others wait in hvd.init(). Call it on "
            "all ranks."
        )
    ]


def test_processes_that_fail_before_they_are_ready_end_the_job_where_no_host_is_left():
    env = Environment.of(Rules(2, 3), a=2, b=1)
    for answer in env.answers():
        answer()
    env.settle(0)
    for number in (1, 3, 4):
        env.end(number, 3)
    assert env.phase is ViewPhase.FORMING
    for number in (2, 5, 6):
        env.end(number, 3)
    (stop,) = ordered(env, Stop)
    assert stop.reason.endswith(
        "before they were ready, the last time because worker 6 on b has ended."
    )


def test_time_is_counted_anew_for_a_view_that_was_paused():
    env = running(Rules(2, 3, formation_s=60.0), a=3)
    env.now_s = 1000.0
    env.find({"a": 2})
    for number in (0, 1):
        env.settle(number)
    for number in (0, 1):
        env.end(number, -9)
    env.settle(2)
    assert env.phase is ViewPhase.FORMING
    assert env.membership.due_s == 1060.0
    env.begin()
    assert len(ranks(env)) == 2


def test_a_member_stays_while_too_few_others_remain():
    env = running(Rules(2, 3), a=2, b=2)
    env.orders.clear()
    env.leave_host("a")
    assert not sent(env, AskStep)
    env.settle(3)
    assert env.orders == [Send((0, 1, 2), AskStep(0))]
    env.settle(0)
    env.settle(1)
    env.end(3, -9)
    env.settle(2)
    assert ranks(env) == [0, 1, 2]
    env.run(lambda: len(ranks(env)) == 2)
    assert {worker.host for worker in env.view.members} == {"b"}


def test_cooldowns_double_up_to_the_longest_and_end():
    env = running(Rules(1, 4, cooldown_s=(30.0, 100.0)), a=2, b=2)
    for left_s in (30.0, 60.0, 100.0, 100.0):
        env.fail_host("b")
        assert env.membership.blacklisted(env.now_s) == {"b": left_s}
        env.begin()
        assert ranks(env) == [0, 1]
        env.orders.clear()
        env.wait(left_s - 0.1)
        assert not ordered(env, Connect)
        env.wait(0.1)
        assert ordered(env, Connect) == [Connect("b")]
        env.run(lambda: len(ranks(env)) == 4)
    for _ in range(2000):
        env.fail_host("b")


def test_three_failures_of_a_host_within_ten_minutes_bar_it():
    env = running(Rules(1, 4), a=2, b=2)
    for _ in range(2):
        env.end(ranks(env)[3], -9)
        env.run(lambda: len(ranks(env)) == 4 and env.phase is ViewPhase.RUNNING)
    assert not env.membership.blacklisted(env.now_s)
    env.end(ranks(env)[3], -9)
    assert env.membership.blacklisted(env.now_s) == {"b": 30.0}
    env.begin()
    assert len(ranks(env)) == 3
    env.wait(601.0)
    env.run(lambda: len(ranks(env)) == 4)


def test_with_one_rank_its_host_has_failed():
    env = running(Rules(1, 4, is_host_domain=True), a=2, b=2)
    env.orders.clear()
    env.end(2, 1)
    assert env.orders == [
        Blacklisted("b", 1, 30.0),
        Kill(3, "rank 2 on b has ended"),
        Send((0, 1), ViewEnded(0, "rank 2 on b has ended")),
    ]
    assert env.membership.blacklisted(env.now_s) == {"b": 30.0}
    env.begin()
    assert ranks(env) == [0, 1]


def test_the_reset_limit_counts_all_views_but_the_first():
    env = running(Rules(1, 2, reset_limit=2), a=2)
    env.end(1, -9)
    env.run(lambda: env.view.view == 2)
    env.end(0, -9)
    env.run()
    (stop,) = ordered(env, Stop)
    assert stop.reason.startswith(RESET_LIMIT_EXCEEDED_MESSAGE.format(2))


@pytest.mark.parametrize("step", [0, 4])
def test_three_failures_of_the_program_at_one_step_stop(step):
    env = running(Rules(1, 8), a=4, b=4)
    train(env, step)
    for _ in range(2):
        env.end(ranks(env)[-1], 1)
        env.begin()
    env.end(ranks(env)[-1], 1)
    env.run()
    (stop,) = ordered(env, Stop)
    assert stop.reason.startswith(
        f"3 times in a row a rank failed at step {step + 1}, the last time because "
    )


def test_newcomers_that_fail_do_not_stop_the_others():
    env = running(Rules(1, 4), a=2, b=1)
    env.find({"a": 2, "b": 1, "c": 1})
    for _ in range(6):
        env.run(lambda: any(p.doing is Doing.STARTING for p in env.processes.values()))
        (number,) = (n for n in env.processes if n not in ranks(env))
        env.end(number, 1)
        if env.membership.blacklisted(env.now_s):
            env.wait(max(env.membership.blacklisted(env.now_s).values()))
    assert env.view.view == 0
    assert env.phase is ViewPhase.RUNNING


def test_all_have_applied_the_last_step():
    env = running(Rules(1, 2, spares=1), a=3)
    env.run()
    assert env.orders[-1] == Send((0, 1), Finish())
    assert all(process.step == LAST_STEP for process in env.members)
    env.end(0, 0)
    assert env.phase is ViewPhase.FINISHED
    env.end(1, 1)
    assert ordered(env, Stop) == [Stop("rank 1 on a has ended after the last step.")]


def test_ranks_that_end_with_0_end_the_job():
    env = running(Rules(2, 2, spares=1), a=3)
    env.end(0, 0)
    assert env.phase is ViewPhase.RUNNING
    env.end(1, 0)
    assert env.orders[-1] == Send((), Finish())


def test_a_rank_that_ends_with_0_too_early_has_left():
    env = running(Rules(1, 3), a=3)
    env.orders.clear()
    env.end(2, 0)
    assert not env.orders
    env.run(lambda: env.view.view == 1)
    assert ranks(env) == [0, 1]
    assert sent(env, ViewBegins)[-1].reason == "rank 0 on a lost a peer"
    env.run(lambda: len(ranks(env)) == 3)


def test_a_loss_while_others_end_with_0_is_no_success():
    env = running(Rules(1, 3), a=3)
    env.end(0, 0)
    env.end(1, 1)
    env.end(2, 0)
    assert ordered(env, Stop) == [Stop("No rank has survived: rank 1 on a has ended.")]


def test_a_program_that_takes_no_part_may_end_with_0():
    env = Environment.of(Rules(2, 2), a=2)
    env.answers()[0]()
    env.end(0, 0)
    env.end(1, 0)
    assert env.orders[-1] == Send((), Finish())
    assert env.num_started == 2


@pytest.mark.parametrize("lose", ["kill", "fail_host", "leave_host"])
@pytest.mark.parametrize("has_settled", [False, True])
def test_a_loss_stops_the_job_unless_a_rank_has_shown_that_it_is_elastic(
    lose: str, *, has_settled: bool
):
    env = Environment.of(Rules(1, 2), a=1, b=1)
    env.run(lambda: len(env.processes) == 2)
    if has_settled:
        env.settle(0)
    if lose == "kill":
        env.end(1, -9)
    else:
        getattr(env, lose)("b")
    assert bool(ordered(env, Stop)) is not has_settled


def test_a_loss_while_the_view_forms():
    env = running(Rules(1, 4), a=2, b=2)
    env.end(0, -9)
    env.settle(2)
    env.end(2, -9)
    env.orders.clear()
    env.end(3, -9)
    assert not env.orders
    env.settle(1)
    assert ranks(env) == [1]


def test_a_loss_while_the_view_pauses():
    env = running(Rules(1, 3), a=2, b=1)
    env.leave_host("b")
    env.settle(0)
    env.orders.clear()
    env.end(1, -9)
    assert env.orders == [Send((2,), ViewEnded(0, "rank 1 on a has ended"))]
    env.settle(2)
    assert ranks(env) == [0]


def test_a_loss_while_the_others_are_done():
    env = running(Rules(1, 3), a=3)
    env.finish(0)
    env.orders.clear()
    env.end(2, -9)
    assert env.orders == [Send((0, 1), ViewEnded(0, "rank 2 on a has ended"))]
    env.settle(0)
    env.finish(1)
    env.settle(1)
    assert ranks(env) == [0, 1]
    env.run()
    assert env.phase is ViewPhase.FINISHED


def test_some_settle_and_others_are_done_at_the_step_of_a_pause():
    env = running(Rules(1, 3), a=2, b=1)
    env.leave_host("b")
    env.settle(0)
    env.settle(2)
    env.orders.clear()
    env.finish(1)
    assert env.orders == [Send((1,), ViewEnded(0, "b is to be left"))]
    env.settle(1)
    assert ranks(env) == [0, 1]


def test_a_host_is_left_at_a_common_step_and_released_when_all_there_have_ended():
    env = running(Rules(2, 4), a=2, b=2)
    env.orders.clear()
    env.leave_host("a")
    assert env.orders == [Send((0, 1, 2, 3), AskStep(0))]
    for number in range(4):
        env.settle(number)
    assert ranks(env) == [2, 3]
    assert env.orders[1:3] == [
        Send((0,), Leave("a is to be left")),
        Send((1,), Leave("a is to be left")),
    ]
    env.end(0, 0)
    assert not ordered(env, Release)
    env.end(1, 0)
    assert ordered(env, Release) == [Release("a")]
    assert env.membership.blacklisted(env.now_s) == {"a": 30.0}


def test_a_worker_that_was_left_out_and_stays_is_killed():
    env = running(Rules(2, 4, settle_s=30.0), a=2, b=2)
    env.leave_host("a")
    for number in range(4):
        env.settle(number)
    env.processes[0].is_stalled = True
    env.end(1, 0)
    env.orders.clear()
    env.wait(30.0)
    assert env.orders == [
        Kill(0, "worker 0 on a did not end when it was left out", is_hung=True)
    ]
    env.end(0, -9)
    assert env.orders[1:] == [Release("a")]


@pytest.mark.parametrize("has_ended", [False, True])
def test_all_stop_after_the_step_that_follows_the_largest(has_ended):
    env = running(Rules(1, 4), a=2, b=2)
    train(env, 3)
    env.leave_host("a")
    env.orders.clear()
    for number, step in ((2, 3), (0, 4), (1, 3)):
        env.report(number, AtStep(0, step))
        assert not env.orders
    if has_ended:
        env.end(3, 0)
    else:
        env.report(3, AtStep(0, 3))
    members = (0, 1, 2) if has_ended else (0, 1, 2, 3)
    assert env.orders == [Send(members, StopAfter(0, 5, "a is to be left"))]


def test_a_host_without_which_there_are_too_few_is_left_when_there_are_others():
    env = running(Rules(4, 4), a=2, b=2)
    env.orders.clear()
    env.leave_host("a")
    assert not env.orders
    env.end(0, -9)
    env.find({"a": 2, "b": 2, "c": 3})
    env.run(lambda: {worker.host for worker in env.view.members} == {"b", "c"})
    assert len(ranks(env)) == 4


def test_the_only_one_with_the_newest_state_leaves_once_others_have_it():
    env = running(Rules(1, 4), a=2, b=2)
    env.processes[0].step += 1
    env.leave_host("a")
    env.end(1, -9)
    env.run(lambda: env.view.view == 1)
    assert ranks(env) == [0, 2, 3]
    begin, pause = ordered(env, Send)[-2:]
    assert begin.message.source == 0
    assert pause == Send((0, 2, 3), AskStep(1))
    env.begin()
    assert ranks(env) == [2, 3]


def test_slots_that_are_taken_away_are_left():
    env = running(Rules(1, 4), a=2, b=2)
    env.find({"a": 1, "b": 2})
    env.begin()
    assert ranks(env) == [0, 2, 3]
    assert Send((1,), Leave("a has 1 slot now")) in env.orders


def test_a_hung_member_is_killed_and_its_slot_is_free_after_its_end():
    env = running(Rules(1, 3, settle_s=30.0), a=3)
    env.now_s = 1000.0
    env.settle(0, "lost a peer")
    env.settle(1)
    env.processes[2].is_stalled = True
    assert env.membership.due_s == 1030.0
    env.wait(29.0)
    assert env.phase is ViewPhase.FORMING
    env.wait(1.0)
    reason = "rank 2 on a hung for 30 s"
    assert ordered(env, Kill) == [Kill(2, reason, is_hung=True)]
    assert ranks(env) == [0, 1]
    env.end(2, -9)
    assert ordered(env, StartWorker)[-1].worker == Worker(3, "a", 2)


def test_a_worker_that_hangs_at_its_start_is_replaced():
    env = running(Rules(1, 2, formation_s=600.0), a=1)
    env.find({"a": 2})
    env.processes[1].is_stalled = True
    env.wait(600.0)
    assert ordered(env, Kill)[-1].worker == 1
    env.run(lambda: ranks(env) == [0, 2])


def test_newcomers_wait_5_s_for_others_that_start():
    env = running(Rules(1, 4), a=2)
    env.find({"a": 4})
    env.now_s = 50.0
    env.settle(2)
    assert env.membership.due_s == 55.0
    env.wait(4.9)
    assert env.phase is ViewPhase.RUNNING
    env.wait(0.1)
    assert env.phase is ViewPhase.PAUSING
    assert env.membership.reason == "a rank joins on a"


def test_with_awaits_joining_members_pause_for_new_workers():
    env = running(Rules(1, 4, awaits_joining=True), a=2)
    env.find({"a": 4})
    assert env.membership.reason == "ranks start on a"
    env.run(lambda: env.view.view == 1)
    assert ranks(env) == [0, 1, 2, 3]


@pytest.mark.parametrize("waited_s", [0.0, 61.0])
def test_new_workers_are_awaited_for_a_minute(waited_s):
    env = running(Rules(1, 4, awaits_joining=True), a=2)
    env.find({"a": 4})
    env.settle(0)
    env.settle(1)
    assert env.phase is ViewPhase.FORMING
    env.wait(waited_s)
    assert (env.phase is ViewPhase.RUNNING) == (waited_s > 60)
    assert not waited_s or ranks(env) == [0, 1]
