"""One rank's end of the agreement on what runs next."""

from typing import Any

from ronde.collectives import Communicator, Work
from ronde.coordination.control.channel import Channel
from ronde.coordination.operations import Operation
from ronde.coordination.options import CoordinationOptions
from ronde.timeline.events import Recorder


class Coordinator:
    """Carries out named operations of one process set, in an order all ranks agree on.

    Any thread may submit; names may come in any order, differently on each rank.

    Attributes:
        rank: This process in the set.
        size: Number of ranks in the set.
        recorder: Takes down what happens, or None; may be set at any time.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: Channel,
        options: CoordinationOptions,
        *,
        set_id: int = 0,
        ranks: tuple[int, ...] = (),
    ) -> None: ...

    rank: int
    size: int
    recorder: Recorder | None

    def submit(self, operation: Operation) -> Work[Any]:
        """Start an operation; returns at once.

        Returns:
            Work whose result is, with one entry for each tensor of the operation:
            ALLREDUCE, ADASUM, BROADCAST: the tuple of ``outputs``. ALLGATHER,
            REDUCESCATTER: a tuple of new tensors. ALLTOALL: a tuple of pairs of a new
            tensor and the rows received from each rank, a list. BARRIER: None. JOIN:
            the rank (in the set) that joined last.

            ``is_done()`` does not wait, and is False for a while after ``submit``.

        Raises:
            UsageError: The name is under way already. (Text of Horovod's.)
            CollectiveError: The job is shut down, or a rank is gone. From ``wait()``
                also: the ranks' operations do not fit together.
        """
        raise NotImplementedError

    def watch(self, name: str) -> "Watch":
        """Have the stall inspector count something that is waited for elsewhere.

        For collectives that are never negotiated, such as gradient buckets.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Tell the others that this rank is gone; what is under way fails.

        Ends the thread; the communicator stays its maker's.
        """
        raise NotImplementedError


class Watch:
    """Something that is waited for."""

    def done(self) -> None:
        """Say that it came."""
        raise NotImplementedError
