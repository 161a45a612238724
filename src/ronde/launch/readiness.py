"""Whether hosts are fit for ranks, as far as a look tells: cheap, and before the start.

``check_here`` looks at one host; ``judge`` compares all. What a host differs in from
most others is told first: on a cluster of equal hosts that is what is wrong.
"""

import os
import resource
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.addresses import is_loopback
from ronde.launch.finding import UNREADABLE, Finding
from ronde.launch.lineage import read_processes
from ronde.units import format_size

UNLIMITED = 1 << 62

CLOCK = "clock"
SHARED_MEMORY = "shared memory"
OPEN_FILES = "open files"
LOCKED_MEMORY = "locked memory"
DISK = "disk"
OWN_NAME = "own name"
LEFTOVERS = "leftovers"

MIN_SHARED_BYTES = 64 << 20
"""Room in /dev/shm with which ranks fail: what Docker gives if nothing is said."""

MIN_OPEN_FILES, FEW_OPEN_FILES = 256, 4096
"""With less ranks fail, or may."""

_LOOKUP_S = 1.0
_CLOCK_APART_MS = 2000
_COMPARED = (OPEN_FILES, LOCKED_MEMORY)
_LITTLE = {
    SHARED_MEMORY: (
        MIN_SHARED_BYTES + 1,
        1 << 30,
        "Enlarge /dev/shm: docker run --shm-size 8g",
    ),
    OPEN_FILES: (
        MIN_OPEN_FILES,
        FEW_OPEN_FILES,
        "Raise the hard limit of open files: ulimit -Hn",
    ),
    DISK: (1 << 24, 1 << 30, "Make room there"),
}
"""Below the first number a host is not fit, below the second it is worth a word."""


@dataclass(frozen=True, slots=True)
class Remark:
    """What is worth saying of a host.

    Attributes:
        host: Its name.
        text: What is unusual, in half a sentence.
        cure: What to do or type.
        is_bad: Whether ranks cannot run well there.
    """

    host: str
    text: str
    cure: str
    is_bad: bool


def check_here(directory: str) -> tuple[Finding, ...]:
    """Look at this host; takes a few milliseconds, and a second at most.

    Args:
        directory: Whose disk is to have room.
    """
    return (
        Finding(CLOCK, time.time_ns() // 1_000_000),
        _room(SHARED_MEMORY, "/dev/shm"),  # noqa: S108  it is looked at only
        Finding(OPEN_FILES, _hard_limit(resource.RLIMIT_NOFILE)),
        Finding(LOCKED_MEMORY, _hard_limit(resource.RLIMIT_MEMLOCK)),
        _room(DISK, directory),
        _look_up_own_name(),
        find_leftovers(),
    )


def judge(found: Mapping[str, Sequence[Finding]]) -> tuple[Remark, ...]:
    """Return what is unusual on which host, bad things first.

    Args:
        found: What ``check_here`` returned, by name of the host.
    """
    remarks: list[Remark] = []
    by_name: dict[str, dict[str, Finding]] = {}
    for host, findings in found.items():
        for finding in findings:
            by_name.setdefault(finding.name, {})[host] = finding
    for name, by_host in by_name.items():
        known = {h: f for h, f in by_host.items() if f.amount != UNREADABLE}
        remarks += _JUDGES[name](name, known)
    return tuple(sorted(remarks, key=lambda remark: not remark.is_bad))


def _hard_limit(number: int) -> int:
    limit = resource.getrlimit(number)[1]
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _room(name: str, path: str) -> Finding:
    try:
        room = os.statvfs(path)
    except OSError:
        return Finding(name, UNREADABLE, path)
    return Finding(name, room.f_bavail * room.f_frsize, path)


def _look_up_own_name() -> Finding:
    """Find out what this host's name leads to, without waiting for a dead server.

    The amount is the number of addresses that do not lead to the loopback.
    """
    name = socket.gethostname()
    found: list[str] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(name, None)
        except OSError:
            entries = []
        found.extend(str(entry[4][0]) for entry in entries)

    looking = threading.Thread(target=look_up, daemon=True)
    looking.start()
    looking.join(_LOOKUP_S)
    if looking.is_alive():
        return Finding(OWN_NAME, UNREADABLE, name)
    return Finding(OWN_NAME, sum(not is_loopback(a) for a in found), name)


def find_leftovers() -> Finding:
    """Find this user's processes of jobs whose agent is gone.

    The processes of a job that runs are all below its agent; others are below nobody.
    """
    processes = read_processes()
    lost = [
        process.pid
        for process in processes.values()
        if process.parent == 1 and not process.is_zombie and _has_cookie(process.pid)
    ]
    return Finding(LEFTOVERS, len(lost), " ".join(map(str, lost[:8])))


def _has_cookie(pid: int) -> bool:
    try:
        return b"\0RONDE_COOKIE=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _judge_clock(name: str, by_host: Mapping[str, Finding]) -> list[Remark]:
    if not by_host:
        return []
    middle = statistics.median(finding.amount for finding in by_host.values())
    return [
        Remark(
            host,
            f"its {name} is {(finding.amount - middle) / 1000:+.1f} s off",
            "Have it keep time: timedatectl set-ntp true",
            is_bad=False,
        )
        for host, finding in by_host.items()
        if abs(finding.amount - middle) > _CLOCK_APART_MS
    ]


def _judge_amount(name: str, by_host: Mapping[str, Finding]) -> list[Remark]:
    """Tell who has less than most have, and who has too little."""
    counts = Counter(finding.amount for finding in by_host.values())
    usual, num_usual = max(counts.items(), key=lambda each: each[1], default=(0, 0))
    is_usual = 2 * num_usual > len(by_host) and len(by_host) > 2
    too_little, little, cure = _LITTLE.get(
        name, (0, 0, "Give it the same as the others")
    )
    remarks: list[Remark] = []
    for host, finding in by_host.items():
        has_less = is_usual and finding.amount < usual and name in _COMPARED
        if not has_less and finding.amount >= little:
            continue
        than = f" where most hosts have {_shown(name, usual)}" if has_less else ""
        where = f" in {finding.detail}" if finding.detail else ""
        remarks.append(
            Remark(
                host,
                f"{_shown(name, finding.amount)} of {name}{where}{than}",
                cure,
                is_bad=finding.amount < too_little,
            )
        )
    return remarks


def _shown(name: str, amount: int) -> str:
    if amount >= UNLIMITED:
        return "any number" if name == OPEN_FILES else "any amount"
    return str(amount) if name == OPEN_FILES else format_size(amount)


def _judge_own_name(_name: str, by_host: Mapping[str, Finding]) -> list[Remark]:
    return [
        Remark(
            host,
            f"its name {finding.detail} leads to no address that others reach",
            "Ranks meet all the same; other programs may not",
            is_bad=False,
        )
        for host, finding in by_host.items()
        if finding.amount == 0
    ]


def _judge_leftovers(_name: str, by_host: Mapping[str, Finding]) -> list[Remark]:
    return [
        Remark(
            host,
            f"{finding.amount} processes of an earlier job are left",
            f"Type there: kill -9 {finding.detail}",
            is_bad=True,
        )
        for host, finding in by_host.items()
        if finding.amount > 0
    ]


_JUDGES = {
    CLOCK: _judge_clock,
    SHARED_MEMORY: _judge_amount,
    OPEN_FILES: _judge_amount,
    LOCKED_MEMORY: _judge_amount,
    DISK: _judge_amount,
    OWN_NAME: _judge_own_name,
    LEFTOVERS: _judge_leftovers,
}
