"""How a job ended, and where its ranks are, as text."""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.launch.failure import JobResult, LostHost, RankEnd, signal_name
from ronde.launch.messages import ProcessStack
from ronde.launch.output.files import attempt_dir
from ronde.launch.output.sink import Generation, RankStacks
from ronde.launch.signals import TIMED_OUT, interruption_code
from ronde.render.rank_ranges import format_places, format_ranks

_WIDTH = 78
_MAX_FRAMES = 30
_MAX_PIDS = 4
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_BELOW_ALL = re.compile(r"threading\.py\", line [0-9]+ in _bootstrap(_inner)?$")
"""Where every thread begins."""
_Frames = tuple[str, ...]
_LABEL_WIDTH = 16
_MAX_QUOTED_LINES = 30
_MAX_QUOTED_HEAD = 8
_MAX_LINE = 400
_MAX_GROUPS = 5


class _Where(NamedTuple):
    """What is alike in processes that are at the same place."""

    name: str
    state: str
    threads: tuple[_Frames, ...]


def draw_stacks(taken: Sequence[RankStacks]) -> str:
    """Return the stacks of ranks in a frame; each place once, with who is there."""
    groups: dict[_Where, list[tuple[RankStacks, ProcessStack]]] = {}
    silent: list[RankStacks] = []
    for rank in sorted(taken):
        for process in rank.processes:
            groups.setdefault(_where(process), []).append((rank, process))
        if not rank.processes:
            silent.append(rank)
    body: list[str] = []
    for where, members in groups.items():
        body += [*_draw(where, members), ""]
    if silent:
        body += [f"{format_places([(r.rank, r.host) for r in silent])}: no answer", ""]
    title = "+-- ronde: where the ranks are, most recent call first "
    lines = [f"| {_printable(line)}".rstrip() for line in body[:-1]]
    return "\n".join([f"{title:-<{_WIDTH}}", *lines, f"{'+':-<{_WIDTH}}", ""])


def _where(process: ProcessStack) -> _Where:
    threads: list[list[str]] = []
    for line in process.text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and line.strip() and not _BELOW_ALL.search(line):
            threads[-1].append(line.strip())
    # The main thread is written last.
    frames = tuple(tuple(thread) for thread in reversed(threads))
    return _Where(process.name, process.state, frames)


def _draw(
    where: _Where, members: Sequence[tuple[RankStacks, ProcessStack]]
) -> Iterable[str]:
    places = format_places([(rank.rank, rank.host) for rank, _ in members])
    pids = [str(process.pid) for _, process in members]
    more = f" and {len(pids) - _MAX_PIDS} more" if len(pids) > _MAX_PIDS else ""
    label = "pid" if len(pids) == 1 else "pids"
    process = f"{where.name}, {label} {', '.join(pids[:_MAX_PIDS])}{more}"
    if not where.threads:
        yield f"{places} ({process}): {where.state}; no Python stack"
        return
    yield f"{places} ({process})"
    main, *others = where.threads
    yield from _frames(main)
    for frames in dict.fromkeys(others):
        count = others.count(frames)
        yield "  another thread" if count == 1 else f"  {count} other threads"
        yield from _frames(frames)


def _frames(frames: _Frames) -> Iterable[str]:
    yield from (f"    {frame}" for frame in frames[:_MAX_FRAMES])
    if len(frames) > _MAX_FRAMES:
        yield f"    [{len(frames) - _MAX_FRAMES} more]"


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)


def summarize(
    result: JobResult, generation: Generation | None = None, log_dir: str = ""
) -> str:
    """Return what to tell of a job's end; empty where all went well.

    Args:
        generation: Which start of the ranks it was; None where it does not matter.
        log_dir: Directory of all jobs' files, or empty.
    """
    cause = result.cause
    if cause is None:
        return _interrupted(result)
    body = _blame(cause)
    facts = [*_failures(result, cause), *_consequences(result)]
    if generation is not None and log_dir:
        facts.append(("logs", attempt_dir(log_dir, generation)))
    if facts:
        body += [
            "",
            *(f"{f'{label}:':<{_LABEL_WIDTH}} {fact}" for label, fact in facts),
        ]
    lines = [f"| {line}".rstrip() for line in body]
    title = f"+-- ronde: {_title(result, generation)} "
    return "\n".join([f"{title:-<{_WIDTH}}", *lines, f"{'+':-<{_WIDTH}}", ""])


