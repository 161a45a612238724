"""Where the ranks of a job are, the alike together."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.launch.messages import ProcessStack
from ronde.launch.sink import RankStacks
from ronde.render.rank_ranges import format_places

_WIDTH = 78
_MAX_FRAMES = 30
_MAX_PIDS = 4
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_BELOW_ALL = re.compile(r"threading\.py\", line [0-9]+ in _bootstrap(_inner)?$")
"""Where every thread begins."""

_Frames = tuple[str, ...]


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
