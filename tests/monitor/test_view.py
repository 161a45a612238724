"""What a watcher makes of tables and of hosts' answers."""

from pathlib import Path

import pytest
from tests.monitor.jobs import MOVING_S, TOTAL_S, make_table, make_watcher

from ronde.errors import LaunchError
from ronde.monitor import JobWatcher, watch_job
from ronde.status import PendingCollective


def test_the_late_rank_is_blamed_for_the_time_that_others_wait():
    view = make_watcher(4, late=2).view()
    assert [rank.rank for rank in view.ranks] == [2, 0, 1, 3]
    late, other = view.ranks[:2]
    waiting = (0.08 - MOVING_S) / TOTAL_S
    assert late.blame == pytest.approx(waiting)
    assert (late.shares.waiting, other.blame) == (0, 0)
    assert other.shares.waiting == pytest.approx(waiting)
    assert other.shares.communication == pytest.approx(MOVING_S / TOTAL_S)
    assert late.slowness == pytest.approx(1.5)
    assert sum(view.shares) == pytest.approx(1)
    assert view.step_s == TOTAL_S
    assert view.loss == 2.5


def test_rates_are_of_the_last_two_answers():
    (host,) = make_watcher(4).view().hosts
    assert host.cpu == pytest.approx(10 / 64)
    assert (host.received_per_s, host.sent_per_s) == (1e9, 1e9)
    view = make_watcher(4, versions=1).view()
    assert view.hosts[0].cpu is None
    assert view.ranks[0].cpu is None


def test_a_job_without_steps_or_answers_has_a_view():
    table = make_table(2)
    rows = [row._replace(status=None) for row in table.workers]
    view = JobWatcher(table._replace(workers=tuple(rows))).view()
    assert view.shares is view.step_s is view.loss is view.tokens_per_s is None
    assert [rank.rank for rank in view.ranks] == [0, 1]


def test_a_hang_is_said_and_its_culprit_comes_first():
    call = PendingCollective("x", "all", "allreduce", 0, 64, 9.0)
    table = make_table(3, collectives=[call])
    *rows, last = table.workers
    free = last._replace(status=last.status._replace(collectives=(), num_collectives=0))
    view = JobWatcher(table._replace(workers=(*rows, free))).view()
    assert view.hang.startswith(
        "The job hangs: ranks 0-1 have waited 9.1s in x for rank 2"
    )
    assert view.ranks[0].rank == 2
    assert view.ranks[0].is_awaited


def test_losses_whose_sum_is_too_large_have_a_mean():
    table = make_table(2)
    rows = [
        row._replace(status=row.status._replace(progress={"loss": 1.5e308}))
        for row in table.workers
    ]
    view = JobWatcher(table._replace(workers=tuple(rows))).view()
    assert view.loss == 1.5e308


def test_a_job_that_does_not_answer_is_an_error_of_ronde():
    status = make_table(1)._replace(socket=Path("/dev/null/status"))
    with pytest.raises(LaunchError, match="the job does not answer"):
        next(watch_job(status))
