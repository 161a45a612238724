"""The views of an elastic job: how long each change took, and what it cost."""

import time

from ronde.launch.job.failure import ViewRecord
from ronde.membership.view import NEW, NO_VIEW, View
from ronde.units import counted, format_duration


class ViewLog:
    """Records each view when all its members run."""

    def __init__(self, started_at_s: float) -> None:
        self.records: list[ViewRecord] = []
        self._started_at_s = started_at_s
        self._change_s = started_at_s  # when the change under way began
        self._began_s = started_at_s  # when that to the view did
        self._view, self._reason = View(NO_VIEW, ()), ""
        self._size_before = 0  # of the view before
        self._running: dict[int, int] = {}  # members of the view that run: their step
        self._best_step = NEW  # the most that were applied, as far as known

    def begin_change(self) -> None:
        """Note that the view is over, or is to stop."""
        self._change_s = time.monotonic()

    def begin_view(self, view: View, reason: str) -> None:
        self._size_before = len(self._view.members)
        self._view, self._reason, self._running = view, reason, {}
        self._began_s = self._change_s

    def note_step(self, step: int) -> None:
        """Note that so many steps are applied."""
        self._best_step = max(self._best_step, step)

    def summary(self) -> str:
        """Return one line about all changes; nothing where there was none."""
        changes = self.records[1:]
        if not changes:
            return ""
        sizes = [record.size for record in self.records]
        took = format_duration(sum(record.took_s for record in changes))
        lost = counted(sum(record.steps_lost for record in changes), "step")
        ranks = f"{min(sizes)} to {counted(max(sizes), 'rank')}"
        times = counted(len(changes), "change")
        return f"{times} of membership, {ranks}: {took} at a standstill, {lost} lost"

    def enter(self, worker: int, step: int) -> str:
        """Note that a member runs; return how the job goes on once all do."""
        self._running[worker] = step
        if len(self._running) < len(self._view.members):
            return ""
        newest = max(self._running.values())
        record = ViewRecord(
            self._view.view,
            self._began_s - self._started_at_s,
            time.monotonic() - self._began_s,
            len(self._running),
            newest,
            max(0, self._best_step - newest),
            self._reason,
        )
        self.records.append(record)
        self._best_step = newest
        return describe_view(record, self._size_before) if self._size_before else ""


def describe_view(record: ViewRecord, size_before: int) -> str:
    """Return one line that says how a job goes on."""
    where = f"from step {record.step}" if record.step >= 0 else "from the beginning"
    lost = f", {counted(record.steps_lost, 'step')} lost" if record.steps_lost else ""
    ranks = counted(size_before, "rank")
    change = f"{ranks} became {record.size} and go on"
    if size_before == record.size:
        change = f"another takes its place, and {ranks} go on"
    took = format_duration(record.took_s)
    return f"{record.reason}; {change} {where} after {took}{lost}"
