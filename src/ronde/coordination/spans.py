"""When what ran, for timelines."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.coordination.entries import Entry
from ronde.coordination.fusion import Batch
from ronde.coordination.requests import Request
from ronde.timeline.events import Activity, Recorded, Recorder


@dataclass(slots=True)
class Span:
    """When a batch ran.

    Attributes:
        batch: What ran.
        begun_ns: By ``time.monotonic_ns()``, as all times here.
        activities: Its parts.
        ended_ns: When it was over.
    """

    batch: Batch
    begun_ns: int
    activities: list[Activity]
    ended_ns: int = 0

    def doing(self, name: str) -> "Doing":
        """Take a part down, for a ``with``."""
        return Doing(name, self.activities)


class Doing:
    """Takes an activity's times down."""

    __slots__ = ("_activities", "_begun_ns", "_name")

    def __init__(self, name: str, activities: list[Activity]) -> None:
        self._name = name
        self._activities = activities

    def __enter__(self) -> None:
        self._begun_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic_ns()
        self._activities.append(Activity(self._name, self._begun_ns, now))


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its process set's operations a run stands.

    Attributes:
        set_id: The set.
        sequence: Number of the first of its requests.
        agreed_ns: When this rank heard that all were ready.
    """

    set_id: int
    sequence: int
    agreed_ns: int


def record_run(
    recorder: Recorder,
    requests: Sequence[Request],
    entries: Sequence[Entry | None],
    spans: Sequence[Span],
    place: Place,
) -> None:
    """Take down what ran together, a tensor at a time.

    Args:
        recorder: Takes it down.
        requests: What was agreed.
        entries: This rank's, one for each request; None where it has joined.
        spans: When each batch ran.
        place: Where it stands.
    """
    for span in spans:
        for item in span.batch.items:
            request, entry = requests[item.request], entries[item.request]
            name, num_tensors = request.name, len(request.shapes)
            if num_tensors > 1:
                name += f"_{item.tensor + 1}of{num_tensors}"
            recorder.operation(
                Recorded(
                    set_id=place.set_id,
                    sequence=place.sequence + item.request,
                    name=name,
                    kind=request.kind.name,
                    submitted_ns=0 if entry is None else entry.submitted_ns,
                    agreed_ns=place.agreed_ns,
                    begun_ns=span.begun_ns,
                    ended_ns=span.ended_ns,
                    dtype=request.dtypes[item.tensor] if request.dtypes else "",
                    shape=request.shapes[item.tensor] if request.shapes else (),
                    num_fused=len(span.batch.items),
                    activities=tuple(span.activities),
                )
            )
