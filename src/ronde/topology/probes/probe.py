"""What every reader of a saved topology offers."""

from typing import NamedTuple, Protocol

from ronde.topology.graph import Topology


class Saved(NamedTuple):
    """A file as it lies there.

    Attributes:
        name: What to call it in messages: its path as the user gave it.
        data: All its bytes.
    """

    name: str
    data: bytes

    @property
    def text(self) -> str:
        """The bytes as text; what is no UTF-8 stands as replacement characters."""
        return self.data.decode(errors="replace")


class Probe(Protocol):
    """Reads one form of topology."""

    @property
    def form(self) -> str:
        """The form, for people: ``NCCL topology file``."""
        ...

    def recognises(self, saved: Saved) -> bool:
        """Return whether a file is of this form; quick, and true for damaged ones."""
        ...

    def read(self, saved: Saved) -> Topology:
        """Return what a file says.

        What is odd and can be read is a remark of the host. Nothing is guessed.

        Raises:
            UsageError: The file cannot be read, with the place in it.
        """
        ...
