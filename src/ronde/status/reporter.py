"""The thread of a rank that reports its status to the launcher.

Note [The cost of a status]
    Once a second a thread samples existing tables and writes a line of a few hundred
    bytes. It never blocks: a line that cannot be written now is dropped. It adds no
    work to collectives. Without a channel to the launcher, or with ``RONDE_STATUS=0``,
    there is no thread.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakMethod

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.status.steps import own_meter
from ronde.status.values import UNKNOWN, PendingCollective, RankStatus, encode_status
from ronde.world.environment import own_or, read_channel, send_to_agent

_EVERY_S = 1.0
_MOST_COLLECTIVES = 8
_MOST_LETTERS = 120
_NOTHING: Mapping[str, float | None] = MappingProxyType({})


class Part(NamedTuple):
    """The fields of a status that one source provides."""

    collectives: Sequence[PendingCollective] = ()
    step: int = UNKNOWN  # the number of steps that an optimizer has applied
    job_step: int = UNKNOWN  # of the job or the program; it goes before ``step``
    progress: Mapping[str, float | None] = _NOTHING


class StatusReporter:
    """A thread that samples the sources of a rank's status, and reports the result.

    A source is a bound method, held by a weak reference.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()  # a forked child has no thread and reports nothing
        self._sources: list[WeakMethod[Callable[[], Part]]] = []
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._meter = own_meter()
        self._meter.watch_gc()
        threading.Thread(target=self._run, name="ronde-status", daemon=True).start()

    def add(self, source: Callable[[], Part]) -> None:
        alive = [each for each in self._sources if each() is not None]
        self._sources = [*alive, WeakMethod(source)]

    def sample(self) -> RankStatus:
        found = [source for each in self._sources if (source := each()) is not None]
        parts = [source() for source in found]
        collectives = [each for part in parts for each in part.collectives]
        collectives.sort(key=lambda each: -each.age_s)
        shown = [
            each._replace(name=each.name[:_MOST_LETTERS])
            for each in collectives[:_MOST_COLLECTIVES]
        ]
        step = max((part.step for part in parts), default=UNKNOWN)
        job_step = max((part.job_step for part in parts), default=UNKNOWN)
        progress = {n: v for part in parts for n, v in part.progress.items()}
        return RankStatus(
            pid=self.pid,
            step=step if job_step == UNKNOWN else job_step,
            collectives=tuple(shown),
            num_collectives=len(collectives),
            rss_bytes=self._read_rss(),
            device_bytes=_read_device_bytes(),
            progress=progress,
            steps=self._meter.sample(None if job_step == UNKNOWN else job_step),
        )

    def _run(self) -> None:
        pause = threading.Event()
        while (channel := read_channel()) is not None and channel.fd >= 0:
            # A rank must not fail because of this; the next sample may succeed.
            with suppress(Exception):
                send_to_agent(f"status {encode_status(self.sample())}")
            pause.wait(_EVERY_S)

    def _read_rss(self) -> int:
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  it is quicker
                return int(file.read().split()[1]) * self._page_bytes
        except (OSError, ValueError, IndexError):
            return 0


def _read_device_bytes() -> int:
    # Not imported here: a program without torch has no device memory.
    torch: Any = sys.modules.get("torch")
    with suppress(AttributeError, RuntimeError):  # torch is being imported, or broken
        if torch is not None and torch.cuda.is_initialized():
            return torch.cuda.memory_allocated()
    return 0


def add_source(source: Callable[[], Part]) -> None:
    """Add a source to this rank's status; another thread will call it."""
    reporter = _own_reporter()
    if reporter is not None and reporter.pid == os.getpid():
        reporter.add(source)


@functools.cache
def _own_reporter() -> StatusReporter | None:
    channel = read_channel()
    is_off = own_or(None).get("RONDE_STATUS") == "0"
    return None if channel is None or channel.fd < 0 or is_off else StatusReporter()


class _Progress:
    """The figures that the program has reported."""

    def __init__(self) -> None:
        self.figures: dict[str, float | None] = {}
        self.step = UNKNOWN
        add_source(self.report)

    def report(self) -> Part:
        return Part(job_step=self.step, progress=self.figures)


@functools.cache
def _own_progress() -> _Progress:
    return _Progress()


def progress(
    *,
    step: int | None = None,
    loss: float | None = None,
    tokens: float | None = None,
    **figures: float,
) -> None:
    """Report figures that only the program knows to ``ronde top`` and ``ronde ps``.

    A call takes microseconds and is not collective. Outside of ``ronde run`` it has no
    effect. A CUDA tensor as a figure makes the program wait for the GPU.

    Args:
        step: The number of steps done; without it, optimizers of ronde count them.
        loss: This rank's loss.
        tokens: The number of tokens or samples that this rank has processed since its
            last call.
        figures: Further figures by name, each one number.

    Raises:
        UsageError: A figure is not a number.
    """
    own = _own_progress()
    number = _figure("step", step)
    if step is not None and (number is None or number < 0):
        text = f"progress(step=...) must be at least 0, got {shorten(step)}."
        raise UsageError(text)
    given = {"loss": loss, "tokens": tokens, **figures}
    found = {name: _figure(name, value) for name, value in given.items()}
    found = {n: value for n, value in found.items() if given[n] is not None}
    if tokens is not None:
        found["tokens"] = (own.figures.get("tokens") or 0.0) + (found["tokens"] or 0.0)
    own.figures = {**own.figures, **found}
    if number is not None:
        own_meter().report(int(number))
        own.step = int(number)


def _figure(name: str, value: object) -> float | None:
    """Return a number; None if it is not finite, which JSON does not have."""
    if value is None:
        return None
    try:
        # torch warns of a conversion of a tensor that requires gradients.
        plain: Any = getattr(value, "detach", lambda: value)()
        number = float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        text = f"progress({name}=...) must be a number, got {shorten(value)}."
        raise UsageError(text) from None
    return number if isfinite(number) else None
