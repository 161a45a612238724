"""Checks of whole hosts: reachability, clocks, memory size and CPU speed."""

import time
from collections.abc import Mapping

from ronde.check.check import FAIL, WARN, Family, Problem, Problems, check
from ronde.check.fleet import Fleet, Value
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.majority import find_low, having_less
from ronde.check.probing import ENDED, FAILED
from ronde.units import format_duration, format_size

PACE = "cluster.compute_s"  # fact: time of a fixed piece of work, on all hosts at once
_SLOW, _VERY_SLOW = 2.0, 4.0
_SPIN_S, _SPIN_TIMEOUT_S, _MAX_ROUNDS = 0.2, 10.0, 5
_BASE, _EXPONENT, _MODULUS = 3, (1 << 512) - 1, (1 << 521) - 1
"""A power that takes about half a millisecond in the interpreter's own arithmetic. It
depends on no library's version and on no special instructions of a processor."""

# Setting: ``reason`` and ``cure`` of each host that did not answer.
ABSENT = "absent"
HOST_ANSWERS = "host-answers"

# Fact: a host's clock minus this machine's, in seconds.
OFFSET = "cluster.clock_offset_s"
ERROR = "cluster.clock_error_s"  # fact: the largest error of the offset
_MUCH_OFFSET_S, _BAD_OFFSET_S = 0.1, 5.0
_LITTLE_MEMORY = 0.9  # share of the memory of most hosts; firmware takes a little
_NUM_EXCHANGES = 6
_TIMEOUT_S = 3.0


@check(FAIL, family=Family.CLUSTER)
def host_answers(fleet: Fleet) -> Problems:
    """The host can be reached, and ronde starts there.

    reads: the first message of an agent that is started as ronde run starts it
    threshold: an answer within 30 s, by the same version of ronde and the same minor
        version of Python
    source: ronde's choice: otherwise ronde run cannot start ranks there
    fix: ssh HOST true, and read its error
    why: ronde run starts no ranks if one of its hosts is missing.
    """
    for host, why in fleet.settings.get(ABSENT, {}).items():
        yield Problem(f"no answer: {why['reason']}", fix=why["cure"], host=host)


@check(FAIL, FAILED, family=Family.CLUSTER)
def probe_hung(fleet: Fleet) -> Problems:
    """No probe hangs or crashes on the host.

    reads: the exit status of each probe, which runs in its own process
    threshold: a probe ends within 5 to 60 s, depending on the probe (for GPUs see
        gpu-lost), or later if it computes or waits for a CPU. A crash is a warning; a
        crash while importing torch is a failure
    source: ronde's choice: several times the duration of a probe on a slow host
    fix: Find the process that hangs with ps -eo pid,stat,wchan:32,cmd; usually a reboot
        helps
    why: A rank that makes the same call hangs as well, and all other ranks wait.
    """
    fix = "Type there: python -m ronde check; and report it if it fails as well"
    for host, failed in fleet.known(FAILED).items():
        for probe, failure in failed.items():
            message = f"probe {probe}: {failure}"
            if failure.startswith(ENDED) and probe != "torch":
                yield Problem(message, WARN, fix=fix, host=host)
            else:
                yield Problem(message, host=host)


def clock(_: NodeContext, _question: dict[str, Value]) -> dict[str, Value]:
    return {"time_ns": time.time_ns()}


def compare_clocks(hosts: HostSet) -> None:
    """Compare each host's clock with this machine's, several times.

    The exchange with the shortest round trip counts, as in NTP (RFC 5905).
    """
    best: dict[str, tuple[float, float]] = {}
    failures: dict[str, str] = {}
    for _ in range(_NUM_EXCHANGES):
        asked = [name for name in hosts.names if name not in failures]
        replies = hosts.ask({name: {"do": "clock"} for name in asked}, _TIMEOUT_S)
        # Once per exchange, so that a change of this clock spoils only one exchange.
        # A pause between the two calls makes the result too small, hence the maximum.
        epoch_s = max(time.time() - time.monotonic() for _ in range(5))
        for host, reply in replies.items():
            if reply.failure:
                failures[host] = reply.failure
                continue
            offset_s, error_s = estimate_offset(reply, epoch_s)
            if host not in best or error_s < best[host][1]:
                best[host] = offset_s, error_s
    for host, each in best.items():
        hosts.facts[host].values.update(zip((OFFSET, ERROR), each, strict=True))
    for host in failures.keys() - best:
        hosts.note_unread(host, OFFSET, failures[host])


