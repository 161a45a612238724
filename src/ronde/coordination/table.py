"""What is under way on this rank."""

import threading
import time
from collections import defaultdict
from itertools import count

from ronde.coordination.entries import Entry
from ronde.coordination.operations import Kind, Operation
from ronde.coordination.requests import wire_name
from ronde.errors import CollectiveError, UsageError, fresh

_IN_FLIGHT = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as "
    "another tensor that is currently being processed.  If you want to request another "
    "tensor, use a different tensor name."
)
Counter = defaultdict[tuple[Kind, bool], "count[int]"]


class Watch:
    """Something that is waited for elsewhere: see ``Coordinator.watch``."""

    __slots__ = ("_watches", "name", "since_ns")

    def __init__(self, name: str, watches: "set[Watch]") -> None:
        self.name = name
        self.since_ns = time.monotonic_ns()
        self._watches = watches
        watches.add(self)

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        """Say that it came."""
        self._watches.discard(self)


class Table:
    """The operations of one process set that have no result yet, by name.

    Any thread may call it.

    Attributes:
        failure: Why nothing can be done any more, or None.
        has_joined: Whether this rank has joined.
    """

    def __init__(self) -> None:
        self.failure: CollectiveError | None = None
        self.has_joined = False
        self._entries: dict[str, Entry] = {}
        self._watches: set[Watch] = set()
        self._numbers = Counter(count)
        self._lock = threading.Lock()

    def name(self, operation: Operation) -> str:
        """Return the operation's name on the wire."""
        number = 0
        if not operation.name:
            number = next(self._numbers[operation.kind, operation.is_group])
        return wire_name(operation, number)

    def restart_numbers(self) -> None:
        """Number operations without a name from 0 on again.

        For when all ranks have joined: those that joined early have submitted fewer.
        """
        self._numbers.clear()

    def add(self, entry: Entry) -> None:
        """Enter an operation.

        Raises:
            UsageError: The name is under way already.
            CollectiveError: Nothing can be done any more.
        """
        with self._lock:
            if self.failure is not None:
                raise fresh(self.failure)
            if self._entries.setdefault(entry.name, entry) is not entry:
                raise UsageError(_IN_FLIGHT)

    def find(self, name: str) -> Entry | None:
        """Return an operation that is under way; None for none."""
        return self._entries.get(name)

    def has_one(self) -> bool:
        """Say whether exactly one operation is under way."""
        return len(self._entries) == 1

    def take(self, name: str) -> Entry | None:
        """Return an operation and let its name be used again; None for none."""
        with self._lock:
            return self._entries.pop(name, None)

    def fail(self, failure: CollectiveError) -> None:
        """Fail all that is under way and to come; the first reason stays."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
            entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.fail(self.failure)

    def watch(self, name: str) -> Watch:
        """Count something as waited for that is not in the table."""
        return Watch(name, self._watches)

    def is_empty(self) -> bool:
        """Say whether nothing is waited for."""
        return not (self._entries or self._watches)

    def waiting(self) -> dict[str, float]:
        """Return for how many seconds each name is waited for, the oldest first."""
        with self._lock:
            entries = list(self._entries.values())
        now = time.monotonic_ns()
        # Whoever waits to connect watches that; who has joined does not mind.
        since = {
            e.name: now if e.operation.kind is Kind.CONNECT else e.submitted_ns
            for e in entries
        }
        # A copy of a set is made in one go, whatever other threads do.
        since |= {watch.name: watch.since_ns for watch in self._watches.copy()}
        oldest_first = sorted(since.items(), key=lambda item: item[1])
        return {name: (now - at_ns) * 1e-9 for name, at_ns in oldest_first}
