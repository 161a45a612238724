"""A job as text: its plan, its end, unfit hosts, and stacks of its ranks."""

import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ronde.errors import HostFailure
from ronde.launch.environments import redacted
from ronde.launch.job.failure import JobResult, LostHost, RankEnd, signal_name
from ronde.launch.job.output import NO_ATTEMPT, Attempt, attempt_dir
from ronde.launch.job.plan import JobPlan
from ronde.launch.signals import OUTPUT_FULL, TIMED_OUT, interruption_code
from ronde.launch.wire.messages import ProcessStack, Stacks
from ronde.render.text import (
    align,
    format_ranks_on_hosts,
    format_runs,
    name_ranks,
    wrap,
)
from ronde.topology.cpu_sets import format_list
from ronde.topology.machine import UNKNOWN_NODE, RankResources
from ronde.units import counted, grouped, list_first, name_rank

_TITLES = ("host", "rank", "local", "device", "cores", "CPUs", "memory", "NIC", "why")
_UNSET = "(unset)"


def plan_text(plan: JobPlan) -> str:
    """Return a plan without secrets; equal hosts and ranks share a line."""
    shared, own = _environments(plan)
    size = f"{counted(len(plan.hosts), 'rank')} on {counted(len(plan.shares), 'host')}"
    lines = [
        f"{size}, meeting at {plan.address}: {shlex.join(plan.spec.argv)}",
        "",
        align([_TITLES, *_rows(plan)]),
        *(f"note: {notice}" for notice in plan.notices),
        *([""] if plan.notices else []),
        "variables of all ranks, in addition to each host's own:",
        *(
            f"  {name}={shlex.quote(value) if value.isprintable() else repr(value)}"
            for name, value in shared.items()
        ),
        "",
        "variables of each rank, by rank:",
        *(f"  {name}: {value}" for name, value in own.items()),
        "",
        "Nothing was started.",
    ]
    return "\n".join(lines) + "\n"


