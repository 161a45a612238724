"""Whether hosts can be asked, are machines of their own, and are as large as others."""

import time
from collections import defaultdict

from ronde.check.check import (
    FAIL,
    WARN,
    Family,
    Fleet,
    Problem,
    Problems,
    Value,
    check,
    having_less,
)
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.probing import ENDED, FAILED
from ronde.units import format_duration, format_size

# Setting: by the name of a host that could not be asked, ``reason`` and ``cure``.
ABSENT = "absent"
TAKING_PART = "taking-part"

# Fact: a host's clock less this machine's, in seconds.
OFFSET = "cluster.clock_offset_s"
# Fact: how far off that may be, either way.
ERROR = "cluster.clock_error_s"
_MUCH_OFFSET_S, _BAD_OFFSET_S = 0.1, 5.0
# Of what most hosts have: firmware takes a little, here more than there.
_LITTLE_MEMORY = 0.9
_NUM_EXCHANGES = 6
_TIMEOUT_S = 3.0


@check(Family.CLUSTER, FAIL)
def taking_part(fleet: Fleet) -> Problems:
    """The host can be reached, and ronde starts there.

    reads: the first answer of an agent, started as ronde run starts it
    threshold: an answer within 30 s, with the same ronde and minor version of Python
    source: ronde's own: what ronde run needs to start ranks there
    fix: ssh HOST true, and read its error
    why: ronde run starts nothing at all while one of its hosts is missing.
    """
    for host, why in fleet.settings.get(ABSENT, {}).items():
        yield Problem(f"cannot be asked: {why['reason']}", fix=why["cure"], host=host)


@check(Family.CLUSTER, FAIL, FAILED)
def probe_hung(fleet: Fleet) -> Problems:
    """No probe of the host hangs or breaks.

    reads: whether each probe, a process of its own, ends before its deadline
    threshold: 5 to 45 s by probe (a GPU: gpu-lost); one that breaks is a warning
    source: ronde's own
    fix: Look at what hangs: ps -eo pid,stat,wchan:32,cmd; mostly a restart helps
    why: A rank that asks the same hangs as well, and all others wait for it.
    """
    fix = "Type there: python -m ronde check; and report it if it fails as well"
    for host, failed in fleet.known(FAILED).items():
        for probe, failure in failed.items():
            what = f"probe {probe}: {failure}"
            if failure.startswith(ENDED):
                yield Problem(what, WARN, fix=fix, host=host)
            else:
                yield Problem(what, host=host)


def clock(_: NodeContext, _question: dict[str, Value]) -> dict[str, Value]:
    return {"time_ns": time.time_ns()}


def compare_clocks(hosts: HostSet) -> None:
    """Ask all for the time; the quickest answer counts, as in NTP (RFC 5905, 10)."""
    best: dict[str, tuple[float, float]] = {}
    failures: dict[str, str] = {}
    for _ in range(_NUM_EXCHANGES):
        asked = [name for name in hosts.names if name not in failures]
        replies = hosts.ask({name: {"do": "clock"} for name in asked}, _TIMEOUT_S)
        # Read once an exchange: a clock that is set meanwhile spoils one alone.
        # A pause between the two would set the clock back: the latest is right.
        epoch_s = max(time.time() - time.monotonic() for _ in range(5))
        for host, reply in replies.items():
            if reply.failure:
                failures[host] = reply.failure
                continue
            offset_s, error_s = compare(reply, epoch_s)
            if host not in best or error_s < best[host][1]:
                best[host] = offset_s, error_s
    for host in hosts.names:
        if host in best:
            for fact, seconds in zip((OFFSET, ERROR), best[host], strict=True):
                hosts.note(host, fact, seconds)
        else:
            hosts.note_unread(host, OFFSET, failures.get(host, "it was not asked"))


def compare(reply: Reply, epoch_s: float) -> tuple[float, float]:
    """Return a host's clock less this one's, and by how much that may be wrong."""
    middle_s = (reply.asked_s + reply.answered_s) / 2
    offset_s = reply.values["time_ns"] / 1e9 - (epoch_s + middle_s)
    return offset_s, (reply.answered_s - reply.asked_s) / 2


STEP = ProbeStep("clock", compare_clocks, (OFFSET, ERROR))


@check(Family.CLUSTER, FAIL, OFFSET)
def clock_offset(fleet: Fleet) -> Problems:
    """All clocks show the same time.

    reads: each host's clock against this machine's, beyond the error of the exchange
    threshold: 100 ms from the middle host; a failure above 5 s
    source: ronde's own: below 100 ms traces of several hosts can be laid side by side
    fix: As root: timedatectl set-ntp true, or chronyc makestep
    needs: several hosts
    why: Logs and traces of several hosts contradict each other; tokens are refused.
    """
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
    off = [host for host, apart_s in apart.items() if apart_s > _MUCH_OFFSET_S]
    is_draw = bool(off) and 2 * len(off) >= len(offsets)
    for host in offsets if is_draw else off:
        worst_s = max(apart.values()) if is_draw else apart[host]
        others = [each for each in offsets if each != host] if is_draw else [usual]
        where = "elsewhere" if is_draw else "on most hosts"
        yield Problem(
            f"its clock is {_show_offset(offsets[host])}",
            FAIL if worst_s > _BAD_OFFSET_S else WARN,
            f"{', '.join(_show_offset(offsets[h]) for h in others[:3])} {where}",
            host=host,
        )


def _show_offset(offset_s: float) -> str:
    if round(abs(offset_s), 3) == 0.0:
        return "as this machine's"
    side = "ahead of" if offset_s > 0 else "behind"
    return f"{format_duration(abs(offset_s))} {side} this machine's"


@check(Family.CLUSTER, WARN, "host.identity")
def same_machine(fleet: Fleet) -> Problems:
    """Each host is a machine of its own.

    reads: the boot's id, the host's name and its namespaces
    threshold: no two alike
    source: ronde's own
    fix: Name it once in the list of hosts, with all its slots
    needs: several hosts
    why: Ranks take the same GPUs twice: NCCL reports 'Duplicate GPU detected'.
    """
    same: dict[str, list[str]] = defaultdict(list)
    for host, identity in fleet.known("host.identity").items():
        same[identity].append(host)
    for hosts in same.values():
        for host in hosts if len(hosts) > 1 else ():
            others = ", ".join(other for other in hosts if other != host)
            yield Problem(f"it is the same machine as {others}", host=host)


@check(Family.CLUSTER, WARN, "host.memory_bytes")
def memory_alike(fleet: Fleet) -> Problems:
    """All hosts have as much memory.

    reads: MemTotal of /proc/meminfo
    threshold: 90% of what most hosts have
    source: ronde's own
    fix: Look for memory that firmware has taken out: dmidecode -t memory, the BMC's log
    needs: several hosts
    why: A memory module may have failed; a job that fits elsewhere does not fit there.
    """

    def show(amount: float) -> str:
        return f"{format_size(int(amount))} of memory"

    return having_less(fleet.known("host.memory_bytes"), show, _LITTLE_MEMORY)