def describe_status(status: int) -> str:
    """Say how a process ended: ``exit code 3``, ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def _interrupted(result: JobResult) -> str:
    if result.interrupted_by == signal.SIGPIPE:
        lines = ["nobody reads the output any more, so the job was ended"]
    elif result.interrupted_by is not None:
        lines = [_interruption(result.interrupted_by)]
    else:
        return ""
    lines += [f"{label}: {fact}" for label, fact in _consequences(result)]
    return "".join(f"ronde: {line}\n" for line in lines)


def _interruption(number: int) -> str:
    if number == TIMED_OUT:
        return f"--timeout ended the job, exit code {interruption_code(number)}"
    return f"the job was ended by {signal_name(number)}"


def _title(result: JobResult, generation: Generation | None) -> str:
    attempt = ""
    if generation is not None and generation.epoch > 0:
        attempt = f" at start {generation.epoch + 1}"
    if result.interrupted_by is not None:
        return f"{_interruption(result.interrupted_by)}{attempt}"
    return f"the job failed{attempt}, exit code {result.exit_code}"


def _blame(cause: RankEnd | LostHost) -> list[str]:
    """Say what failed first, and quote it."""
    if isinstance(cause, LostHost):
        return [
            f"{cause.host} was lost first, after {cause.at_s:.1f} s: {cause.reason}",
            f"it had {_ranks(cause.ranks)}",
        ]
    head = (
        f"rank {cause.rank} failed first, after {cause.at_s:.1f} s: "
        f"{describe_status(cause.status)} (pid {cause.pid} on {cause.host})"
    )
    said = _quoted(cause)
    if cause.was_stopped and not cause.is_crash:
        head += ", before it had ended by itself"
    return [
        head,
        *([cause.evidence] if cause.evidence else []),
        *(["", *(f"    {line}" for line in said)] if said else []),
        *([] if said else ["it wrote nothing to stderr"]),
    ]


def _quoted(end: RankEnd) -> list[str]:
    """Return the exception that ended a rank, else the last that it said."""
    # One that a signal ended may have survived the exception that it told of.
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
) -> Iterable[tuple[str, str]]:
    """Name what failed by itself besides the cause, the alike together."""
    for lost in result.also_lost:
        yield "lost too", f"{lost.host} ({_ranks(lost.ranks)}): {lost.reason}"
    groups: dict[tuple[int, str], list[RankEnd]] = {}
    for end in result.also_failed:
        if not end.is_secondary:
            groups.setdefault((end.status, _last_word(end)), []).append(end)
    if isinstance(cause, RankEnd):
        same = groups.pop((cause.status, _last_word(cause)), [])
        if same:
            yield "failed alike", _places(same)
    yield from _told("failed too", {_fate(*key): ends for key, ends in groups.items()})


def _fate(status: int, said: str) -> str:
    return describe_status(status) + (f": {said[:_WIDTH]}" if said else "")


def _told(label: str, fates: dict[str, list[RankEnd]]) -> Iterable[tuple[str, str]]:
    """Name ranks by their fates; the rarest of many fates are not told."""
    by_size = sorted(fates.items(), key=lambda fate: -len(fate[1]))
    for fate, ends in by_size[:_MAX_GROUPS]:
        yield label, f"{_places(ends)}, {fate}"
    others = [end for _, ends in by_size[_MAX_GROUPS:] for end in ends]
    if others:
        yield label, f"{_places(others)}, in other ways"


def _last_word(end: RankEnd) -> str:
    said = _quoted(end)
    return said[-1].strip() if said else ""


def _consequences(result: JobResult) -> Iterable[tuple[str, str]]:
    hearsay = [end for end in result.also_failed if end.is_secondary]
    if hearsay:
        yield "lost their peer", _places(hearsay)
    fates: dict[str, list[RankEnd]] = {}
    for end in result.ended:
        fates.setdefault(describe_status(end.status), []).append(end)
    yield from _told("ended then", fates)


def _places(ends: Sequence[RankEnd]) -> str:
    return format_places([(end.rank, end.host) for end in ends])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
