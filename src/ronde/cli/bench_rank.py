"""Run one rank of ``ronde bench``: measure with the other ranks; rank 0 reports."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TextIO

import torch

from ronde.bench import results
from ronde.bench.comparison import Compared
from ronde.bench.link_costs import fit_rows
from ronde.bench.options import Exit, Options
from ronde.bench.ranks import Ranks
from ronde.bench.session import BenchSession, open_session
from ronde.bench.sweeps import EngineComparison, SweepBench
from ronde.bench.variables import Variables
from ronde.errors import CollectiveError, UsageError
from ronde.records import append_record
from ronde.render import bench as render
from ronde.units import format_size
from ronde.world import RankInfo

_PROGRESS_S = 0.3


@contextmanager
def _stopping() -> Generator[Callable[[], bool]]:
    """Turn Ctrl-C or SIGTERM into a flag; a second signal kills this process.

    Yields a function that returns True after the first signal.
    """
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_rank(options: Options, variables: Variables, info: RankInfo) -> int:
    """Run this rank's part of a benchmark; return the exit code, equal on all ranks."""
    reporter = Reporter(options, is_shown=info.rank == 0)
    try:
        session = open_session(info, options, variables, reporter.expired)
    except CollectiveError as error:
        raise UsageError(
            f"not all {info.size} ranks of {info.launcher} have connected: {error}"
        ) from error
    with _stopping() as is_stopped:
        try:
            measure = _compare if options.is_compared else _sweep
            code = measure(session, reporter, is_stopped)
        except BaseException as error:
            problem = str(error) or type(error).__name__
            reporter.end(results.Ending(reporter.totals, errors=(problem,)))
            session.ranks.close()
            raise
        _close(session.ranks)
    return code


def _close(ranks: Ranks) -> None:
    # A rank that exits before rank 0 has reported everything may end the job.
    ranks.control.barrier().wait()
    ranks.close()


def _sweep(
    session: BenchSession, reporter: "Reporter", is_stopped: Callable[[], bool]
) -> int:
    reporter.begin(session.heading())
    reason = SweepBench(session.first, session.options, is_stopped).run(reporter.report)
    # A soak has no other end.
    is_cut = reason is results.Reason.STOPPED and session.options.loop.cycles > 0
    errors = ("interrupted",) if is_cut else ()
    least = session.variables.least_busbw_gb_per_s
    ending = results.Ending(reporter.totals, least, _memory(session), errors, reason)
    reporter.end(ending)
    if ending.errors:
        return Exit.INTERRUPTED
    return Exit.FAILED if ending.failures else Exit.OK


def _memory(session: BenchSession) -> str:
    if not session.options.shown.has_memory:
        return ""
    own = format_size(2 * session.first.buffers.capacity_bytes)
    if session.ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(session.ranks.device)
        return f"GPU memory usage : User-Allocated {own} | Reserved {format_size(peak)}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"Host memory usage : User-Allocated {own} | Peak RSS {format_size(peak)}"


def _compare(
    session: BenchSession, reporter: "Reporter", is_stopped: Callable[[], bool]
) -> int:
    heading, shown = session.heading(), session.options.shown
    compared: list[Compared] = []

    def report(event: Compared | str) -> None:
        if isinstance(event, str):
            reporter.show(f"# {event}")
            return
        compared.append(event)
        reporter.show(render.compared_line(event))

    reporter.show(*render.facts_lines(heading))
    reporter.show(*render.comparison_titles(heading, list(session.benches)))
    comparison = EngineComparison(session.benches, session.options, is_stopped)
    reason = comparison.run(report)
    was_stopped = reason is results.Reason.STOPPED
    error = "interrupted" if was_stopped else ""
    reporter.show(*render.comparison_summary(compared, error))
    rows = {name: [each.rows[name] for each in compared] for name in session.benches}
    if session.ranks.is_rank_0:
        for name, each in rows.items() if shown.record_path else ():
            run = _run(heading, name, each, fit_rows(heading, each))
            run = replace(run, is_complete=reason is results.Reason.COMPLETE)
            append_record(Path(shown.record_path), results.to_record(run))
    if was_stopped:
        return Exit.INTERRUPTED
    sides = [each.side(engine) for each in compared for engine in each.rows]
    return Exit.FAILED if any(side.num_wrong for side in sides) else Exit.OK


