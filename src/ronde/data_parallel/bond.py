"""What ties gradients to other ranks."""

from typing import NamedTuple

from ronde.collectives import Communicator
from ronde.coordination.coordinator import Coordinator


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
    """What ties a reducer to other ranks.

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
