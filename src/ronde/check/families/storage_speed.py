"""How fast a folder takes what a host writes."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import Value
from ronde.check.families.host_judges import find_few, tell_usual
from ronde.check.fleet import Fleet

SPEED = "storage.speed"
"""Fact: by path, ``mb_per_s`` (1e6 bytes) and ``files_per_s``.

Or ``error``, why they are not known, with ``has_hung`` where time was up.
"""

LEFT = "storage.speed_left"
"""Fact: folders that were made for it and may still be there."""

NUM_BYTES = 64 << 20
NUM_FILES = 1000
DEADLINE_S = 30.0

SLOW_SHARE = 0.5
"""Below this share of what most hosts have, a host is slow."""

LEAST_MB_PER_S = 30.0
LEAST_FILES_PER_S = 50.0


class _Measure(NamedTuple):
    """One of the two speeds: its check, its name in the fact, and its floor."""

    check: str
    name: str
    least: float
    show: Callable[[float], str]


_WRITING = _Measure(
    "storage-speed",
    "mb_per_s",
    LEAST_MB_PER_S,
    "{:.3g} MB/s".format,
)
_SMALL_FILES = _Measure(
    "storage-metadata",
    "files_per_s",
    LEAST_FILES_PER_S,
    "{:.3g} small files/s".format,
)


def find_slow(measured: Mapping[str, Mapping[str, Value]]) -> set[str]:
    """Return the hosts of whose folder the one or the other speed is to be complained.

    Args:
        measured: By the host's name, what ``SPEED`` has of one path.
    """
    return {
        host
        for measure in (_WRITING, _SMALL_FILES)
        for host in _complaints(measure, measured)
    }


def _complaints(
    measure: _Measure, measured: Mapping[str, Mapping[str, Value]]
) -> dict[str, str]:
    """Return what others have, by the name of each slow host; empty below the floor."""
    speeds: dict[str, float] = {
        host: told[measure.name]
        for host, told in measured.items()
        if measure.name in told
    }
    few = find_few(speeds, SLOW_SHARE)
    found = {host: "" for host, speed in speeds.items() if speed < measure.least}
    return found | {h: tell_usual(h, speeds, few, measure.show) for h in few.hosts}


def _judge(measure: _Measure) -> Callable[[Fleet], Iterator[Finding]]:
    def judge(fleet: Fleet) -> Iterator[Finding]:
        for path, measured in _by_path(fleet).items():
            for host, usual in _complaints(measure, measured).items():
                what = f"{path} takes {measure.show(measured[host][measure.name])}"
                yield Finding(measure.check, Severity.WARN, host, what, usual)

    return judge


def _judge_writing(fleet: Fleet) -> Iterator[Finding]:
    name = _WRITING.check
    for path, measured in _by_path(fleet).items():
        for host, told in measured.items():
            if told.get("has_hung"):
                done = f"{NUM_BYTES >> 20}MiB and {NUM_FILES} small files"
                what = f"{path} does not take {done} within {DEADLINE_S:g} s"
                yield Finding(name, Severity.FAIL, host, what)
            elif "error" in told:
                what = f"{path} was not measured: {told['error']}"
                yield Finding(name, Severity.INFORM, host, what)
    yield from _judge(_WRITING)(fleet)
    for facts in fleet.having(LEFT):
        folders = " ".join(facts.values[LEFT])
        what = f"what was written to it may still be there: {folders}"
        fix = f"rm -r {folders}"
        yield Finding(name, Severity.WARN, facts.host, what, fix=fix)


def _by_path(fleet: Fleet) -> dict[str, dict[str, Mapping[str, Value]]]:
    by_path: dict[str, dict[str, Mapping[str, Value]]] = {}
    for facts in fleet.having(SPEED):
        for path, told in facts.values[SPEED].items():
            by_path.setdefault(path, {})[facts.host] = told
    return by_path


_NEEDS = "--storage-speed, --path, and leave to write there"

CHECKS = (
    Check(
        id=_WRITING.check,
        family=Family.STORAGE,
        title="what is written to a folder gets to disk soon",
        reads="64MiB of random bytes, written into each --path as one file and "
        "flushed; hosts that share the folder write one after the other, so that none "
        "slows another down; who is slow is measured twice, and the better counts",
        threshold="half of what most hosts have, and 30 MB/s; a failure if 64MiB and "
        "1000 small files take more than 30 s",
        source="ronde's own: a single hard disk writes 100 to 200 MB/s, 1 Gbit/s "
        "Ethernet carries 118 MB/s; at 30 MB/s a checkpoint of 10GiB takes 6 minutes",
        severity=Severity.FAIL,
        fix="compare findmnt -T FOLDER with a host that is fast; nfsiostat 1 for NFS, "
        "iostat -x 1 for a disk; write checkpoints to a local disk first",
        needs=_NEEDS,
        why="All ranks wait while a checkpoint is written.",
        facts=(SPEED,),
        judge=_judge_writing,
    ),
    Check(
        id=_SMALL_FILES.check,
        family=Family.STORAGE,
        title="a folder makes and removes small files soon",
        reads="1000 files of 4KiB that are made in each --path and removed, as far as "
        "5 s suffice for making them; as for storage-speed",
        threshold="half of what most hosts have, and 50 a second",
        source="ronde's own: an environment with torch has some 20,000 files, which "
        "take 7 minutes at 50 a second",
        severity=Severity.WARN,
        fix="pack small files into large ones, or unpack them on a local disk; compare "
        "findmnt -T FOLDER with a host that is fast",
        needs=_NEEDS,
        why="Data sets of small files are read at that pace, and Python starts at it.",
        facts=(SPEED,),
        judge=_judge(_SMALL_FILES),
    ),
)