def _rows(plan: JobPlan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for resources, alike in groupby(plan.shares, key=lambda share: share.resources):
        first, *others = alike
        start, local = first.ranks.start, 0
        for each, same in groupby(resources):
            num = len(list(same))
            spans = [_span(range(at, at + num)) for at in (start + local, local)]
            rows.append((first.host.name, *spans, *_cells(each)))
            local += num
        if others:
            names = format_runs([share.host.name for share in others])
            ranks = range(others[0].ranks.start, others[-1].ranks.stop)
            rows.append((names, _span(ranks), f"as on {first.host.name}"))
    return rows


def _cells(resources: RankResources) -> tuple[str, ...]:
    node = resources.memory_node
    return (
        resources.device or "-",
        str(resources.num_cores),
        format_list(resources.cpus) or "all",
        "-" if node == UNKNOWN_NODE else str(node),
        resources.nic or "-",
        resources.why,
    )


def _span(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _environments(plan: JobPlan) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables equal on all ranks, and a line for each other variable."""
    ranks = [job.env | rank.env for job in plan.jobs(0) for rank in job.workers]
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    for name in sorted({name for env in ranks for name in env}):
        values = [env.get(name, _UNSET) for env in ranks]
        # Thousands of ranks may share a value: redact each value once.
        shown = {value: redacted({name: value})[name] for value in set(values)}
        if len(shown) == 1:
            shared[name] = shown[values[0]]
        else:
            own[name] = format_runs([shown[value] for value in values])
    return shared, own


_WIDTH = 78
_MAX_FRAMES = 30
_MAX_PIDS = 4
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_BELOW_ALL = re.compile(r"threading\.py\", line [0-9]+ in _bootstrap(_inner)?$")
"""The frames at the bottom of every thread."""
_LABEL_WIDTH = 16
_MAX_QUOTED_LINES = 30
_MAX_QUOTED_HEAD = 8
_MAX_LINE = 400
_MAX_GROUPS = 5
_MAX_NAMES = 8
_MAX_COLUMN_CHARS = 60

_Frames = tuple[str, ...]
_Stack = tuple[str, str, tuple[_Frames, ...]]
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


def draw_stacks(taken: Sequence[Stacks], hosts: Sequence[str]) -> str:
    """Draw ranks' stacks in a box; ranks with equal stacks are listed together."""
    ranks = sorted(taken)
    groups = grouped((_stack(p), (n, p)) for n, processes in ranks for p in processes)
    body: list[str] = []
    for stack, members in groups.items():
        body += [*_draw_stack(stack, members, hosts), ""]
    if silent := [(n, hosts[n]) for n, processes in ranks if not processes]:
        body += [f"{format_ranks_on_hosts(silent)}: no answer", ""]
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in body[:-1]]
    return _frame("where the ranks are, most recent call first", lines)


def _frame(title: str, lines: Iterable[str]) -> str:
    head = f"+-- ronde: {title} "
    body = [f"| {line}".rstrip() for line in lines]
    return "\n".join([f"{head:-<{_WIDTH}}", *body, f"{'+':-<{_WIDTH}}", ""])


def _stack(process: ProcessStack) -> _Stack:
    threads: list[list[str]] = []
    for line in process.text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and line.strip() and not _BELOW_ALL.search(line):
            threads[-1].append(line.strip())
    # The main thread is written last.
    frames = tuple(tuple(thread) for thread in reversed(threads))
    return process.name, process.state, frames


def _draw_stack(
    stack: _Stack, members: Sequence[tuple[int, ProcessStack]], hosts: Sequence[str]
) -> Iterator[str]:
    name, state, threads = stack
    ranks = format_ranks_on_hosts([(rank, hosts[rank]) for rank, _ in members])
    pids = [str(process.pid) for _, process in members]
    label = "pid" if len(pids) == 1 else "pids"
    process = f"{name}, {label} {list_first(pids, _MAX_PIDS)}"
    if not threads:
        yield f"{ranks} ({process}): {state}; no Python stack"
        return
    yield f"{ranks} ({process})"
    main, *others = threads
    for frames, count in [(main, 0), *Counter(others).items()]:
        if count:
            yield "  another thread" if count == 1 else f"  {count} other threads"
        yield from (f"    {frame}" for frame in frames[:_MAX_FRAMES])
        if len(frames) > _MAX_FRAMES:
            yield f"    [{len(frames) - _MAX_FRAMES} more]"


def summarize(
    result: JobResult, attempt: Attempt = NO_ATTEMPT, log_dir: str = ""
) -> str:
    """Return the report of a job's end; empty if it succeeded."""
    cause = result.cause
    if result.hang:
        body = wrap("", result.hang, _WIDTH, indent=0).splitlines()
        facts = [*_consequences(result)]
    elif cause is None:
        return _interrupted(result)
    else:
        body = _draw_cause(cause)
        facts = [*_failures(result, cause), *_consequences(result)]
    if attempt.job_id and log_dir:
        facts.append(("logs", attempt_dir(log_dir, attempt)))
    if facts:
        body.append("")
        body += [f"{f'{label}:':<{_LABEL_WIDTH}} {fact}" for label, fact in facts]
    start = f" at start {attempt.epoch + 1}" if attempt.epoch else ""
    title = f"the job failed{start}, exit code {result.exit_code}"
    if result.hang:
        title = f"--hang-timeout ended the job{start}, exit code {result.exit_code}"
    elif result.interrupted_by is not None:
        title = f"{_interruption(result.interrupted_by)}{start}"
    return _frame(title, body)


def describe_status(status: int) -> str:
    """Describe an exit status: ``exit code 3`` or ``killed by SIGSEGV``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal_name(-status)}"


def _interrupted(result: JobResult) -> str:
    if result.interrupted_by is None:
        return ""
    lines = [_interruption(result.interrupted_by)]
    lines += [f"{label}: {fact}" for label, fact in _consequences(result)]
    return "".join(f"ronde: {line}\n" for line in lines)


def _interruption(number: int) -> str:
    if number == signal.SIGPIPE:
        return "the reader of the output has gone, so the job was ended"
    if number == OUTPUT_FULL:
        return "standard output cannot be written (disk full), so the job was ended"
    if number == TIMED_OUT:
        return f"--timeout ended the job, exit code {interruption_code(number)}"
    return f"the job was ended by {signal_name(number)}"


def _draw_cause(cause: RankEnd | LostHost) -> list[str]:
    if isinstance(cause, LostHost):
        return [
            f"{cause.host} was lost first, after {cause.at_s:.1f} s: {cause.reason}",
            f"it had {name_ranks(cause.ranks)}",
        ]
    how = "failed" if cause.status else "left"
    head = (
        f"{name_rank(cause.rank, cause.worker)} {how} first, after {cause.at_s:.1f} s: "
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
    # A rank that a signal ended may have caught the exception that it printed.
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
    """Yield the other independent failures; equal failures share a line."""
    for lost in result.also_lost:
        yield "lost too", f"{lost.host} ({name_ranks(lost.ranks)}): {lost.reason}"
    groups = grouped((_fate(e), e) for e in result.also_failed if not e.is_secondary)
    if isinstance(cause, RankEnd) and (same := groups.pop(_fate(cause), [])):
        yield "failed alike", _ranks(same)
    yield from _by_fate("failed too", groups)


def _fate(end: RankEnd) -> str:
    quoted = _quoted(end)
    last = quoted[-1].strip()[:_WIDTH] if quoted else ""
    return describe_status(end.status) + (f": {last}" if last else "")


def _by_fate(label: str, fates: dict[str, list[RankEnd]]) -> Iterator[tuple[str, str]]:
    """Yield a line for each of the most common exit reasons, and one for the rest."""
    by_size = sorted(fates.items(), key=lambda fate: -len(fate[1]))
    for fate, ends in by_size[:_MAX_GROUPS]:
        yield label, f"{_ranks(ends)}, {fate}"
    others = [end for _, ends in by_size[_MAX_GROUPS:] for end in ends]
    if others:
        yield label, f"{_ranks(others)}, in other ways"


def _consequences(result: JobResult) -> Iterator[tuple[str, str]]:
    if secondary := [end for end in result.also_failed if end.is_secondary]:
        yield "lost their peer", _ranks(secondary)
    fates = grouped((describe_status(end.status), end) for end in result.ended)
    yield from _by_fate("ended then", fates)


def _ranks(ends: Sequence[RankEnd]) -> str:
    return format_ranks_on_hosts([(end.rank, end.host) for end in ends])
