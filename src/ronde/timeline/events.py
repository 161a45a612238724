"""What coordinators and reducers tell a timeline."""

from typing import NamedTuple, Protocol


class Activity(NamedTuple):
    """A part of an operation.

    Attributes:
        name: In Horovod's words, such as ``MEMCPY_IN_FUSION_BUFFER``.
        begun_ns: By ``time.monotonic_ns()``, as all times here.
        ended_ns: Likewise.
    """

    name: str
    begun_ns: int
    ended_ns: int


class Recorded(NamedTuple):
    """One tensor's operation on this rank, from submission to result.

    Attributes:
        set_id: The process set.
        sequence: Number of the operation among those of its set, equal on all ranks;
            members of one group or one fused batch have numbers of their own.
        name: On the wire, such as ``allreduce.x``.
        kind: In capitals, such as ``ALLREDUCE``.
        submitted_ns: When this rank asked for it; 0 where it has joined.
        agreed_ns: When this rank heard that all others had asked; 0 where that was
            never negotiated (gradient buckets).
        begun_ns: When this rank began to carry it out.
        ended_ns: When the result was there.
        dtype: Such as ``float32``.
        shape: Of this rank's tensor.
        num_fused: Tensors that were reduced together with it, itself included.
        activities: Its parts.
    """

    set_id: int
    sequence: int
    name: str
    kind: str
    submitted_ns: int
    agreed_ns: int
    begun_ns: int
    ended_ns: int
    dtype: str
    shape: tuple[int, ...]
    num_fused: int
    activities: tuple[Activity, ...] = ()


class Recorder(Protocol):
    """Takes down what happens; called from several threads; must be quick."""

    def operation(self, recorded: Recorded) -> None:
        """Take down an operation that is over."""
        ...

    def cycle(self, at_ns: int) -> None:
        """Take down that submissions were sent off for agreement."""
        ...
