"""What a rank holds of a process set that it belongs to."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet

from ronde.collectives import Communicator, Connections
from ronde.coordination.control.channel import connect_channel
from ronde.coordination.coordinator import CoordinationOptions, Coordinator
from ronde.coordination.waits import Waits
from ronde.data_parallel import Follower


@dataclass(frozen=True, slots=True)
class Job:
    """What all process sets of a job are made from.

    Attributes:
        connections: Makes communicators.
        hosts: The host of every rank of the job.
        options: How to coordinate.
        timeout_s: How long the ranks of a set wait for each other to connect.
        waits: Those of this process.
    """

    connections: Connections
    hosts: tuple[str, ...]
    options: CoordinationOptions
    timeout_s: float
    waits: Waits = field(default_factory=Waits)


@dataclass(frozen=True, slots=True)
class ProcessSetState:
    """This rank as one of a process set.

    Attributes:
        ranks: The set's ranks among all, ascending.
        rank: This one's index in them.
        communicator: Of these ranks; its calls are the coordinator's alone.
        coordinator: Agrees on what the communicator is to do.
        followers: What reduces over the set outside of it.
    """

    ranks: tuple[int, ...]
    rank: int
    communicator: Communicator
    coordinator: Coordinator
    followers: WeakSet[Follower] = field(default_factory=WeakSet[Follower])
    _numbers: dict[str, set[int]] = field(
        default_factory=lambda: defaultdict[str, set[int]](set)
    )

    @classmethod
    def connect(
        cls,
        job: Job,
        set_id: int,
        ranks: Sequence[int],
        communicator: Communicator | None = None,
    ) -> "ProcessSetState":
        """Connect the ranks of a set; collective over them.

        Args:
            job: What to make it from.
            set_id: Number of the set; no other of the job has or had it.
            ranks: Ascending; this one is among them.
            communicator: Of these ranks, where there is one already.
        """
        rank = ranks.index(job.connections.claim.rank)
        if communicator is None:
            communicator = job.connections.connect(f"set{set_id}", ranks, job.hosts)
        try:
            channel = connect_channel(
                job.connections.store(f"set{set_id}/control"),
                rank,
                [job.hosts[other] for other in ranks],
                timeout_s=job.timeout_s,
            )
            coordinator = Coordinator(
                communicator,
                channel,
                job.options,
                set_id=set_id,
                ranks=tuple(ranks) if set_id else (),
                waits=job.waits,
            )
        except BaseException:
            communicator.close()
            raise
        return cls(tuple(ranks), rank, communicator, coordinator)

    def claim_number(self, label: str, number: int | None = None) -> int:
        """Return a number that nothing else of this set and label has or had here.

        Args:
            label: What is numbered.
            number: Taken if it is free; for what had it in an earlier session.
        """
        taken = self._numbers[label]
        if number is None or number in taken:
            number = next(i for i in count() if i not in taken)
        taken.add(number)
        return number

    def close(self) -> None:
        """Tell the others, fail what is under way and give everything back."""
        self.coordinator.close()
        for follower in list(self.followers):
            follower.unbind()
        self.communicator.close()
