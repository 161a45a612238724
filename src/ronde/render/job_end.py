"""How a job ended, which hosts cannot take part, and where ranks are, as text."""

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ronde.errors import HostFailure
from ronde.launch.failure import JobResult, LostHost, RankEnd, signal_name
from ronde.launch.messages import ProcessStack
from ronde.launch.output.files import Generation, RankStacks, attempt_dir
from ronde.launch.signals import TIMED_OUT, interruption_code
from ronde.render.ranks import format_places, format_ranks
from ronde.render.text import align, grouped, list_first

_WIDTH = 78
_MAX_FRAMES = 30
_MAX_PIDS = 4
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_BELOW_ALL = re.compile(r"threading\.py\", line [0-9]+ in _bootstrap(_inner)?$")
"""Where every thread begins."""
_LABEL_WIDTH = 16
_MAX_QUOTED_LINES = 30
_MAX_QUOTED_HEAD = 8
_MAX_LINE = 400
_MAX_GROUPS = 5
_MAX_NAMES = 8
_MAX_COLUMN_CHARS = 60

_Frames = tuple[str, ...]
_Place = tuple[str, str, tuple[_Frames, ...]]
"""A process's name, its state and its threads, the main thread's first."""


def tabulate_failures(
    failures: Sequence[HostFailure], ready: Sequence[str] = ()
) -> str:
    by_row = grouped(((e.failure.reason, e.failure.cure), e.host) for e in failures)
    rows = [("host", "what is wrong", "what to do")]
    rows += [(list_first(hosts, _MAX_NAMES), *row) for row, hosts in by_row.items()]
    text = align(rows, most=_MAX_COLUMN_CHARS)
    if ready:
        text += f"ready: {list_first(ready, _MAX_NAMES)}\n"
    return "".join(f"ronde:   {line}\n" for line in text.splitlines())


def draw_stacks(taken: Sequence[RankStacks]) -> str:
    """Return the stacks of ranks in a frame; each place once, with who is there."""
    ranks = sorted(taken)
    groups = grouped((_place(p), (rank, p)) for rank in ranks for p in rank.processes)
    body: list[str] = []
    for place, members in groups.items():
        body += [*_draw_place(place, members), ""]
    if silent := [(rank.rank, rank.host) for rank in ranks if not rank.processes]:
        body += [f"{format_places(silent)}: no answer", ""]
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in body[:-1]]
    return _frame("where the ranks are, most recent call first", lines)


def _frame(title: str, lines: Iterable[str]) -> str:
    head = f"+-- ronde: {title} "
    body = [f"| {line}".rstrip() for line in lines]
    return "\n".join([f"{head:-<{_WIDTH}}", *body, f"{'+':-<{_WIDTH}}", ""])


def _place(process: ProcessStack) -> _Place:
    threads: list[list[str]] = []
    for line in process.text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and line.strip() and not _BELOW_ALL.search(line):
            threads[-1].append(line.strip())
    # The main thread is written last.
    frames = tuple(tuple(thread) for thread in reversed(threads))
    return process.name, process.state, frames


def _draw_place(
    place: _Place, members: Sequence[tuple[RankStacks, ProcessStack]]
) -> Iterator[str]:
    name, state, threads = place
    places = format_places([(rank.rank, rank.host) for rank, _ in members])
    pids = [str(process.pid) for _, process in members]
    label = "pid" if len(pids) == 1 else "pids"
    process = f"{name}, {label} {list_first(pids, _MAX_PIDS)}"
    if not threads:
        yield f"{places} ({process}): {state}; no Python stack"
        return
    yield f"{places} ({process})"
    main, *others = threads
    for frames, count in [(main, 0), *Counter(others).items()]:
        if count:
            yield "  another thread" if count == 1 else f"  {count} other threads"
        yield from (f"    {frame}" for frame in frames[:_MAX_FRAMES])
        if len(frames) > _MAX_FRAMES:
            yield f"    [{len(frames) - _MAX_FRAMES} more]"


def summarize(
    result: JobResult, generation: Generation | None = None, log_dir: str = ""
) -> str:
    """Return how a job ended and why; empty where all went well."""
    cause = result.cause
    if cause is None:
        return _interrupted(result)
    body = _draw_cause(cause)
    facts = [*_failures(result, cause), *_consequences(result)]
    if generation is not None and log_dir:
        facts.append(("logs", attempt_dir(log_dir, generation)))
    if facts:
        body.append("")
        body += [f"{f'{label}:':<{_LABEL_WIDTH}} {fact}" for label, fact in facts]
    epoch = 0 if generation is None else generation.epoch
    attempt = f" at start {epoch + 1}" if epoch else ""
    title = f"the job failed{attempt}, exit code {result.exit_code}"
    if result.interrupted_by is not None:
        title = f"{_interruption(result.interrupted_by)}{attempt}"
    return _frame(title, body)


