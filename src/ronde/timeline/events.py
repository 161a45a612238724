"""What coordinators and reducers report to a timeline; times by ``monotonic_ns``."""

from typing import NamedTuple, Protocol


class Activity(NamedTuple):
    """A part of an operation."""

    name: str  # in Horovod's words, such as ``MEMCPY_IN_FUSION_BUFFER``
    begun_ns: int  # by ``time.monotonic_ns()``, as all times here
    ended_ns: int


class Recorded(NamedTuple):
    """One tensor's operation on this rank, from submission to result."""

    set_id: int  # the process set
    sequence: int
    name: str  # on the wire, such as ``allreduce.x``
    kind: str  # in capitals, such as ``ALLREDUCE``
    submitted_ns: int  # when this rank asked for it; 0 where it has joined
    agreed_ns: int  # when all had asked; 0 without negotiation (gradient buckets)
    begun_ns: int  # when this rank began to carry it out
    ended_ns: int  # when the result was there
    dtype: str  # such as ``float32``
    shape: tuple[int, ...]  # of this rank's tensor
    num_fused: int  # tensors that were reduced together with it, itself included
    activities: tuple[Activity, ...] = ()


class Recorder(Protocol):
    """Takes down what happens; called from several threads; must be quick."""

    def operation(self, recorded: Recorded) -> None: ...
    # Submissions were sent off for agreement.
    def cycle(self, at_ns: int) -> None: ...


class ClockBound(NamedTuple):
    """What was measured of an offset at one time."""

    at_ns: int  # when, by the own clock
    low_ns: int  # the reference's clock is ahead of the own by at least this
    high_ns: int  # and by at most this
