"""What the ranks have agreed to do next, one after the other."""

from typing import Any, NamedTuple

from ronde.coordination.requests import Request


class Run(NamedTuple):
    """Carry these out, in this order; they may be fused.

    Attributes:
        requests: What all ranks that have not joined are ready for.
        key: The same for the same requests in the same order; None where one of them
            is not remembered.
    """

    requests: list[Request]
    key: tuple[int, int] | None


class Connect(NamedTuple):
    """Make the communicator that all ranks, or those that have not joined, ask for."""

    name: str


class Failed(NamedTuple):
    """Give up a name: the ranks' requests for it do not fit together."""

    name: str
    text: str


class Joined(NamedTuple):
    """All ranks have joined; this one was the last."""

    last: int


class Gone(NamedTuple):
    """A rank will not take part in anything any more."""

    rank: int
    reason: str
    is_orderly: bool


class Asked(NamedTuple):
    """Answer what is waited for here (``Node.answer``)."""

    number: int


class Inquired(NamedTuple):
    """Say what this rank waits for, or whether it has come to these places."""

    number: int
    places: list[list[Any]]


class ToldToGiveWay(NamedTuple):
    """Have waits give way, or fail where they cannot: see ``Waits.tell``.

    Attributes:
        told: Pairs of a rank and the numbers of its waits.
        where: Pairs of a rank and what it waits for, of those that wait in a circle.
    """

    told: list[tuple[int, list[int]]]
    where: list[tuple[int, str]]


class Stopped(NamedTuple):
    """End the job, for this reason."""

    text: str


class Tuned(NamedTuple):
    """Fuse up to this many bytes from now on."""

    fusion_threshold_bytes: int


Question = Asked | Inquired | ToldToGiveWay
Step = Run | Connect | Failed | Joined | Gone | Question | Stopped | Tuned
