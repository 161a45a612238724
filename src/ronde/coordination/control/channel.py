"""THE interface by which coordinators talk; it never shares a path with the data.

Rules that hold for every channel:

* Messages go along the edges of a ``Tree``. Those from one neighbour to another arrive
  once, whole and in order; any length.
* ``send``, ``receive`` and ``find_losses`` are called by one thread at a time, ``wait``
  by several at once, ``wake`` by any.
* Whoever waits costs nothing: no processor time while nothing arrives. After a ``wait``
  comes a ``receive``; until then what has arrived makes every ``wait`` return.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from ronde.coordination.control.rounds import Rounds
from ronde.coordination.tree import Tree


class Loss(NamedTuple):
    """A neighbour that will not answer any more.

    Attributes:
        rank: Who.
        reason: Why, as the end of a sentence: ``rank 3, process 4711, ended``.
        is_orderly: Whether it had said goodbye by ``close()``.
    """

    rank: int
    reason: str
    is_orderly: bool


class Channel(ABC):
    """Carries messages between one rank and its neighbours in a tree.

    Attributes:
        tree: Who the neighbours are.
        rounds: What all ranks share, where all of them are on one host; or None.
    """

    tree: Tree
    rounds: Rounds | None = None

    @abstractmethod
    def send(self, to: int, message: bytes) -> None:
        """Send a message to a neighbour and return at once.

        What does not fit on its way yet is kept and goes off in a later ``receive`` or
        ``send``. To a neighbour that is gone it is dropped.
        """

    @abstractmethod
    def receive(self) -> list[tuple[int, bytes]]:
        """Return what has arrived: pairs of sender and message. Never waits."""

    @abstractmethod
    def wait(self, timeout_s: float | None, *, is_eager: bool) -> None:
        """Return when something may have arrived, or ``wake`` was called.

        What arrived since the last ``receive``, by any thread, and a ``wake`` since the
        last ``wait`` of this thread count too: neither is ever missed. It may also
        return for nothing.

        Args:
            timeout_s: Return after so long; None for never.
            is_eager: Whether to spin and yield for a short while before going to sleep:
                for a caller that wants its answer. Not for a thread that listens.
        """

    @abstractmethod
    def wake(self) -> None:
        """Have every ``wait`` of this process return; any thread may call it."""

    @abstractmethod
    def attend(self) -> None:
        """Say that a thread will call ``wait`` eagerly and ``receive`` from now on.

        While any thread attends, a message that arrives need not wake those that wait
        without being eager, nor keep them from waiting: the one that attends will see
        it. May be nested.
        """

    @abstractmethod
    def leave(self) -> None:
        """Take one ``attend`` back; messages wake all who wait again.

        One that came in meanwhile and was not received wakes them now.
        """

    @abstractmethod
    def find_losses(self) -> list[Loss]:
        """Return the neighbours that are gone, with all that they had sent received.

        To be called a few times a second while something is waited for. A neighbour is
        in the list once all its messages were returned by ``receive``, and stays in it.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the neighbours and give everything back.

        Not collective. Messages that were sent before still arrive as far as the
        medium allows without waiting for the receiver. Every ``wait`` returns.
        """