def estimate_offset(reply: Reply, epoch_s: float) -> tuple[float, float]:
    """Return a host's clock minus this machine's, and the maximum error, in seconds."""
    middle_s = (reply.asked_s + reply.answered_s) / 2
    offset_s = reply.values["time_ns"] / 1e9 - (epoch_s + middle_s)
    return offset_s, (reply.answered_s - reply.asked_s) / 2


STEP = ProbeStep("clock", compare_clocks, (OFFSET, ERROR))


@check(FAIL, OFFSET)
def clock_offset(fleet: Fleet) -> Problems:
    """All clocks show the same time.

    reads: the offset of each host's clock, minus the error of the measurement
    threshold: 100 ms from the median host; more than 5 s is a failure
    source: ronde's choice: up to 100 ms, traces of several hosts can be compared; above
        5 s, no time service is running
    fix: As root: timedatectl set-ntp true, or chronyc makestep
    needs: several hosts
    why: Logs and traces of several hosts contradict each other. At several minutes
        authentication fails (Kerberos: 5 minutes, RFC 4120).
    """
    known = {f.host: f.values for f in fleet.having(OFFSET, ERROR)}
    offsets = {host: float(values[OFFSET]) for host, values in known.items()}
    if len(offsets) < 2:
        return
    # With the mean of the two middle offsets all hosts could be off.
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


@check(WARN, "host.memory_bytes", family=Family.CLUSTER)
def memory_alike(fleet: Fleet) -> Problems:
    """All hosts have the same amount of memory.

    reads: MemTotal of /proc/meminfo
    threshold: 90% of the memory of most hosts
    source: ronde's choice: one memory module of eight is more than 10%, and the memory
        that firmware reserves is less
    fix: Look for memory that firmware has disabled: dmidecode -t memory, and the BMC's
        log
    needs: several hosts
    why: A memory module may have failed. A job that fits into the other hosts' memory
        does not fit there.
    """
    return having_less(
        fleet.known("host.memory_bytes"),
        lambda amount: f"{format_size(int(amount))} of memory",
        _LITTLE_MEMORY,
    )


def spin(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Repeat a fixed computation for ``seconds``; return its mean wall time."""
    begun_s = now_s = time.monotonic()
    num_pieces = 0
    while num_pieces == 0 or now_s < begun_s + float(question["seconds"]):
        pow(_BASE, _EXPONENT, _MODULUS)
        num_pieces += 1
        now_s = time.monotonic()
    return {"wall_s": (now_s - begun_s) / num_pieces}


def measure_pace(hosts: HostSet) -> None:
    """Time ``spin`` on all hosts at once; if one seems slow, repeat; keep the best."""
    for _ in range(_MAX_ROUNDS):
        replies = hosts.ask_all({"do": "spin", "seconds": _SPIN_S}, _SPIN_TIMEOUT_S)
        for host, reply in replies.items():
            if reply.failure:
                hosts.note_unread(host, PACE, reply.failure)
                continue
            wall_s = reply.values["wall_s"]
            hosts.note(
                host, PACE, min(wall_s, hosts.facts[host].values.get(PACE, wall_s))
            )
        paces = {n: f.values[PACE] for n, f in hosts.facts.items() if PACE in f.values}
        if not find_low(_speeds(paces), 1 / _SLOW).hosts:
            break


PACE_STEP = ProbeStep("pace", measure_pace, (PACE,))


def _speeds(paces: Mapping[str, float]) -> dict[str, float]:
    return {host: 1 / max(pace, 1e-9) for host, pace in paces.items()}


@check(FAIL, PACE)
def slow_host(fleet: Fleet) -> Problems:
    """All hosts compute equally fast.

    reads: the time of a fixed computation, which runs on all hosts at once
    threshold: twice the time of most hosts is a warning, four times a failure
    source: ronde's choice: hosts that share two busy CPUs stay below twice
    fix: Look for other programs and limits: top, taskset -p $$, nice, cpu.max; then
        look at the governor, the power cap and the temperature
    needs: several hosts
    why: Every collective waits for the slowest host.
    """
    return having_less(
        _speeds(fleet.known(PACE)),
        lambda speed: f"{1000 / speed:.2g} ms for a fixed computation",
        1 / _SLOW,
        1 / _VERY_SLOW,
    )
