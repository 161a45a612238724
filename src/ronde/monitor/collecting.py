"""Profiles of running jobs, collected from the observers of all hosts."""

import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from threading import Event
from typing import TypeVar

from ronde.launch.status import HostAnswer, JobConnection, find_sockets
from ronde.monitor.samples import HostSamples, Profile, SampleWindow
from ronde.plain_values import PlainValueError, from_plain
from ronde.status.table import JobStatus

_LAST_S = 5.0  # for the last windows
_SEARCH_S = 0.1
_PERIOD_S = 20  # as long as most windows
_MOST_WINDOWS = 4096
_MOST_OF_EACH = 16  # worker, if all together have more than that
_T = TypeVar("_T")


class ProfileCollector:
    """Collects samples of the main threads of a job's ranks, in bounded memory.

    If there are too many windows, those of every second 20 s are dropped, and so on.
    """

    def __init__(self, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._begun_at = time.time()
        self._status: JobStatus | None = None
        self._windows: list[SampleWindow] = []
        self._problems: dict[int, SampleWindow] = {}  # by worker
        self._sampled = set[int]()  # workers
        self._every = 1
        self._parts: dict[object, object] = {}  # of windows; equal ones are kept once

    def collect(
        self, job: JobConnection, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Sample the ranks of a job until ``is_over()``, or until the job ends."""
        question = {"ask": "profile", "rate_hz": self._rate_hz, "until_end": True}
        awaited, ends_s = set[str](), inf
        with suppress(OSError):  # the job ends
            for news in job:
                if isinstance(news, HostAnswer):
                    if self._add(news):
                        awaited.discard(news.host)
                elif ends_s == inf:
                    hosts = {r.host for r in news.workers if r.state == "running"}
                    self._status = news if hosts else self._status
                    if is_over():
                        question = {"ask": "profile", "rate_hz": 0}
                        awaited, ends_s = hosts, time.monotonic() + _LAST_S
                    with suppress(OSError):  # answers may still be there
                        job.send(question)
                if ends_s < inf and (not awaited or time.monotonic() > ends_s):
                    return

    def profile(self) -> Profile | None:
        """Return the profile so far; None if no job was found."""
        if self._status is None:
            return None
        now, windows = time.time(), self.windows()
        return Profile(self._status, self._begun_at, now, self._rate_hz, windows)

    def windows(self) -> tuple[SampleWindow, ...]:
        """Return the windows so far, with the problems of workers without samples."""
        failed = sorted(self._problems.keys() - self._sampled)
        return (*self._windows, *(self._problems[worker] for worker in failed))

    def add(self, window: SampleWindow) -> None:
        """Add a window of one of the job's workers."""
        if window.problem:
            self._problems[window.worker] = window
            return
        self._sampled.add(window.worker)
        if self._is_kept(window):
            self._windows.append(
                window._replace(
                    frames=self._stored(window.frames),
                    stacks=self._stored(window.stacks),
                    runs=self._stored(window.runs),
                )
            )
        most = max(_MOST_WINDOWS, _MOST_OF_EACH * len(self._sampled))
        if len(self._windows) > most:
            self._every *= 2
            self._windows = [each for each in self._windows if self._is_kept(each)]

    def _add(self, news: HostAnswer) -> bool:
        """Take over an answer; return True if it is the host's last one."""
        with suppress(PlainValueError):
            window = from_plain(HostSamples, news.answer).window
            if window is None:
                return True
            self.add(window)
        return False

    def _is_kept(self, window: SampleWindow) -> bool:
        return window.begun_at // _PERIOD_S % self._every == 0

    def _stored(self, parts: tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(self._parts.setdefault(part, part) for part in parts)  # type: ignore[misc]


def collect_own_job(rate_hz: int, is_over: Event) -> Profile | None:
    """Sample the ranks of this process's own job, which starts soon, until its end.

    ``is_over`` is set after the job has ended, and if it does not start. Return None if
    it was too short.
    """
    collector, others = ProfileCollector(rate_hz), set[Path]()
    # Again if the connection is lost: the user may suspend the job for a while.
    while not is_over.wait(_SEARCH_S):
        for path in set(find_sockets()) - others:
            with suppress(OSError), JobConnection(path) as job:
                if job.is_of_this_process:
                    collector.collect(job)
                    break
                others.add(path)  # if it answers; else it may be this one
    return collector.profile()
