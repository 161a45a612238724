"""Why a job failed, on one screen."""

import signal
from collections.abc import Iterable, Sequence

from ronde.launch.logs import attempt_dir
from ronde.launch.signals import TIMED_OUT, interruption_code
from ronde.launch.sink import Generation
from ronde.launch.verdict import LostHost, RankEnd, Verdict, signal_name
from ronde.render.rank_ranges import format_places, format_ranks

_WIDTH = 78
_LABEL_WIDTH = 16
_MAX_QUOTED_LINES = 30
_MAX_QUOTED_HEAD = 8
_MAX_LINE = 400
_MAX_GROUPS = 5


def summarize(
    verdict: Verdict, generation: Generation | None = None, log_dir: str = ""
) -> str:
    """Return what to tell of a job's end; empty where all went well.

    Args:
        verdict: How it ended.
        generation: Which start of the ranks it was; None where it does not matter.
        log_dir: Directory of all jobs' files, or empty.
    """
    cause = verdict.cause
    if cause is None:
        return _interrupted(verdict)
    body = _blame(cause)
    facts = [*_failures(verdict, cause), *_consequences(verdict)]
    if generation is not None and log_dir:
        facts.append(("logs", attempt_dir(log_dir, generation)))
    if facts:
        body += [
            "",
            *(f"{f'{label}:':<{_LABEL_WIDTH}} {fact}" for label, fact in facts),
        ]
    lines = [f"| {line}".rstrip() for line in body]
    title = f"+-- ronde: {_title(verdict, generation)} "
    return "\n".join([f"{title:-<{_WIDTH}}", *lines, f"{'+':-<{_WIDTH}}", ""])


def describe_status(status: int) -> str:
    """Say how a process ended: ``exit code 3``, ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def _interrupted(verdict: Verdict) -> str:
    if verdict.interrupted_by == signal.SIGPIPE:
        lines = ["nobody reads the output any more, so the job was ended"]
    elif verdict.interrupted_by is not None:
        lines = [_interruption(verdict.interrupted_by)]
    else:
        return ""
    lines += [f"{label}: {fact}" for label, fact in _consequences(verdict)]
    return "".join(f"ronde: {line}\n" for line in lines)


def _interruption(number: int) -> str:
    if number == TIMED_OUT:
        return f"--timeout ended the job, exit code {interruption_code(number)}"
    return f"the job was ended by {signal_name(number)}"


def _title(verdict: Verdict, generation: Generation | None) -> str:
    attempt = ""
    if generation is not None and generation.epoch > 0:
        attempt = f" at start {generation.epoch + 1}"
    if verdict.interrupted_by is not None:
        return f"{_interruption(verdict.interrupted_by)}{attempt}"
    return f"the job failed{attempt}, exit code {verdict.exit_code}"


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


def _failures(verdict: Verdict, cause: RankEnd | LostHost) -> Iterable[tuple[str, str]]:
    """Name what failed by itself besides the cause, the alike together."""
    for lost in verdict.also_lost:
        yield "lost too", f"{lost.host} ({_ranks(lost.ranks)}): {lost.reason}"
    groups: dict[tuple[int, str], list[RankEnd]] = {}
    for end in verdict.also_failed:
        if not end.is_hearsay:
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


def _consequences(verdict: Verdict) -> Iterable[tuple[str, str]]:
    hearsay = [end for end in verdict.also_failed if end.is_hearsay]
    if hearsay:
        yield "lost their peer", _places(hearsay)
    fates: dict[str, list[RankEnd]] = {}
    for end in verdict.ended:
        fates.setdefault(describe_status(end.status), []).append(end)
    yield from _told("ended then", fates)


def _places(ends: Sequence[RankEnd]) -> str:
    return format_places([(end.rank, end.host) for end in ends])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
