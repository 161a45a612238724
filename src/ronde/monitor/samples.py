"""The values of a profile: stacks of each rank's main thread, sampled from outside."""

from typing import NamedTuple

from ronde.monitor.inspection import StackFrame
from ronde.status.table import JobStatus


class SampleWindow(NamedTuple):
    """The samples of one worker's main thread in some seconds without a gap.

    Samples are equally spaced; one that failed is not among them.
    """

    worker: int
    pid: int
    begun_at: float  # Unix time
    ended_at: float
    frames: tuple[StackFrame, ...]  # all that occur, each once
    stacks: tuple[tuple[int, ...], ...]  # indices of ``frames``, the innermost first
    runs: tuple[tuple[int, int], ...]  # in order: index of a stack, number of samples
    rss_bytes: int  # at the end
    problem: str  # why there are no samples, in half a sentence; empty with some


class Profile(NamedTuple):
    """Everything that was collected of one job."""

    status: JobStatus  # the last one with running ranks
    begun_at: float  # Unix time
    ended_at: float
    rate_hz: int
    windows: tuple[SampleWindow, ...]


class HostSamples(NamedTuple):
    """One observer's answer to the question ``profile``."""

    window: SampleWindow | None  # None after the last
