"""What ties gradients to other ranks."""

from typing import NamedTuple, Protocol

from ronde.collectives import Communicator
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.waits import SyncPoint, Waits
from ronde.data_parallel.resumable import Steps


class Key(NamedTuple):
    """Names what reduces over ranks on its own; equal on all ranks that have it.

    Attributes:
        set_id: The process set.
        number: Among those of the set.
        size: Number of ranks in the set.
    """

    set_id: int
    number: int
    size: int


class Bond(NamedTuple):
    """What ties a reducer to other ranks: the ``Connector`` of one that is connected.

    Attributes:
        communicator: The ranks; nobody else may use it.
        coordinator: Of the same ranks; is told what is waited for. None tells nobody.
        set_id: The process set that the ranks are.
        number: Among the reducers of the set; equal on all ranks.
    """

    communicator: Communicator
    coordinator: Coordinator | None = None
    set_id: int = 0
    number: int = 0

    @property
    def key(self) -> Key:
        """Its name, for the ranks."""
        return Key(self.set_id, self.number, self.communicator.size)

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return f"gradients{self.number or ''}"

    @property
    def waits(self) -> Waits | None:
        """Those of this process, where somebody is told of them."""
        return None if self.coordinator is None else self.coordinator.waits

    def start(self) -> SyncPoint:
        """Return where its rounds meet."""
        return SyncPoint(self.set_id, self.name)

    def connect(self, *, is_watched: bool = True) -> "Steps[Bond]":  # noqa: ARG002
        """Return this."""
        return self
        yield

    def give_up(self) -> None:
        """Do nothing."""


class Connector(Protocol):
    """Connects a reducer with its like on the other ranks, when it is first used."""

    @property
    def key(self) -> Key:
        """Its name, equal on all ranks."""
        ...

    @property
    def waits(self) -> Waits | None:
        """Those of this process; None where nobody is told of them."""
        ...

    def start(self) -> SyncPoint:
        """Begin to connect, if that was not done; return where the ranks meet.

        Raises:
            CollectiveError: There is no session, or a rank is gone.
        """
        ...

    def connect(self, *, is_watched: bool = True) -> Steps[Bond]:
        """Connect; collective.

        Args:
            is_watched: Whether the stall inspector is to count it.

        Raises:
            CollectiveError: A rank is gone, the ranks' models differ, or they did not
                meet.
        """
        ...

    def give_up(self) -> None:
        """Have a connection that is under way fail on this rank."""
        ...
