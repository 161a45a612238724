"""What ties an optimizer to the other ranks of a session, and to the next session's."""

import weakref

from ronde.data_parallel import Bond, Follower
from ronde.torch.process_sets import ProcessSet
from ronde.torch.session import current_session


class Bonds:
    """Makes the bonds of one optimizer, one a session.

    An optimizer outlives a session where ranks start anew after a failure (Horovod's
    elastic training); it keeps its number then, so that it meets its like.

    Args:
        process_set: Whose ranks reduce.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._number: int | None = None
        self._follower: weakref.ref[Follower] | None = None

    def make(self) -> Bond:
        """Connect with the other ranks of the set; collective over them.

        Raises:
            CollectiveError: There is no session, or the ranks did not meet.
        """
        session = current_session()
        set_id = self._process_set.process_set_id or 0
        member = session.members[set_id]
        self._number = member.claim_number(self._number)
        communicator = session.duplicate(set_id, self._number)
        self._register()
        return Bond(communicator, member.coordinator, set_id, self._number)

    def tie(self, follower: Follower) -> None:
        """Have ``join()`` keep up with it, and ``shutdown()`` take its bond back."""
        self._follower = weakref.ref(follower)
        self._register()

    def _register(self) -> None:
        follower = self._follower() if self._follower is not None else None
        if follower is not None:
            current_session().reducers.add(follower)
