"""Whether hosts can be asked, are machines of their own, and are as large as others."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ronde.check.check import FAIL, WARN, Family, Problem, check, having_less
from ronde.check.facts import Fleet, Value
from ronde.check.hosts import HostSet, NodeContext, Reply, Step
from ronde.check.probing import ENDED
from ronde.units import format_duration, format_size

ABSENT = "absent"
"""Setting: by the name of a host that could not be asked, ``reason`` and ``cure``."""

TAKING_PART = "taking-part"

FAILED = "probe.failed"
"""Fact: by the name of each probe that gave none, why."""

OFFSET = "cluster.clock_offset_s"
"""Fact: a host's clock less this machine's, in seconds."""

ERROR = "cluster.clock_error_s"
"""Fact: how far off that may be, either way."""

MUCH_OFFSET_S, BAD_OFFSET_S = 0.1, 5.0
LITTLE_MEMORY = 0.9
"""Of what most hosts have: firmware takes a little, here more than there."""

_NUM_EXCHANGES = 6
_TIMEOUT_S = 3.0
_CPUS, _QUOTA, _MEMORY = "host.num_cpus", "host.cpu_quota", "host.memory_bytes"


@check(
    Family.CLUSTER,
    FAIL,
    f"""{TAKING_PART}: the host can be reached, and ronde starts there
    reads: an agent started over ssh, srun or mpirun, as ronde run starts it, and its
        first answer
    threshold: an answer within 30 s, from the same version of ronde and the same minor
        version of Python
    source: ronde's own: what ronde run needs to start ranks there
    fix: ssh HOST true, and read its error
    why: ronde run starts nothing at all while one of its hosts is missing.
    """,
)
def _taking_part(fleet: Fleet) -> Iterator[Problem]:
    for host, why in fleet.settings.get(ABSENT, {}).items():
        yield Problem(f"cannot be asked: {why['reason']}", fix=why["cure"], host=host)


def _failed_probes(fleet: Fleet, *, is_hung: bool) -> Iterator[Problem]:
    for host, failed in fleet.known(FAILED).items():
        for probe, failure in failed.items():
            if failure.startswith(ENDED) is not is_hung:
                yield Problem(f"probe {probe}: {failure}", host=host)


@check(
    Family.CLUSTER,
    FAIL,
    """probe-hung: looking at the host does not hang
    reads: whether each probe, a process of its own, ends before its deadline
    threshold: 5 to 45 s by probe; for a single GPU see gpu-lost
    source: ronde's own
    fix: Look at what hangs there: ps -eo pid,stat,wchan:32,cmd; for a driver or a dead
        file server mostly a restart helps
    why: A rank that asks the same hangs as well, and all others wait for it.
    """,
    FAILED,
)
def _probe_hung(fleet: Fleet) -> Iterator[Problem]:
    return _failed_probes(fleet, is_hung=True)


@check(
    Family.CLUSTER,
    WARN,
    """probe-ended: looking at the host works
    reads: whether each probe, a process of its own, gives its facts
    threshold: all of them
    source: ronde's own
    fix: Type there: python -m ronde check; and report it if it fails as well
    why: What this probe looks at is unknown of the host.
    """,
    FAILED,
)
def _probe_ended(fleet: Fleet) -> Iterator[Problem]:
    return _failed_probes(fleet, is_hung=False)


def clock(_: NodeContext, _question: dict[str, Value]) -> dict[str, Value]:
    """Return the time: ``time_ns``, since 1970."""
    return {"time_ns": time.time_ns()}


class Offset(NamedTuple):
    """A clock's distance from this machine's, and how far off that may be."""

    offset_s: float
    error_s: float


def compare_clocks(hosts: HostSet) -> None:
    """Ask all hosts for the time, several times; the quickest answer counts.

    Source: of several exchanges the one with the shortest round trip has the least
    error, as NTP's clock filter takes it (RFC 5905, section 10).
    """
    best: dict[str, Offset] = {}
    failures: dict[str, str] = {}
    for _ in range(_NUM_EXCHANGES):
        asked = [name for name in hosts.names if name not in failures]
        replies = hosts.ask({name: {"do": "clock"} for name in asked}, _TIMEOUT_S)
        # Read once an exchange: a clock that is set meanwhile spoils one alone.
        epoch_s = time.time() - time.monotonic()
        for host, reply in replies.items():
            if reply.failure:
                failures[host] = reply.failure
                continue
            offset = compare(reply, epoch_s)
            if host not in best or offset.error_s < best[host].error_s:
                best[host] = offset
    for host in hosts.names:
        if host in best:
            hosts.note(host, OFFSET, best[host].offset_s)
            hosts.note(host, ERROR, best[host].error_s)
        else:
            hosts.note_unread(host, OFFSET, failures.get(host, "it was not asked"))


def compare(reply: Reply, epoch_s: float) -> Offset:
    """Return how far a clock is off that was read between question and answer.

    Args:
        reply: With the host's ``time_ns``.
        epoch_s: This machine's clock when its monotonic one was 0.
    """
    middle_s = (reply.asked_s + reply.answered_s) / 2
    offset_s = reply.values["time_ns"] / 1e9 - (epoch_s + middle_s)
    return Offset(offset_s, (reply.answered_s - reply.asked_s) / 2)


STEP = Step("clock", compare_clocks, (OFFSET, ERROR))


@check(
    Family.CLUSTER,
    FAIL,
    """clock-offset: all clocks show the same time
    reads: each host's clock against this machine's, the quickest of several exchanges,
        beyond what the exchange may be off
    threshold: 100 ms from the middle host; a failure above 5 s
    source: ronde's own: below 100 ms traces of several hosts can be laid side by side
    fix: As root: timedatectl set-ntp true, or chronyc makestep
    needs: several hosts
    why: Logs, traces and file times of several hosts contradict each other; tokens and
        certificates are refused.
    """,
    OFFSET,
)
def _clock_offset(fleet: Fleet) -> Iterator[Problem]:
    """Yield whose clock is off; with only two hosts, and in a draw, all."""
    known = {f.host: f.values for f in fleet.having(OFFSET, ERROR)}
    offsets = {host: float(values[OFFSET]) for host, values in known.items()}
    if len(offsets) < 2:
        return
    # One that a host has: the mean of two would be nobody's, and all would be off.
    usual = sorted(offsets, key=offsets.__getitem__)[len(offsets) // 2]
    apart = {
        host: abs(offset - offsets[usual]) - (known[host][ERROR] + known[usual][ERROR])
        for host, offset in offsets.items()
    }
    off = [host for host, apart_s in apart.items() if apart_s > MUCH_OFFSET_S]
    is_draw = bool(off) and 2 * len(off) >= len(offsets)
    for host in offsets if is_draw else off:
        worst_s = max(apart.values()) if is_draw else apart[host]
        others = [each for each in offsets if each != host] if is_draw else [usual]
        where = "elsewhere" if is_draw else "on most hosts"
        yield Problem(
            f"its clock is {_show_offset(offsets[host])}",
            FAIL if worst_s > BAD_OFFSET_S else WARN,
            f"{', '.join(_show_offset(offsets[h]) for h in others[:3])} {where}",
            host=host,
        )


def _show_offset(offset_s: float) -> str:
    if round(abs(offset_s), 3) == 0.0:
        return "as this machine's"
    side = "ahead of" if offset_s > 0 else "behind"
    return f"{format_duration(abs(offset_s))} {side} this machine's"


@check(
    Family.CLUSTER,
    WARN,
    """same-machine: each host is a machine of its own
    reads: the boot's id, the host's name and its namespaces
    threshold: no two alike
    source: ronde's own
    fix: Name it once in the list of hosts, with all its slots
    needs: several hosts
    why: Ranks take the same GPUs twice: NCCL reports 'Duplicate GPU detected'.
    """,
    "host.identity",
)
def _same_machine(fleet: Fleet) -> Iterator[Problem]:
    same: dict[str, list[str]] = defaultdict(list)
    for host, identity in fleet.known("host.identity").items():
        same[identity].append(host)
    for hosts in same.values():
        for host in hosts if len(hosts) > 1 else ():
            others = ", ".join(other for other in hosts if other != host)
            yield Problem(f"it is the same machine as {others}", host=host)


@check(
    Family.CLUSTER,
    WARN,
    """cpus-alike: all hosts have as many CPUs
    reads: CPUs that affinity, cpuset and quota leave
    threshold: no less than most hosts have
    source: ronde's own: collectives go at the pace of the slowest
    fix: Look at who limits it there: taskset -p $$; cpu.max and cpuset.cpus of its
        control group; CPUs offline in lscpu
    needs: several hosts
    why: Data is prepared slower on that host, and all others wait.
    """,
    _CPUS,
    _QUOTA,
)
def _cpus_alike(fleet: Fleet) -> Iterator[Problem]:
    usable = {
        host.host: min(host.values[_CPUS], host.values[_QUOTA] or math.inf)
        for host in fleet.having(_CPUS, _QUOTA)
    }
    return having_less(usable, lambda amount: f"{amount:g} CPUs may be used")


@check(
    Family.CLUSTER,
    WARN,
    f"""memory-alike: all hosts have as much memory
    reads: MemTotal of /proc/meminfo
    threshold: {LITTLE_MEMORY:.0%} of what most hosts have
    source: ronde's own
    fix: Look for memory that firmware has taken out: dmidecode -t memory, the BMC's log
    needs: several hosts
    why: A module that failed is gone; and what fits on the others does not fit there.
    """,
    _MEMORY,
)
def _memory_alike(fleet: Fleet) -> Iterator[Problem]:
    return having_less(
        fleet.known(_MEMORY),
        lambda amount: f"{format_size(int(amount))} of memory",
        LITTLE_MEMORY,
    )
