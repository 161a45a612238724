"""Events of a timeline, with times from ``time.monotonic_ns()``."""

from typing import NamedTuple, Protocol


class Activity(NamedTuple):
    """A named interval within an operation."""

    name: str  # as Horovod names it, such as ``MEMCPY_IN_FUSION_BUFFER``
    begun_ns: int
    ended_ns: int


class Recorded(NamedTuple):
    """One tensor's operation on this rank, from submission to result."""

    set_id: int  # the process set
    sequence: int
    name: str  # on the wire, such as ``allreduce.x``
    kind: str  # in capitals, such as ``ALLREDUCE``
    submitted_ns: int  # 0 if this rank had joined
    agreed_ns: int  # time of agreement; 0 without negotiation (gradient buckets)
    begun_ns: int
    ended_ns: int
    dtype: str  # such as ``float32``
    shape: tuple[int, ...]  # of this rank's tensor
    num_fused: int  # number of tensors reduced together
    activities: tuple[Activity, ...] = ()


class Recorder(Protocol):
    """Receiver of events; methods must be fast and are called from several threads."""

    def operation(self, recorded: Recorded) -> None: ...
    # Called when submissions were sent for negotiation.
    def cycle(self, at_ns: int) -> None: ...


class ClockBound(NamedTuple):
    """Bounds of the offset from a rank's clock to the reference's, at one time."""

    at_ns: int  # on this rank's clock
    low_ns: int  # the reference's clock is ahead by at least this
    high_ns: int  # the reference's clock is ahead by at most this
