"""The report on a profile: shares of wall time, of the job, its ranks and its lines.

Note [Late ranks in samples]
    Stacks show that a rank is in a collective, not since when. So time is cut into
    slices of five seconds or more. The rank with the smallest share of communication
    in a slice arrives last there, and its share is the exposed communication; the rest
    of the other ranks' is waiting for it, as in Note [Waiting and communication] of
    ``monitor.view``. A difference that sampling alone may cause is no waiting.

    If the last rank changes from step to step, slices hide it. Ranks that report the
    times of their last steps show the share of waiting in these. If it is larger than
    that of the last slices, the difference is waiting too, and all slices lose this
    part of their exposed communication.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ronde.monitor.samples import Profile, SampleWindow
from ronde.monitor.stack_kinds import StackKind, StackReader
from ronde.status.table import JobInfo, JobStatus

_MOST_BINS = 100
_MOST_LINES = 100
_LEAST_SHARE = 0.001  # of a line in the report
_SLICE_S, _SLICE_SAMPLES = 5.0, 200
_LEAST_SAMPLES = 20  # of a rank in a slice that is compared with others
_RECENT_S = 8.0  # the time that the reported steps are of
_LEAST_HIDDEN = 0.02
_CONTEXT = 2  # lines of source before and after
_MOST_SOURCE_BYTES = 4 << 20

_Line = tuple[str, int, str]  # file, line, function
_Array = npt.NDArray[np.float64]
ReadSource = Callable[[str, float], Sequence[str]]
"""Returns the lines of a file; none if it changed after a time."""


class ProfileShares(NamedTuple):
    """Shares of wall time; the sum is 1."""

    compute: float
    communication: float  # exposed: not hidden by compute
    waiting: float  # for a late rank
    input: float
    checkpoint: float  # and other files
    sync: float  # of the host with its GPU
    other: float  # imports, Python's garbage collector, stacks without user code


_KIND = {name: index for index, name in enumerate(ProfileShares._fields)}
_COMPUTE, _COMM, _WAITING = _KIND["compute"], _KIND["communication"], _KIND["waiting"]

Bins = tuple[tuple[float, ...], ...]
"""Rows of shares, one in each time bin; () for a row of zeros."""


class LineReport(NamedTuple):
    """The time of one line of user code, with all that it calls outside of it."""

    file: str
    line: int
    function: str
    shares: ProfileShares  # of the job's time; the sum is the line's share
    bins: Bins  # a row for each field of ``shares``
    rank_shares: tuple[ProfileShares, ...]  # of each rank's time
    first: int  # the number of the first line of ``context``
    context: tuple[str, ...]  # lines of source; () if unknown

    @property
    def location(self) -> str:
        return name_location(self.file, self.line)

    @property
    def text(self) -> str:
        return self.context[self.line - self.first].strip() if self.context else ""

    def own_shares(self) -> list[float]:
        """Return each rank's share without communication and waiting."""
        return [
            max(0.0, math.fsum(each) - each.communication - each.waiting)
            for each in self.rank_shares
        ]


class RankReport(NamedTuple):
    """The time of one rank."""

    rank: int | None
    worker: int
    host: str
    num_samples: int
    shares: ProfileShares  # all 0 without samples
    bins: Bins
    blame: float  # share of the job's time that other ranks wait for this one
    num_late: int  # of ``ProfileReport.num_rounds``
    rss_bytes: int  # the largest seen; 0 if unknown


class ProfileReport(NamedTuple):
    """The report on a profile; ``monitor.advice`` draws conclusions from it."""

    job: JobInfo
    name: str  # of the program
    has_gpus: bool
    duration_s: float
    rate_hz: int
    num_bins: int
    shares: ProfileShares  # all 0 without samples
    bins: Bins
    ranks: tuple[RankReport, ...]
    lines: tuple[LineReport, ...]  # the longest first
    rounds: str  # ``steps`` or ``periods``
    num_rounds: int
    engine: str  # of its collectives
    input_location: str  # of the loop over the DataLoader
    is_loading_itself: bool  # a DataLoader without worker processes
    is_ddp_opaque: bool  # DDP of another backend communicates inside backward()
    missing: float  # share of the expected samples
    problems: tuple[str, ...]  # the reasons for windows without samples


