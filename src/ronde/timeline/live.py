"""Rank 0's operations as Horovod writes them: a file that is valid JSON at any time."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ronde.timeline.events import Recorded

_END = b"\n]\n"
_CYCLE = '{"ph": "i", "name": "CYCLE_START", "ts": %d, "s": "g"}'


class LiveFile:
    """Writes one rank's timeline in Horovod's form: each tensor is a ``pid``.

    The form is a JSON array of events of Chrome's trace format, times in us since
    ``start_ns``. Its end is written over by every flush.

    Args:
        path: Is written anew.
        rank: Of whom the operations are.
        start_ns: Where times count from, by ``time.monotonic_ns()``.
        wall_us: The time of day then, us since the epoch.
        limit_bytes: The file grows no further; a last event says so.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(
        self, path: Path, rank: int, *, start_ns: int, wall_us: int, limit_bytes: int
    ) -> None:
        self._rank = rank
        self._start_ns = start_ns
        self._left_bytes = limit_bytes
        self._pids: dict[tuple[int, str], int] = {}
        self._waiting: list[str] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._end_at = 0
        start = {"start_time_since_epoch_in_micros": wall_us}
        self._name_process(0, start)
        self.flush()

    def take(self, records: Sequence[Recorded], cycles: Sequence[int] = ()) -> None:
        """Format operations and cycles."""
        if self._left_bytes <= 0:
            return
        for record in records:
            # A list first: naming a process appends too.
            self._waiting += list(self._spans(record))
        self._waiting += [_CYCLE % self._us(at_ns) for at_ns in cycles]

    def flush(self) -> None:
        """Write what was taken.

        Raises:
            OSError: The disk does not take it.
        """
        if not self._waiting:
            return
        text = ",\n".join(self._waiting).encode()
        self._waiting.clear()
        if len(text) > self._left_bytes:
            text = b'{"ph": "i", "name": "TIMELINE_LIMIT", "ts": 0, "s": "g"}'
            self._left_bytes = 0
        self._left_bytes -= len(text)
        self._put((b",\n" if self._end_at else b"[\n") + text)

    def close(self, num_lost: int) -> None:
        """Close the file.

        Args:
            num_lost: Is not written down: Horovod's form has no place for it.
        """
        del num_lost
        os.close(self._fd)

    def _put(self, text: bytes) -> None:
        try:
            rest, at = memoryview(text + _END), self._end_at
            while rest:
                written = os.pwrite(self._fd, rest, at)
                rest, at = rest[written:], at + written
        except OSError:
            os.close(self._fd)
            raise
        self._end_at += len(text)

    def _us(self, at_ns: int) -> int:
        return (at_ns - self._start_ns) // 1000

    def _name_process(self, pid: int, args: Mapping[str, object]) -> None:
        about = (("process_name", args), ("process_sort_index", {"sort_index": pid}))
        self._waiting += [
            json.dumps({"name": name, "ph": "M", "pid": pid, "args": what})
            for name, what in about
        ]

    def _spans(self, record: Recorded) -> Iterator[str]:
        key = (record.set_id, record.name)
        pid = self._pids.get(key)
        if pid is None:
            pid = self._pids[key] = len(self._pids) + 1
            self._name_process(pid, {"name": record.name})
        if record.submitted_ns:
            start = self._us(record.submitted_ns)
            yield _begin(f"NEGOTIATE_{record.kind}", start, pid)
            yield (
                f'{{"ph": "X", "name": "{self._rank}", "ts": {start}, "pid": {pid}, '
                '"dur": 0}'
            )
            yield _end(self._us(record.agreed_ns or record.begun_ns), pid)
        yield _begin(record.kind, self._us(record.begun_ns), pid)
        for activity in record.activities:
            yield _begin(activity.name, self._us(activity.begun_ns), pid)
            yield _end(self._us(activity.ended_ns), pid)
        shape = "[" + ", ".join(map(str, record.shape)) + "]"
        about = f', "args": {{"dtype": "{record.dtype}", "shape": "{shape}"}}'
        yield _end(self._us(record.ended_ns), pid, about)


def _begin(name: str, ts: int, pid: int) -> str:
    return f'{{"ph": "B", "name": {json.dumps(name)}, "ts": {ts}, "pid": {pid}}}'


def _end(ts: int, pid: int, about: str = "") -> str:
    return f'{{"ph": "E", "ts": {ts}, "pid": {pid}{about}}}'
