"""Samples of a profile in the formats of flame graph viewers."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ronde.monitor.inspection import StackFrame
from ronde.monitor.samples import Profile, SampleWindow
from ronde.units import grouped

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write_collapsed(profile: Profile, path: Path) -> None:
    """Write a line ``rank 0;main (train.py:9);f (a.py:3) 41`` for each stack.

    The number counts samples. ``flamegraph.pl``, speedscope and others read it.
    """
    counts: Counter[str] = Counter()
    for name, window in _by_rank(profile):
        for index, count in window.runs:
            stack = [window.frames[i] for i in reversed(window.stacks[index])]
            counts[";".join([name, *map(_collapse, stack)])] += count
    path.write_text("".join(f"{stack} {n}\n" for stack, n in sorted(counts.items())))


def write_speedscope(profile: Profile, path: Path) -> None:
    """Write a file for https://www.speedscope.app, with one profile for each rank."""
    frames: dict[StackFrame, int] = {}
    plain = {
        "$schema": _SCHEMA,
        "name": " ".join(profile.status.job.command),
        "exporter": "ronde profile",
        "profiles": [
            _rank_profile(name, windows, frames)
            for name, windows in grouped(_by_rank(profile)).items()
        ],
        "shared": {
            "frames": [
                {"name": frame.function, "file": frame.file, "line": frame.line}
                for frame in frames
            ]
        },
    }
    path.write_text(json.dumps(plain))


def _rank_profile(
    name: str, windows: list[SampleWindow], frames: dict[StackFrame, int]
) -> dict[str, object]:
    samples: list[list[int]] = []
    weights: list[float] = []
    for window in windows:
        own = [frames.setdefault(frame, len(frames)) for frame in window.frames]
        num = sum(count for _, count in window.runs) or 1
        each_s = max(0.0, window.ended_at - window.begun_at) / num
        for index, count in window.runs:
            samples.append([own[i] for i in reversed(window.stacks[index])])
            weights.append(count * each_s)
    return {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _by_rank(profile: Profile) -> Iterator[tuple[str, SampleWindow]]:
    ranks = {row.worker: row.rank for row in profile.status.workers}
    for window in sorted(
        profile.windows, key=lambda each: (each.worker, each.begun_at)
    ):
        rank = ranks.get(window.worker)
        yield f"worker {window.worker}" if rank is None else f"rank {rank}", window


def _collapse(frame: StackFrame) -> str:
    text = f"{frame.function} ({frame.file}:{frame.line})"
    return " ".join(text.replace(";", ":").split())