def describe_status(status: int) -> str:
    """Return how a process ended: ``exit code 3``, ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def _interrupted(result: JobResult) -> str:
    if result.interrupted_by is None:
        return ""
    if result.interrupted_by == signal.SIGPIPE:
        lines = ["nobody reads the output any more, so the job was ended"]
    else:
        lines = [_interruption(result.interrupted_by)]
    lines += [f"{label}: {fact}" for label, fact in _consequences(result)]
    return "".join(f"ronde: {line}\n" for line in lines)


def _interruption(number: int) -> str:
    if number == TIMED_OUT:
        return f"--timeout ended the job, exit code {interruption_code(number)}"
    return f"the job was ended by {signal_name(number)}"


def _draw_cause(cause: RankEnd | LostHost) -> list[str]:
    if isinstance(cause, LostHost):
        return [
            f"{cause.host} was lost first, after {cause.at_s:.1f} s: {cause.reason}",
            f"it had {_ranks(cause.ranks)}",
        ]
    head = (
        f"rank {cause.rank} failed first, after {cause.at_s:.1f} s: "
        f"{describe_status(cause.status)} (pid {cause.pid} on {cause.host})"
    )
    if cause.was_stopped and not cause.is_crash:
        head += ", before it had ended by itself"
    lines = [head, cause.evidence] if cause.evidence else [head]
    if quoted := _quoted(cause):
        return [*lines, "", *(f"    {line}" for line in quoted)]
    return [*lines, "it wrote nothing to stderr"]


def _quoted(end: RankEnd) -> list[str]:
    """Return the exception that ended a rank, else its last lines on stderr."""
    # A rank that a signal ended may have survived the exception that it printed.
    is_raised = end.traceback and (
        end.status > 0 or end.status == -signal.SIGABRT or end.was_leaving
    )
    lines = end.traceback.split("\n") if is_raised else list(end.stderr_tail)
    num_left_out = len(lines) - _MAX_QUOTED_LINES
    if num_left_out > 0:
        gap = f"[{num_left_out} lines]"
        lines[_MAX_QUOTED_HEAD : _MAX_QUOTED_HEAD + num_left_out] = [gap]
    return [
        line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..." for line in lines
    ]


def _failures(
    result: JobResult, cause: RankEnd | LostHost
) -> Iterator[tuple[str, str]]:
    """Yield what failed by itself besides the cause, equal failures together."""
    for lost in result.also_lost:
        yield "lost too", f"{lost.host} ({_ranks(lost.ranks)}): {lost.reason}"
    groups = grouped((_fate(e), e) for e in result.also_failed if not e.is_secondary)
    if isinstance(cause, RankEnd) and (same := groups.pop(_fate(cause), [])):
        yield "failed alike", _places(same)
    yield from _by_fate("failed too", groups)


def _fate(end: RankEnd) -> str:
    quoted = _quoted(end)
    last = quoted[-1].strip()[:_WIDTH] if quoted else ""
    return describe_status(end.status) + (f": {last}" if last else "")


def _by_fate(label: str, fates: dict[str, list[RankEnd]]) -> Iterator[tuple[str, str]]:
    """Yield ranks by how they ended; the rarest of many ways are only counted."""
    by_size = sorted(fates.items(), key=lambda fate: -len(fate[1]))
    for fate, ends in by_size[:_MAX_GROUPS]:
        yield label, f"{_places(ends)}, {fate}"
    others = [end for _, ends in by_size[_MAX_GROUPS:] for end in ends]
    if others:
        yield label, f"{_places(others)}, in other ways"


def _consequences(result: JobResult) -> Iterator[tuple[str, str]]:
    if secondary := [end for end in result.also_failed if end.is_secondary]:
        yield "lost their peer", _places(secondary)
    fates = grouped((describe_status(end.status), end) for end in result.ended)
    yield from _by_fate("ended then", fates)


def _places(ends: Sequence[RankEnd]) -> str:
    return format_places([(end.rank, end.host) for end in ends])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
