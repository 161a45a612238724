"""``ronde bench --compare``: the same rows on several engines."""

from pathlib import Path

from ronde.bench.comparison import Ratios
from ronde.bench.measured import Heading, Reason, Remark
from ronde.bench.options import Exit
from ronde.bench.results import RankCount, RankSource, Row, Run, to_record
from ronde.bench.session import BenchSession
from ronde.bench.sweeps import EngineComparison
from ronde.cli.bench_stop import Stop
from ronde.cli.bench_teller import plot
from ronde.records import append_record
from ronde.render.bench_contest import compared_line, summary_lines, title_lines
from ronde.render.bench_text import facts_lines


def run_contest(session: BenchSession, stop: Stop) -> int:
    """Measure the engines in turn, tell on rank 0; return the exit code; collective.

    Raises:
        CollectiveError: A collective failed.
    """
    heading = session.heading()
    engines = list(session.benches)
    is_speaking = session.ranks.is_speaker
    ratios = Ratios()
    rows: dict[str, list[Row]] = {name: [] for name in engines}
    _say(is_speaking, [*facts_lines(heading), *title_lines(heading, engines)])
    contest = EngineComparison(
        session.benches, session.options, lambda: stop.is_asked
    ).run()
    reason = Reason.COMPLETE
    while True:
        try:
            event = next(contest)
        except StopIteration as end:
            reason = Reason(end.value)
            break
        if isinstance(event, Remark):
            _say(is_speaking, [f"# {event.text}"])
            continue
        ratios.add(event)
        for name, row in event.rows.items():
            rows[name].append(row)
        _say(is_speaking, [compared_line(event)])
    was_stopped = reason is Reason.STOPPED
    _say(is_speaking, summary_lines(ratios, "interrupted" if was_stopped else ""))
    if is_speaking:
        _keep(heading, rows, is_complete=reason is Reason.COMPLETE)
    if was_stopped:
        return Exit.INTERRUPTED
    return Exit.FAILED if any(ratios.num_wrong.values()) else Exit.OK


def _keep(heading: Heading, rows: dict[str, list[Row]], *, is_complete: bool) -> None:
    shown = heading.options.shown
    for name, each in rows.items():
        if shown.record_path:
            run = Run(
                test=heading.options.test.name,
                ranks=RankCount.exactly(heading.size, RankSource.GIVEN),
                rows=tuple(each),
                is_complete=is_complete,
                engine=name,
                facts={"words": list(heading.options.words)},
            )
            append_record(Path(shown.record_path), to_record(run))
    if shown.plot_path:
        plot(heading, rows)


def _say(is_speaking: bool, lines: list[str]) -> None:  # noqa: FBT001
    if is_speaking:
        print("\n".join(lines), flush=True)