def read_source(file: str, before: float) -> Sequence[str]:
    """Return the lines of a Python file; none if it changed after time ``before``."""
    path = Path(file)
    try:
        if path.suffix != ".py" or not path.is_absolute() or not path.is_file():
            return ()
        facts = path.stat()
        if facts.st_mtime > before or facts.st_size > _MOST_SOURCE_BYTES:
            return ()
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return ()


def name_location(file: str, line: int) -> str:
    """Return ``train.py:41``; a file that every package has keeps its directory."""
    parts = Path(file).parts[-2:]
    is_common = bool(parts) and parts[-1] in ("__init__.py", "__main__.py")
    return f"{'/'.join(parts if is_common else parts[-1:])}:{line}"


def summarize_profile(
    profile: Profile, read: ReadSource = read_source
) -> ProfileReport:
    """Divide the time of a profile by kind, rank and line."""
    status = profile.status
    has_gpus = any(row.status and row.status.device_bytes for row in status.workers)

    @cache
    def source(file: str) -> Sequence[str]:
        return read(file, status.job.started_at)

    reader = StackReader(source if has_gpus else None)
    time = _Times(profile, reader)
    rounds, num_rounds, late = _split_waiting(time, status)
    _move_gc(time, status)
    problems = dict.fromkeys(w.problem for w in profile.windows if w.problem)
    return ProfileReport(
        job=status.job,
        name=_name_program(status.job.command),
        has_gpus=has_gpus,
        duration_s=time.duration_s,
        rate_hz=profile.rate_hz,
        num_bins=time.num_bins,
        shares=_shares(time.cells.sum((0, 1, 3))),
        bins=_bins(_divide(time.cells.sum((0, 1)), time.cells.sum())),
        ranks=tuple(_report_ranks(time, status, late)),
        lines=tuple(_report_lines(time, source)),
        rounds=rounds,
        num_rounds=num_rounds,
        engine=reader.engine,
        input_location=time.input_location,
        is_loading_itself=reader.is_loading_itself,
        is_ddp_opaque=reader.is_ddp_opaque,
        missing=max(0.0, 1.0 - float(time.counts.sum()) / max(1.0, time.num_expected)),
        problems=tuple(problems),
    )


