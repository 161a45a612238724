"""Tells a benchmark as it runs: as text, JSON, a record and a drawing."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TextIO

from ronde.bench.measured import Ending, Heading, Measured, Remark, Totals
from ronde.bench.options import Exit, Options
from ronde.bench.results import RankCount, RankSource, Row, Run, to_record
from ronde.errors import UsageError
from ronde.records import append_record
from ronde.render.bench_json import JsonReport
from ronde.render.bench_plot import Point, Series, draw
from ronde.render.bench_progress import progress_text
from ronde.render.bench_text import ending_lines, heading_lines, row_line

_PROGRESS_S = 0.3


class Teller:
    """Tells what is measured: as text, JSON, a record and a drawing.

    Args:
        options: What was asked for.
        is_speaking: Whether this rank tells, or only keeps the totals.
    """

    def __init__(self, options: Options, *, is_speaking: bool) -> None:
        self.totals = Totals()
        self._options = options
        self._is_speaking = is_speaking
        self._heading: Heading | None = None
        self._rows: list[Row] = []
        self._cycle = 0
        self._started_s = self._told_s = monotonic()
        is_terminal = options.has_terminal or sys.stderr.isatty()
        self._has_progress = is_speaking and is_terminal
        path = options.shown.json_path
        self._json = JsonReport(open_new(path)) if is_speaking and path else None
        self._is_over = False

    def begin(self, heading: Heading) -> None:
        """Tell what is known before the first row."""
        self._heading = heading
        self._say(*heading_lines(heading))
        if self._json is not None:
            self._json.begin(heading)

    def take(self, event: Measured | Remark) -> None:
        """Tell a row, or a remark."""
        if isinstance(event, Remark):
            self._say(f"# {event.text}")
            return
        self.totals.add(event)
        if not self._is_speaking:
            return
        self._say(row_line(event, self._known_heading))
        if self._json is not None:
            self._json.row(event)
        if event.cycle != self._cycle and not self._options.loop.cycles:
            # A soak keeps its last sweep alone.
            self._rows.clear()
        self._cycle = event.cycle
        self._rows.append(event.row)
        self._progress()

    def end(self, ending: Ending) -> None:
        """Tell the end, and write the files."""
        if self._is_over or self._heading is None or not self._is_speaking:
            return
        self._is_over = True
        self._wipe(is_last=True)
        self._say(*ending_lines(self._heading, ending))
        if self._json is not None:
            self._json.end(ending)
        if self._options.shown.record_path:
            run = self._run(self._heading, ending)
            append_record(Path(self._options.shown.record_path), to_record(run))
        if self._options.shown.plot_path:
            plot(self._heading, {self._heading.engine: self._rows})

    def fail(self, reason: str) -> None:
        """Tell that it ended before its time."""
        self.end(Ending(self.totals, errors=(reason,)))

    def expired(self, what: str) -> None:
        """End this process: a synchronisation took too long."""
        limit_s = self._options.loop.timeout_s
        reason = f"{what} must end within -T {limit_s:g} s, and did not"
        sys.stderr.write(f"ronde: {reason}.\n")
        sys.stderr.flush()
        self.fail(reason)
        sys.stdout.flush()
        # The main thread waits for ranks that may never answer.
        os._exit(Exit.TIMEOUT)

    @property
    def _known_heading(self) -> Heading:
        if self._heading is None:
            raise AssertionError("a row came before the heading")
        return self._heading

    def _say(self, *lines: str) -> None:
        if self._is_speaking:
            self._wipe()
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()

    def _progress(self) -> None:
        now_s = monotonic()
        if not self._has_progress or now_s - self._told_s < _PROGRESS_S:
            return
        self._told_s = now_s
        text = progress_text(
            self.totals, self._num_rows(), now_s - self._started_s, self._cycle
        )
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()

    def _wipe(self, *, is_last: bool = False) -> None:
        """Take the line of progress away; the launcher's console does it by itself."""
        if self._has_progress and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        elif self._has_progress and is_last:
            sys.stderr.write("\r \r")
        sys.stderr.flush()

    def _num_rows(self) -> int:
        options, sweep = self._options, self._options.sweep
        num_sizes = sum(1 for _ in sweep.sizes())
        num_roots = len(sweep.roots(options.test, self._known_heading.size))
        num_kinds = len(sweep.dtypes) * len(sweep.ops) * num_roots
        return num_sizes * num_kinds * options.loop.cycles

    def _run(self, heading: Heading, ending: Ending) -> Run:
        limit = heading.limit
        return Run(
            test=heading.options.test.name,
            ranks=RankCount.exactly(heading.size, RankSource.GIVEN),
            rows=tuple(self._rows),
            average_busbw_gb_per_s=ending.totals.average_busbw_gb_per_s,
            num_out_of_bounds=ending.totals.num_failed,
            is_complete=not ending.errors,
            warnings=ending.errors,
            engine=heading.engine,
            facts={
                "limit_busbw_gb_per_s": limit.bus_bandwidth_gb_per_s if limit else None,
                "limit_link": limit.link if limit else "",
                "call_overhead_us": heading.call_overhead_us,
                "num_rows": ending.totals.num_rows,
                "versions": dict(heading.versions),
                "words": list(heading.options.words),
            },
        )


def plot(heading: Heading, rows: Mapping[str, Sequence[Row]]) -> None:
    """Draw what was measured, one line an engine; rows without bandwidth are left out.

    Args:
        heading: Of the run.
        rows: By engine.
    """
    series = [
        Series(name, [_point(row) for row in measured])
        for name, measured in rows.items()
    ]
    if any(point.busbw_gb_per_s > 0 for each in series for point in each.points):
        path = Path(heading.options.shown.plot_path)
        title = f"{heading.options.test.name}, {heading.size} ranks"
        draw(series, heading.limit, path, title=title)


def _point(row: Row) -> Point:
    """Return the better half of a row."""
    sides = [side for side in (row.in_place, row.out_of_place) if side is not None]
    best = max(sides, key=lambda side: side.busbw_gb_per_s or 0.0)
    return Point(row.size_bytes, best.busbw_gb_per_s or 0.0, best.time_us)


def open_new(path: str) -> TextIO:
    """Open a file that is not there yet: ``path``, else ``path.0``, ``path.1``, ...

    Raises:
        UsageError: It cannot be written.
    """
    name, number = path, 0
    while True:
        try:
            return Path(name).open("x", encoding="utf-8")
        except FileExistsError:
            name, number = f"{path}.{number}", number + 1
        except OSError as error:
            raise UsageError(
                f"-J must be a file that can be written, got {path}: {error.strerror}."
            ) from None
