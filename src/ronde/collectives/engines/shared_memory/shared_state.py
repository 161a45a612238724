"""What all collectives of one communicator stand on."""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from ronde.collectives.engines.shared_memory.staging import StagingSlots, SymmetricHeap
from ronde.collectives.engines.shared_memory.words import Header, Places
from ronde.errors import CollectiveError


@dataclass(frozen=True, slots=True)
class Call:
    """What must be equal on all ranks.

    Attributes:
        name: The collective.
        dtype: The tensor's, as text.
        numel: Its number of elements.
        detail: What else matters: the operation, the root.
    """

    name: str
    dtype: str = ""
    numel: int = 0
    detail: str = ""
    signature: int = field(init=False)
    """A number that tells calls apart, the same in every process."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(str(self).encode()).digest()
        object.__setattr__(self, "signature", int.from_bytes(digest[:8], "little"))

    def __str__(self) -> str:
        """Describe it for a message."""
        of = f" of {self.numel} elements of {self.dtype}" if self.dtype else ""
        return f"{self.name}{of}{self.detail}"


class SharedState:
    """The memory of all ranks, and the turn-taking in it.

    Attributes:
        rank: This process.
        size: Number of processes.
        headers: All ranks' words.
        staging: All ranks' slots.
        heap: What was allocated.
    """

    def __init__(
        self,
        rank: int,
        headers: Sequence[Header],
        staging: StagingSlots,
        heap: SymmetricHeap,
    ) -> None:
        self.rank = rank
        self.size = len(headers)
        self.headers = headers
        self.staging = staging
        self.heap = heap
        self._own = headers[rank].words
        self._words = [header.words for header in headers]
        self._turn = 0

    def announce(self, wanted: int, location: int = 0) -> int:
        """Tell the others, from the next meeting on, what this rank was called for.

        Args:
            wanted: The call's signature.
            location: Where the tensor is, if the others may look.

        Returns:
            The turn, for the questions after the meeting. Two turns are enough for the
            reason of Note [Two slots].
        """
        turn = self._turn = 1 - self._turn
        self._own[Places.signatures + turn] = wanted
        self._own[Places.locations + turn] = location
        return turn

    def meet(self, turn: int, wanted: int) -> list[int] | None:
        """Return where each rank's tensor is; None if their calls differ.

        Args:
            turn: From ``announce``.
            wanted: The call's signature.
        """
        signature, location = Places.signatures + turn, Places.locations + turn
        locations: list[int] = []
        for words in self._words:
            if words[signature] != wanted:
                return None
            locations.append(words[location])
        return locations

    def refusal(self, call: Call) -> Generator[None, None, CollectiveError]:
        """Tell each other the calls that do not fit together; return what to raise.

        It is the same on every rank.
        """
        self.headers[self.rank].write_text(str(call))
        yield
        # One call has taken a slot where another did not.
        self.staging.reset()
        groups: dict[str, list[int]] = {}
        for rank, header in enumerate(self.headers):
            groups.setdefault(header.read_text(), []).append(rank)
        told = "; ".join(f"{text} on {_name(ranks)}" for text, ranks in groups.items())
        return CollectiveError(
            f"calls must be equal on all ranks, got {told}. Make the same calls in the "
            "same order everywhere."
        )


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
