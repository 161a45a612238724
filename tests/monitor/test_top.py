"""The view of a job as text, and the live screen of ``ronde top``."""

import asyncio
import threading

import pytest
from tests.limits import HANG_S
from tests.monitor.jobs import make_table, make_watcher

from ronde.cli import JobScreen
from ronde.errors import LaunchError
from ronde.monitor import JobWatcher
from ronde.render import draw_brief, draw_over, draw_top
from ronde.status import PendingCollective


def changed(view, **ranks_or_hosts):
    """Return a view whose first rank or host has other values."""
    for name, values in ranks_or_hosts.items():
        first, *others = getattr(view, f"{name}s")
        view = view._replace(**{f"{name}s": (first._replace(**values), *others)})
    return view


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("num_ranks", [1, 4, 512, 1000])
@pytest.mark.parametrize("width", [79, 200])
def test_a_view_fits_into_the_terminal(num_ranks, width):
    view = make_watcher(num_ranks, late=num_ranks // 2).view()
    for text in (draw_top(view, width), draw_brief(view, width)):
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert any(f"step {view.step}" in line for line in lines)
        assert "C compute" in text
    assert len(draw_top(view, width).splitlines()) < 50
    assert len(draw_brief(view, width).splitlines()) <= 11
    names = {"host": "a" * 70}
    long = changed(view, rank={**names, "collective": "b" * 70}, host=names)
    assert max(map(len, draw_top(long, 80).splitlines())) <= 80


def test_letters_of_the_bar_have_the_shares_lengths():
    view = make_watcher(8, late=5).view()
    bar = draw_top(view, 100).splitlines()[4]
    assert len(bar) == 100
    shares = {"C": view.shares.compute, "W": view.shares.waiting}
    for letter, share in shares.items():
        assert abs(bar.count(letter) - 100 * share) <= 1
    assert f"W waiting for a rank {view.shares.waiting:.0%}" in draw_top(view)


def test_the_late_rank_is_first_with_its_own_work_and_the_time_that_others_wait():
    text = draw_top(make_watcher(8, late=5).view())
    titles, first = text.splitlines()[8:10]
    assert titles.split()[:2] == ["rank", "step"]
    assert first.split()[:4] == ["5", "110", "+50%", "30%"]
    many = draw_top(make_watcher(512, late=77).view())
    assert "The ranks to look at first:" in many
    rows = [line.split()[:2] for line in many.splitlines()]
    assert ["77", "node9"] in rows
    # Its host comes first.
    assert rows.index(["node9", "8"]) < rows.index(["node0", "8"])
    assert "and 44 more hosts" in many
    assert "No rank stands out." in draw_top(make_watcher(1000).view())


def test_missing_and_bad_news_are_said():
    view = make_watcher(4).view()
    silent = changed(view, rank={"status_age_s": 3.1})
    assert "silent" in draw_top(silent)
    assert "3.1s" in draw_top(silent)
    killed = changed(view, rank={"state": "ended", "exit_code": -9})
    assert "SIGKILL" in draw_top(killed)
    assert draw_over(killed) == "The job is over; rank 0: killed by SIGKILL."
    assert draw_over(view) == draw_over(None) == "The job is over."
    ended = [each._replace(state="ended", exit_code=0) for each in view.ranks]
    assert "all ranks ended with exit code 0" in draw_over(view._replace(ranks=ended))
    assert "loss not finite" in draw_top(view._replace(loss=float("nan")))
    table = make_table(2)
    rows = [row._replace(status=None) for row in table.workers]
    nothing = draw_top(JobWatcher(table._replace(workers=tuple(rows))).view())
    assert "No steps yet." in nothing
    assert "reports nothing" in nothing
    assert "node0: no answer yet." in nothing
    assert "no recent step in common" in flat(draw_top(view._replace(shares=None)))


def test_troubles_of_hosts_and_gpus_are_said():
    view = make_watcher(4).view()
    usage = view.hosts[0].usage
    slow = usage.gpus[0]._replace(throttled_by=("HW thermal slowdown",))
    full = usage._replace(shm_bytes=490 << 30, gpus=(slow,), gpu_problem="too old")
    host = {"usage": full, "age_s": 5.0, "num_oom_kills": 2, "num_errors": 7}
    text = draw_top(changed(view, host=host))
    assert "node0: no answer for 5s." in text
    assert "node0: the kernel has killed 2 processes, as memory ran out." in text
    assert "node0: its /dev/shm is 98% full." in text
    assert "node0: no figures of GPUs: too old." in text
    assert "HW thermal slowdown" in text
    assert "errors" in text


def hanging_view():
    call = PendingCollective("x", "all", "allreduce", 0, 64, 9.0)
    table = make_table(3, collectives=[call])
    *rows, last = table.workers
    free = last._replace(status=last.status._replace(collectives=(), num_collectives=0))
    return JobWatcher(table._replace(workers=(*rows, free))).view()


def text_of(screen, *names):
    return "\n".join(str(screen.query_one(f"#{name}").render()) for name in names)


async def shown(pilot, is_shown):
    async with asyncio.timeout(HANG_S):
        while not is_shown():
            await pilot.pause(0.01)


def test_the_screen_shows_views_why_and_the_end():
    late, hanging = make_watcher(8, late=5).view(), hanging_view()
    next_view, asked = threading.Event(), threading.Event()

    def views():
        yield late
        next_view.wait(HANG_S)
        yield hanging

    def explain():
        asked.set()
        return "Rank 2 sleeps at train.py:7."

    async def use():
        screen = JobScreen(views(), explain)
        async with screen.run_test(size=(80, 24)) as pilot:
            await shown(pilot, lambda: "step 110" in text_of(screen, "summary"))
            assert "W waiting for a rank 26%" in text_of(screen, "shares")
            assert "+50%" in text_of(screen, "tables")
            assert not screen.over
            await pilot.press("w")
            await shown(pilot, lambda: "train.py:7" in text_of(screen, "tables"))
            assert asked.is_set()
            await pilot.press("w")
            assert "+50%" in text_of(screen, "tables")
            # There are more lines than fit.
            scroll = screen.query_one("Tables")
            await pilot.press("down", "down")
            await shown(pilot, lambda: scroll.scroll_y > 0)
            next_view.set()
            await shown(pilot, lambda: "The job is over" in text_of(screen, "over"))
            assert "The job hangs: ranks 0-1" in text_of(screen, "tables")
            assert "ronde why shows the" in text_of(screen, "tables")
            await pilot.resize_terminal(120, 40)
            await pilot.press("q")
        assert screen.view == hanging

    asyncio.run(use())


def test_a_job_that_does_not_answer_is_said():
    def views():
        yield make_watcher(2).view()
        raise LaunchError("the job does not answer: timed out.")

    def explain():
        raise OSError("it is gone")

    async def use():
        screen = JobScreen(views(), explain)
        async with screen.run_test(size=(80, 24)) as pilot:
            await shown(pilot, lambda: "does not answer: timed out" in screen.over)
            await pilot.press("w")
            await shown(pilot, lambda: "it is gone" in text_of(screen, "tables"))

    asyncio.run(use())