class _Times:
    """The seconds of each worker, line and kind in each time bin."""

    def __init__(self, profile: Profile, reader: StackReader) -> None:
        begun = [window.begun_at for window in profile.windows if window.runs]
        self.begun_at = min(begun, default=profile.begun_at)  # not the wait before
        self.duration_s = max(1e-3, profile.ended_at - self.begun_at)
        self.rate_hz = max(1, profile.rate_hz)
        num_samples = int(self.duration_s * self.rate_hz)
        self.num_bins = max(1, min(_MOST_BINS, num_samples // 10))
        slice_s = max(_SLICE_S, _SLICE_SAMPLES / self.rate_hz)
        num_slices = min(self.num_bins, max(1, int(self.duration_s / slice_s)))
        self.slices = np.arange(self.num_bins) * num_slices // self.num_bins
        self.workers = _order_workers(profile)
        self.num_expected = 0.0
        windows = sorted(profile.windows, key=lambda window: window.begun_at)
        kinds = [
            [reader.read([w.frames[i] for i in stack]) for stack in w.stacks]
            for w in windows
        ]
        self.lines = self._choose_lines(windows, kinds)
        shape = (len(self.workers), len(self.lines) + 1, len(_KIND), self.num_bins)
        self.cells = np.zeros(shape)
        self.counts = np.zeros((len(self.workers), self.num_bins))
        self.rss_bytes = Counter[int]()
        for window, own in zip(windows, kinds, strict=True):
            self._add(window, own)

    def _each_s(self, window: SampleWindow) -> float:
        num = sum(count for _, count in window.runs)
        length_s = window.ended_at - window.begun_at
        return length_s / num if num and length_s > 0 else 1.0 / self.rate_hz

    def _choose_lines(
        self, windows: Sequence[SampleWindow], kinds: Sequence[Sequence[StackKind]]
    ) -> list[_Line]:
        spent: Counter[_Line | None] = Counter()
        loops: Counter[tuple[str, int]] = Counter()
        for window, own in zip(windows, kinds, strict=True):
            each_s: Any = self._each_s(window)
            for index, count in window.runs:
                spent[own[index].line] += count * each_s
                if loop := own[index].loop:
                    loops[loop] += count
        self.input_location = (
            name_location(*max(loops, key=lambda e: loops[e])) if loops else ""
        )
        least = _LEAST_SHARE * sum(spent.values())
        found = [line for line, s in spent.most_common() if line and s >= least]
        return found[:_MOST_LINES]

    def _add(self, window: SampleWindow, kinds: Sequence[StackKind]) -> None:
        worker = self.workers.index(window.worker)
        length_s = max(0.0, window.ended_at - window.begun_at)
        self.num_expected += length_s * self.rate_hz
        largest = max(window.rss_bytes, self.rss_bytes[window.worker])
        self.rss_bytes[window.worker] = largest
        stacks = np.repeat(
            np.array([index for index, _ in window.runs], np.int64),
            np.array([count for _, count in window.runs], np.int64),
        )
        if not len(stacks):
            return
        each_s = self._each_s(window)
        begun_s = window.begun_at - self.begun_at
        at_s = begun_s + (np.arange(len(stacks)) + 0.5) * each_s
        bins = (at_s * self.num_bins / self.duration_s).astype(np.int64)
        bins = np.clip(bins, 0, self.num_bins - 1)
        index = {line: number for number, line in enumerate(self.lines)}
        lines = [index.get(k.line, len(index)) if k.line else len(index) for k in kinds]
        numbers = np.array([_KIND[kind.kind] for kind in kinds])
        where = np.array(lines)[stacks], numbers[stacks], bins
        np.add.at(self.cells[worker], where, each_s)
        np.add.at(self.counts[worker], bins, 1.0)

    def in_slices(self, bins: _Array) -> _Array:
        starts = np.flatnonzero(np.diff(self.slices, prepend=-1))
        return np.add.reduceat(bins, starts, axis=-1)


def _split_waiting(
    time: _Times, status: JobStatus
) -> tuple[str, int, list[list[float]]]:
    """Move the waiting for late ranks out of communication, as the note above says.

    Returns the kind and number of the rounds, and for each worker the share of the
    job's time that others wait for it and the number of its late rounds.
    """
    blocked = time.in_slices(time.cells[:, :, _COMM].sum(1))
    spent, counts = time.in_slices(time.cells.sum((1, 2))), time.in_slices(time.counts)
    shares = _divide(blocked, spent)
    parts, last = np.zeros_like(shares), np.full(shares.shape[1], -1)
    for index in range(shares.shape[1]):
        members = np.flatnonzero(counts[:, index] >= _LEAST_SAMPLES)
        if len(members) < 2:
            continue
        own = shares[members, index]
        mean, least = float(own.mean()), float(own.min())
        deviation = math.sqrt(
            max(0.0, mean * (1 - mean)) / counts[members, index].min()
        )
        if mean - least > deviation * (1 + math.sqrt(2 * math.log(len(members)))):
            last[index] = members[own.argmin()]
            parts[members, index] = 1.0 - _divide(least, own, 1.0)
    waited, step_waits = _read_steps(time, status)
    recent = slice(-max(1, round(_RECENT_S * len(last) / time.duration_s)), None)
    waits = parts * blocked
    hidden = waited - _divide(waits[:, recent].sum(), spent[:, recent].sum())
    exposed = _divide((blocked - waits)[:, recent].sum(), spent[:, recent].sum())
    rounds, num_rounds = "periods", len(last)
    if hidden > _LEAST_HIDDEN:
        kept = 1.0 - min(1.0, _divide(hidden, exposed))
        parts = 1.0 - kept * (1.0 - parts)
        rounds, num_rounds = "steps", step_waits.shape[1]
    communication = time.cells[:, :, _COMM]
    waiting = communication * parts[:, None, time.slices]
    time.cells[:, :, _COMM] -= waiting
    time.cells[:, :, _WAITING] += waiting
    caused = step_waits
    if rounds == "periods":
        caused = (last == np.arange(len(parts))[:, None]) * waits.sum(0)
    blame = _divide(caused.sum(1), caused.sum()) * _divide(
        waiting.sum(), time.cells.sum()
    )
    late = [[float(b), int(n)] for b, n in zip(blame, (caused > 0).sum(1), strict=True)]
    return rounds, num_rounds, late


def _read_steps(time: _Times, status: JobStatus) -> tuple[float, _Array]:
    """Return the share of waiting in reported steps, and the seconds of it.

    The seconds are in the row of the rank that the others waited for, by step.
    """
    rows = {row.worker: row.status.steps for row in status.workers if row.status}
    rows = {w: {each.step: each for each in rows[w]} for w in rows if rows[w]}
    common = sorted(set[int]().union(*rows.values()).intersection(*rows.values()))
    waits = np.zeros((len(time.workers), len(common)))
    if len(rows) < 2 or not common or not rows.keys() <= {*time.workers}:
        return 0.0, waits
    blocked = np.array([[rows[w][step].blocked_s for step in common] for w in rows])
    total_s = sum(rows[w][step].total_s for w in rows for step in common)
    waited_s = (blocked - blocked.min(0)).sum(0)
    index = np.array([time.workers.index(w) for w in rows])
    waits[index[blocked.argmin(0)], np.arange(len(common))] = waited_s
    return float(_divide(waited_s.sum(), total_s)), waits


def _move_gc(time: _Times, status: JobStatus) -> None:
    """Move the garbage collector's share, which ranks report, out of compute."""
    for row in status.workers:
        if row.worker in time.workers and row.status and row.status.steps:
            cells = time.cells[time.workers.index(row.worker)]
            steps = row.status.steps
            spent_s = math.fsum(each.total_s for each in steps)
            gc = _divide(math.fsum(each.gc_s for each in steps), spent_s) * cells.sum()
            moved = cells[:, _COMPUTE] * min(1.0, _divide(gc, cells[:, _COMPUTE].sum()))
            cells[:, _COMPUTE] -= moved
            cells[:, _KIND["other"]] += moved


def _report_ranks(
    time: _Times, status: JobStatus, late: Sequence[Sequence[float]]
) -> Iterator[RankReport]:
    rows = {row.worker: row for row in status.workers}
    for index, worker in enumerate(time.workers):
        cells, row = time.cells[index].sum(0), rows.get(worker)
        blame, num_late = late[index]
        yield RankReport(
            rank=row.rank if row else None,
            worker=worker,
            host=row.host if row else "",
            num_samples=int(time.counts[index].sum()),
            shares=_shares(cells.sum(1)),
            bins=_bins(_divide(cells, cells.sum())),
            blame=blame,
            num_late=int(num_late),
            rss_bytes=time.rss_bytes[worker],
        )


def _report_lines(
    time: _Times, source: Callable[[str], Sequence[str]]
) -> Iterator[LineReport]:
    total_s, rank_s = time.cells.sum(), time.cells.sum((1, 2, 3))[:, None]
    for index, (file, line, function) in enumerate(time.lines):
        cells, text = time.cells[:, index], source(file)
        first = max(1, line - _CONTEXT)
        is_known = 0 < line <= len(text)
        yield LineReport(
            file=file,
            line=line,
            function=function,
            shares=ProfileShares(*_divide(cells.sum((0, 2)), total_s).tolist()),
            bins=_bins(_divide(cells.sum(0), total_s)),
            rank_shares=tuple(
                ProfileShares(*row.tolist()) for row in _divide(cells.sum(2), rank_s)
            ),
            first=first,
            context=tuple(text[first - 1 : line + _CONTEXT]) if is_known else (),
        )


def _divide(part: Any, whole: Any, empty: float = 0.0) -> Any:  # noqa: ANN401  scalars, arrays
    whole = np.asarray(whole)
    shape = np.broadcast_shapes(np.shape(part), whole.shape)
    return np.divide(part, whole, out=np.full(shape, empty), where=whole != 0)[()]


def _shares(spent_s: _Array) -> ProfileShares:
    shares = ProfileShares(*_divide(spent_s, spent_s.sum()).tolist())
    rest = math.fsum(shares[1:])
    return shares._replace(compute=max(0.0, 1.0 - rest)) if any(shares) else shares


def _bins(rows: _Array) -> Bins:
    return tuple(tuple(row.tolist()) if row.any() else () for row in rows)


def _order_workers(profile: Profile) -> list[int]:
    """Return the workers by rank, and those without one last."""
    rows = profile.status.workers
    ranks = {row.worker: row.rank for row in rows if row.rank is not None}
    found = {row.worker for row in rows if row.state == "running"}
    found |= {window.worker for window in profile.windows}
    return sorted(found, key=lambda worker: (ranks.get(worker, math.inf), worker))


def _name_program(command: Sequence[str]) -> str:
    programs = [word for word in command if word.endswith(".py")]
    modules = [b for a, b in pairwise(command) if a == "-m"]
    return Path((programs or modules or [*command] or ["the program"])[0]).name
