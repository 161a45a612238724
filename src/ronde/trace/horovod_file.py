"""What Horovod wrote -> value: one rank's view, in which each tensor is a ``pid``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ronde.errors import UsageError
from ronde.timeline.events import Recorded
from ronde.timeline.lateness import Arrival, Key
from ronde.trace.value import RankTrace, Trace

_NEGOTIATE = "NEGOTIATE_"
_ALONE = (
    "This is the timeline of rank 0 alone: what the other ranks did, and how long they "
    "waited, it does not tell."
)

_Done = tuple[Recorded, dict[int, int]]
"""An operation, and when each rank was ready, in ns."""


@dataclass(slots=True)
class _Tensor:
    """One tensor's events, as far as they were read."""

    name: str
    depth: int = 0
    ticks: dict[int, int] = field(default_factory=dict[int, int])
    negotiation: tuple[int, int] | None = None
    kind: str = ""
    begun_ns: int = 0
    num_done: int = 0

    def take(self, event: Mapping[str, Any]) -> _Done | None:
        """Take the next event; return an operation when it is complete."""
        phase, at_ns = event.get("ph"), round(event.get("ts", 0) * 1000)
        if phase == "X" and str(event.get("name")).isdecimal():
            self.ticks[int(event["name"])] = at_ns
        elif phase == "B":
            self.depth += 1
            if self.depth == 1:
                self.kind, self.begun_ns = event["name"], at_ns
        elif phase == "E" and self.depth:
            self.depth -= 1
            if self.depth == 0:
                return self._end(event, at_ns)
        return None

    def _end(self, event: Mapping[str, Any], at_ns: int) -> _Done | None:
        if self.kind.startswith(_NEGOTIATE):
            self.negotiation = (self.begun_ns, at_ns)
            return None
        begin, agreed = self.negotiation or (self.begun_ns, 0)
        about = event.get("args", {})
        record = Recorded(
            set_id=0,
            sequence=self.num_done,
            name=self.name,
            kind=self.kind,
            submitted_ns=self.ticks.get(0, begin) or 1,
            agreed_ns=agreed,
            begun_ns=self.begun_ns,
            ended_ns=at_ns,
            dtype=about.get("dtype", ""),
            shape=_shape(about.get("shape", "")),
            num_fused=1,
        )
        ticks, self.ticks, self.negotiation = self.ticks, {}, None
        self.num_done += 1
        return record, ticks


def read_horovod(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Read Horovod's events.

    Raises:
        UsageError: There is no tensor among them.
    """
    tensors: dict[Any, _Tensor] = {}
    operations: list[tuple[Key, Recorded]] = []
    arrivals: dict[Key, Arrival] = {}
    for event in events:
        pid = event.get("pid")
        if event.get("name") == "process_name" and "name" in event.get("args", {}):
            tensors[pid] = _Tensor(event["args"]["name"])
        elif pid in tensors and (done := tensors[pid].take(event)) is not None:
            record, ticks = done
            key = Key(0, 0, record.sequence, record.name, 0)
            operations.append((key, record))
            if len(ticks) > 1:
                arrivals[key] = Arrival.of(
                    (at_ns, -rank) for rank, at_ns in ticks.items()
                )
    if not tensors:
        raise UsageError(
            "timeline must name its tensors or ranks, got events without any. It is "
            "no timeline of ronde or Horovod."
        )
    num_blind = len(operations) - len(arrivals)
    remarks = [_ALONE]
    if num_blind:
        remarks.append(
            f"Who came last is not in it for {num_blind} of {len(operations)} "
            "operations: Horovod marks the ranks only where it negotiates anew."
        )
    rank = RankTrace(0, "", None, 0, is_whole=True, operations=operations)
    return Trace(0, [rank], arrivals, remarks)


def _shape(text: str) -> tuple[int, ...]:
    words = text.strip("[]").replace(",", " ").split()
    return tuple(int(word) for word in words if word.isdecimal())
