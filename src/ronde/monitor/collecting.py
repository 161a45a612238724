"""Profiles of running jobs, collected from the observers of all hosts."""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from math import inf
from pathlib import Path
from threading import Event
from typing import TypeVar

from ronde.errors import LaunchError
from ronde.launch.status import HostAnswer, JobConnection, find_sockets, watch
from ronde.monitor.samples import HostSamples, Profile, SampleWindow
from ronde.plain_values import PlainValueError, from_plain
from ronde.status.table import JobStatus

_LAST_S = 5.0  # for the last windows
_SEARCH_S = 0.1
_MOST_WINDOWS = 4096
_MOST_OF_EACH = 16  # workers, if there are more windows than that
_T = TypeVar("_T")


class ProfileCollector:
    """Collects samples of the main threads of a job's ranks."""

    def __init__(self, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._begun_at = time.time()
        self._status: JobStatus | None = None
        self._windows = WindowStore()

    @property
    def is_refused(self) -> bool:
        """True if no rank could be sampled so far, and there is a reason."""
        return not self._windows.has_samples and bool(self._windows.all())

    def collect(
        self, status: JobStatus, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Sample the ranks of a job until ``is_over()``, or until the job ends.

        Raises:
            OSError: The job has ended or does not answer.
        """
        question = {"ask": "profile", "rate_hz": self._rate_hz, "until_end": True}
        self._status, awaited, ends_s = status, set[str](), inf
        with JobConnection(status.socket) as job, suppress(OSError):  # the job ends
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
        windows = self._windows.all()
        now = time.time()
        return Profile(self._status, self._begun_at, now, self._rate_hz, windows)

    def _add(self, news: HostAnswer) -> bool:
        """Take over an answer; return True if it is the host's last one."""
        with suppress(PlainValueError):
            window = from_plain(HostSamples, news.answer).window
            if window is None:
                return True
            self._windows.add(window)
        return False


class WindowStore:
    """The windows of a profile in bounded memory.

    If they become too many, every second one of each worker is dropped, and so on.
    Equal parts are stored once.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, SampleWindow]] = []  # with numbers by worker
        self._num_seen = Counter[int]()
        self._every = 1
        self._problems: dict[int, SampleWindow] = {}
        self._parts: dict[object, object] = {}

    @property
    def has_samples(self) -> bool:
        return bool(self._kept)

    def add(self, window: SampleWindow) -> None:
        worker = window.worker
        if window.problem:
            self._problems[worker] = window
            return
        number = self._num_seen[worker]
        self._num_seen[worker] += 1
        if number % self._every == 0:
            self._kept.append((number, self._stored(window)))
        if len(self._kept) > max(_MOST_WINDOWS, _MOST_OF_EACH * len(self._num_seen)):
            self._every *= 2
            self._kept = [each for each in self._kept if each[0] % self._every == 0]

    def all(self) -> tuple[SampleWindow, ...]:
        """Return all windows, with the problems of workers without samples."""
        problems = self._problems.keys() - self._num_seen.keys()
        kept = [window for _, window in self._kept]
        return (*kept, *(self._problems[worker] for worker in sorted(problems)))

    def _stored(self, window: SampleWindow) -> SampleWindow:
        return window._replace(
            frames=self._store(window.frames),
            stacks=self._store(window.stacks),
            runs=self._store(window.runs),
        )

    def _store(self, parts: tuple[_T, ...]) -> tuple[_T, ...]:
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
            with suppress(OSError, LaunchError), closing(watch(path)) as versions:
                status = next(versions)
                if status.job.head_pid == os.getpid():
                    collector.collect(status)
                    break
            others.add(path)
    return collector.profile()
