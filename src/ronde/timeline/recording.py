"""Recording of one rank, and the merge of all ranks' records into a file."""

import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from ronde.errors import UsageError
from ronde.timeline.alignment import clock_identity
from ronde.timeline.chrome import name_events, write_trace
from ronde.timeline.events import Recorded
from ronde.timeline.gathering import Gathering, SharedStore
from ronde.timeline.part import SUFFIX, PartFiles, PartHeader, read_parts
from ronde.units import parse_size_bytes

_logger = logging.getLogger("ronde")

MAX_WAITING = 1 << 16  # queued operations; more are dropped
_SLICE = 32  # operations formatted together: Note [Short slices]
_Item = TypeVar("_Item")


class Sink(Protocol):
    """Destination of records, called by one thread and removed after an OSError."""

    def add(self, records: Sequence[Recorded], cycles: Sequence[int] = ()) -> None: ...
    def close(self, num_lost: int) -> None: ...


class ThreadedRecorder:
    """Recorder that queues operations and writes them to sinks in its own thread.

    Note [Short slices]
        The thread formats a few operations, which takes about 0.1 ms, and then releases
        the GIL. Otherwise the program would wait for the switch interval, 5 ms. The
        thread has the program's priority, as with a lower priority it could be
        suspended while it holds the GIL.
    """

    def __init__(
        self, sinks: Sequence[Sink], *, gather_s: float, has_cycles: bool = False
    ) -> None:
        self._sinks = list(sinks)
        self._gather_s = gather_s
        self._has_cycles = has_cycles
        self._operations: deque[Recorded] = deque()
        self._cycles: deque[int] = deque()
        self._num_lost = 0
        self._losing = threading.Lock()
        self._closing = threading.Event()
        name = "ronde-timeline"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def operation(self, recorded: Recorded) -> None:
        if len(self._operations) >= MAX_WAITING:
            with self._losing:
                self._num_lost += 1
            return
        self._operations.append(recorded)

    def cycle(self, at_ns: int) -> None:
        if self._has_cycles and len(self._cycles) < MAX_WAITING:
            self._cycles.append(at_ns)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._gather_s):
            self._flush()
        self._flush()
        self._each(lambda sink: sink.close(self._num_lost))

    def _flush(self) -> None:
        while self._operations or self._cycles:
            taken = _pop(self._operations), _pop(self._cycles)
            self._each(lambda sink, taken=taken: sink.add(*taken))
            time.sleep(0)

    def _each(self, do: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                do(sink)
            except OSError as error:
                self._sinks.remove(sink)
                _logger.warning(
                    "cannot write the timeline: %s. The job continues, but further "
                    "operations are not recorded.",
                    error,
                )


def _pop(items: "deque[_Item]") -> "list[_Item]":
    return [items.popleft() for _ in range(min(len(items), _SLICE))]


_END = b"\n]\n"
_CYCLE = '{"ph": "i", "name": "CYCLE_START", "ts": %d, "s": "g"}'


class LiveFile:
    """Timeline file of one rank in Horovod's format: each tensor is a ``pid``.

    A JSON array of events in Chrome's trace format, times in us since ``start_ns``. The
    file is valid JSON at any time, as each write replaces the end.
    """

    def __init__(
        self, path: Path, rank: int, *, start_ns: int, wall_us: int, limit_bytes: int
    ) -> None:
        self._rank = rank
        self._start_ns = start_ns
        self._left_bytes = limit_bytes
        self._pids: dict[tuple[int, str], int] = {}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._end_at = 0
        start = {"start_time_since_epoch_in_micros": wall_us}
        self._write(name_events("process", {"pid": 0}, start, 0))

    def add(self, records: Sequence[Recorded], cycles: Sequence[int] = ()) -> None:
        if self._left_bytes > 0:
            events = [event for record in records for event in self._spans(record)]
            self._write(events + [_CYCLE % self._us(at_ns) for at_ns in cycles])

    def close(self, num_lost: int) -> None:
        del num_lost
        os.close(self._fd)

    def _write(self, events: Sequence[str]) -> None:
        text = ",\n".join(events).encode()
        if len(text) > self._left_bytes:
            text = b'{"ph": "i", "name": "TIMELINE_LIMIT", "ts": 0, "s": "g"}'
            self._left_bytes = 0
        self._left_bytes -= len(text)
        text = (b",\n" if self._end_at else b"[\n") + text
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

    def _spans(self, record: Recorded) -> Iterator[str]:
        key = (record.set_id, record.name)
        pid = self._pids.get(key)
        if pid is None:
            pid = self._pids[key] = len(self._pids) + 1
            name = {"name": record.name}
            yield from name_events("process", {"pid": pid}, name, pid)
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


DEFAULT_LIMIT_BYTES = 32 << 20
PACKED_RATIO = 2  # size of a rank's share of a compressed trace, relative to its part
_MIN_PART_BYTES = 64 << 10
_GATHER_S = 0.5
_LIVE_GATHER_S = 0.05


def part_header(rank: int, size: int, host: str, session: int) -> PartHeader:
    """Return a header for this process; ``session`` must be equal on all ranks."""
    wall_ns = time.time_ns() - time.monotonic_ns()
    return PartHeader(rank, size, host, clock_identity(), wall_ns, session)


class RankRecording:
    """Recording of one rank in part files, which rank 0 can merge into one trace."""

    def __init__(
        self,
        header: PartHeader,
        store: SharedStore | None,
        directory: Path,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        live: LiveFile | None = None,
        has_cycles: bool = False,
    ) -> None:
        self._header = header
        share_bytes = limit_bytes // (PACKED_RATIO * header.size)
        self._files = PartFiles(directory, header, max(share_bytes, _MIN_PART_BYTES))
        sinks: list[Sink] = [self._files, *([live] if live else [])]
        gather_s = _LIVE_GATHER_S if live else _GATHER_S
        self.recorder = ThreadedRecorder(
            sinks, gather_s=gather_s, has_cycles=has_cycles
        )
        self._gathering: Gathering | None = None
        if store is not None:
            self._gathering = Gathering(
                store,
                header.rank,
                header.size,
                clock=header.clock,
                # A method of this object would make a reference cycle, which keeps
                # the store's connection open.
                on_bound=self._files.add_bound,
            )
            self._gathering.start()

    def close(self) -> None:
        if self._gathering is not None:
            try:
                self._gathering.compare_again()
            except RuntimeError as error:
                _logger.warning("cannot compare the hosts' clocks again: %s", error)
        self.recorder.close()

    def abort(self) -> None:
        """Close without comparing clocks again, as other ranks may have ended."""
        if self._gathering is not None:
            self._gathering.stop()
        self.recorder.close()

    def remove_part(self) -> None:
        self._files.remove()

    def merge(self, path: Path, limit_bytes: int) -> None:
        """Write the trace of all ranks on rank 0, and remove the parts.

        Call it after ``close``. On failure a warning is logged and the parts are kept.
        """
        header, gathering = self._header, self._gathering
        try:
            if header.rank != 0 and gathering is not None:
                # If rank 0 has not read the parts in time, it removes them later.
                if gathering.hand_in(self._files.read()):
                    self._files.remove()
                return
            parts, missing = gathering.collect() if gathering is not None else ({}, [])
            blobs = [self._files.read(), *parts.values()]
            remarks = _remarks(missing, header.size, parts)
            write_merged(path, blobs, limit_bytes, remarks)
            self._files.remove(parts)
        except (OSError, RuntimeError, UsageError) as error:
            _logger.warning(
                "cannot merge the records of rank %d into the timeline: %s. They are "
                "in %s. Merge them with: ronde trace merge",
                header.rank,
                error,
                self._files.directory,
            )


def write_merged(
    path: Path, blobs: Sequence[bytes], limit_bytes: int, remarks: Sequence[str] = ()
) -> None:
    tracks = read_parts(blobs)
    write_trace(path, tracks, limit_bytes=limit_bytes, remarks=remarks)


def _remarks(missing: list[int], size: int, parts: dict[int, bytes]) -> list[str]:
    remarks: list[str] = []
    if missing:
        remarks.append(f"The records of ranks {missing} did not come in time.")
    without = [r for r in range(1, size) if r not in parts and r not in missing][:16]
    if without:
        remarks.append(f"Ranks {without} recorded nothing: no timeline ran there.")
    return remarks


def open_horovod_recording(
    header: PartHeader,
    store: SharedStore | None,
    path: Path,
    *,
    limit_bytes: int,
    has_cycles: bool,
) -> RankRecording:
    """Begin a timeline as in Horovod: rank 0 writes ``path`` during the run."""
    live = None
    if header.rank == 0:
        live = LiveFile(
            path,
            header.rank,
            start_ns=time.monotonic_ns(),
            wall_us=time.time_ns() // 1000,
            limit_bytes=limit_bytes,
        )
    directory = path.parent / f"{path.name}.parts"
    if header.rank != 0 and not path.parent.is_dir():
        # The path exists only on rank 0's host.
        directory = Path(tempfile.mkdtemp(prefix="ronde-timeline-"))
    return RankRecording(
        header,
        store,
        directory,
        limit_bytes=limit_bytes,
        live=live,
        has_cycles=has_cycles,
    )


@contextmanager
def recorded_job(
    path: Path, limit: str | None, report: Callable[[str], None]
) -> Generator[dict[str, str]]:
    """Yield environment variables that make ranks record; merge the records later.

    The trace is written even if the job fails.
    """
    limit_bytes = parse_size_bytes(limit) if limit else DEFAULT_LIMIT_BYTES
    parts = path.with_name(f"{path.name}.parts")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"--timeline must be a file in a directory that exists, got {str(path)!r}. "
            "Create the directory or name another."
        )
    if limit_bytes < 1 << 16:
        raise UsageError(
            f"--timeline-limit must be at least 64KiB, got {limit_bytes} bytes. "
            "Leave it out for 32MiB."
        )
    if parts.exists():
        raise UsageError(
            f"{parts} already has records of an earlier job. Type: ronde trace merge "
            f"{path} {parts}, then remove that directory."
        )
    has_run = False
    try:
        yield {"RONDE_TIMELINE": str(parts), "RONDE_TIMELINE_LIMIT": str(limit_bytes)}
        has_run = True
    finally:
        if has_run or parts.exists():
            _merge_parts(path, parts, limit_bytes, report)


def _merge_parts(
    path: Path, parts: Path, limit_bytes: int, report: Callable[[str], None]
) -> None:
    files = sorted(parts.glob(f"*{SUFFIX}"))
    if not files:
        report("the timeline is empty: no rank called init(), so there is no file")
        return
    try:
        write_merged(path, [file.read_bytes() for file in files], limit_bytes)
        for file in files:
            file.unlink()
        parts.rmdir()
    except (UsageError, OSError) as error:
        report(f"{error} The ranks' records are in {parts}.")
