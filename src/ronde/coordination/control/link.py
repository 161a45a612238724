"""What a channel is made of: a link to each neighbour."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ronde.coordination.control.channel import Loss


class Link(ABC):
    """The way to one neighbour and back; used by one thread at a time.

    Attributes:
        rank: The neighbour.
    """

    rank: int

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Send a message, or keep what does not fit yet; see ``Channel.send``."""

    @abstractmethod
    def receive(self, into: list[tuple[int, bytes]]) -> None:
        """Append what has arrived, with its sender, and send what was kept."""

    @abstractmethod
    def has_unread(self) -> bool:
        """Say whether ``receive`` would find something."""

    @abstractmethod
    def find_loss(self) -> Loss | None:
        """Say how the neighbour is gone; None while it is there.

        Nothing arrives that had not when this said so.
        """


class Medium(ABC):
    """What carries some of a rank's links.

    Attributes:
        links: One a neighbour.
    """

    links: Sequence[Link]

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the neighbours and give everything back; not collective."""