class Reporter:
    """Output of rank 0: the table, progress, JSON and a record."""

    def __init__(self, options: Options, *, is_shown: bool) -> None:
        self.totals = results.Totals()
        self._options = options
        self._is_shown = is_shown
        self._heading: results.Heading | None = None
        self._rows: list[results.Row] = []
        self._cycle = 0
        self._started_s = self._drawn_s = monotonic()
        is_terminal = options.parent == "terminal" or sys.stderr.isatty()
        self._has_progress = is_shown and is_terminal
        path = options.shown.json_path
        self._json = render.JsonReport(_open_new(path)) if is_shown and path else None
        self._is_over = False

    def show(self, *lines: str) -> None:
        if self._is_shown:
            self._wipe()
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()

    def begin(self, heading: results.Heading) -> None:
        self._heading = heading
        self.show(*render.heading_lines(heading))
        if self._json is not None:
            self._json.begin(heading)

    def report(self, event: results.Measured | str) -> None:
        if isinstance(event, str):
            self.show(f"# {event}")
            return
        self.totals.add(event)
        heading = self._heading
        if not self._is_shown or heading is None:
            return
        self.show(render.row_line(event, heading))
        if self._json is not None:
            self._json.row(event)
        if event.cycle != self._cycle and not self._options.loop.cycles:
            # A soak keeps only its last sweep.
            self._rows.clear()
        self._cycle = event.cycle
        self._rows.append(event.row)
        now_s = monotonic()
        if self._has_progress and now_s - self._drawn_s >= _PROGRESS_S:
            self._drawn_s = now_s
            options, sweep = self._options, self._options.sweep
            num_rows = sum(1 for _ in sweep.sizes()) * options.loop.cycles
            num_rows *= len(sweep.roots(options.test, heading.size))
            num_rows *= len(sweep.dtypes) * len(sweep.ops)
            elapsed_s = now_s - self._started_s
            text = render.progress_text(self.totals, num_rows, elapsed_s, self._cycle)
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def end(self, ending: results.Ending) -> None:
        heading, shown = self._heading, self._options.shown
        if self._is_over or heading is None or not self._is_shown:
            return
        self._is_over = True
        self._wipe(is_last=True)
        fitted = fit_rows(heading, self._rows)
        ending = replace(ending, fit=fitted["fit"])
        self.show(*render.ending_lines(heading, ending))
        if self._json is not None:
            self._json.end(ending)
        if shown.record_path:
            limit, totals = heading.limit, ending.totals
            facts = {
                "limit_busbw_gb_per_s": limit.bus_bandwidth_gb_per_s if limit else None,
                "limit_link": limit.link if limit else "",
                "call_overhead_us": heading.call_overhead_us,
                "num_rows": totals.num_rows,
                "versions": dict(heading.versions),
                **fitted,
            }
            run = replace(
                _run(heading, heading.engine, self._rows, facts),
                is_complete=not ending.errors,
                average_busbw_gb_per_s=totals.average_busbw_gb_per_s,
                num_out_of_bounds=totals.num_failed,
                failures=ending.failures,
            )
            append_record(Path(shown.record_path), results.to_record(run))

    def expired(self, work: str) -> None:
        limit_s = self._options.loop.timeout_s
        reason = f"{work} did not end within -T {limit_s:g} s"
        print(f"ronde: {reason}.", file=sys.stderr, flush=True)
        self.end(results.Ending(self.totals, errors=(reason,)))
        sys.stdout.flush()
        # The main thread waits for ranks that may never answer.
        os._exit(Exit.TIMEOUT)

    def _wipe(self, *, is_last: bool = False) -> None:
        """Clear the progress line. Without a terminal, do so only if ``is_last``."""
        if self._has_progress and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif self._has_progress and is_last:
            print("\r \r", end="", file=sys.stderr, flush=True)


def _run(
    heading: results.Heading,
    engine: str,
    rows: Sequence[results.Row],
    facts: Mapping[str, object],
) -> results.Run:
    ranks = results.RankCount.exactly(heading.size, results.RankSource.GIVEN)
    facts = {**facts, "words": list(heading.options.words)}
    test = heading.options.test.name
    return results.Run(test, ranks, tuple(rows), engine=engine, facts=facts)


def _open_new(path: str) -> TextIO:
    """Create a file: ``path``, or the first free one of ``path.0``, ``path.1``, ..."""
    name, number = path, 0
    while True:
        try:
            return Path(name).open("x", encoding="utf-8")
        except FileExistsError:
            name, number = f"{path}.{number}", number + 1
        except OSError as error:
            raise UsageError(
                f"cannot write the -J file {path}: {error.strerror}."
            ) from None
