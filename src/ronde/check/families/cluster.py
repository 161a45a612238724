"""What shows only when hosts are compared."""

import math
from collections import defaultdict
from collections.abc import Iterator

from ronde.check.catalogue import PROBES
from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.families import cluster_pace, cluster_product
from ronde.check.families.host_judges import Values, fewer_than_most
from ronde.check.fleet import Fleet
from ronde.check.probing import ENDED
from ronde.units import format_duration, format_size

MUCH_OFFSET_S = 0.1
BAD_OFFSET_S = 5.0
LITTLE_MEMORY = 0.9
"""Of what most hosts have: firmware takes a little, here more than there."""

_DEADLINES = ", ".join(f"{n} {e.deadline_s:g} s" for n, e in PROBES.items())
_OFFSET = "cluster.clock_offset_s"
_ERROR = "cluster.clock_error_s"


def _judge_hung(fleet: Fleet) -> Iterator[Finding]:
    return _judge_probes(fleet, "probe-hung", Severity.FAIL, is_hung=True)


def _judge_ended(fleet: Fleet) -> Iterator[Finding]:
    return _judge_probes(fleet, "probe-ended", Severity.WARN, is_hung=False)


def _judge_probes(
    fleet: Fleet, name: str, severity: Severity, *, is_hung: bool
) -> Iterator[Finding]:
    for facts in fleet.having("probe.failed"):
        for probe, failure in facts.values["probe.failed"].items():
            if failure.startswith(ENDED) is not is_hung:
                yield Finding(name, severity, facts.host, f"probe {probe}: {failure}")


def _judge_offsets(fleet: Fleet) -> Iterator[Finding]:
    """Tell whose clock is off; of two hosts, and where as many are, tell all."""
    known = {f.host: f.values for f in fleet.having(_OFFSET, _ERROR)}
    offsets = {host: float(values[_OFFSET]) for host, values in known.items()}
    if len(offsets) < 2:
        return
    # One that a host has: the mean of two would be nobody's, and all would be off.
    usual = sorted(offsets, key=offsets.__getitem__)[len(offsets) // 2]
    apart = {
        host: abs(offset - offsets[usual])
        - (known[host][_ERROR] + known[usual][_ERROR])
        for host, offset in offsets.items()
    }
    off = [host for host, apart_s in apart.items() if apart_s > MUCH_OFFSET_S]
    is_draw = bool(off) and 2 * len(off) >= len(offsets)
    for host in offsets if is_draw else off:
        worst_s = max(apart.values()) if is_draw else apart[host]
        others = [each for each in offsets if each != host] if is_draw else [usual]
        where = "elsewhere" if is_draw else "on most hosts"
        yield Finding(
            "clock-offset",
            Severity.FAIL if worst_s > BAD_OFFSET_S else Severity.WARN,
            host,
            f"its clock is {_show_offset(offsets[host])}",
            f"{', '.join(_show_offset(offsets[h]) for h in others[:3])} {where}",
        )


def _show_offset(offset_s: float) -> str:
    if round(abs(offset_s), 3) == 0.0:
        return "as this machine's"
    side = "ahead of" if offset_s > 0 else "behind"
    return f"{format_duration(abs(offset_s))} {side} this machine's"


def _judge_identity(fleet: Fleet) -> Iterator[Finding]:
    same: dict[str, list[str]] = defaultdict(list)
    for facts in fleet.having("host.identity"):
        same[facts.values["host.identity"]].append(facts.host)
    for hosts in same.values():
        for host in hosts if len(hosts) > 1 else ():
            others = ", ".join(other for other in hosts if other != host)
            yield Finding(
                "same-machine",
                Severity.WARN,
                host,
                f"it is the same machine as {others}",
            )


def _usable_cpus(values: Values) -> float:
    return min(values["host.num_cpus"], values["host.cpu_quota"] or math.inf)


CHECKS = (
    Check(
        id="probe-hung",
        family=Family.CLUSTER,
        title="looking at the host does not hang",
        reads="whether each probe, a process of its own, ends before its deadline",
        threshold=f"{_DEADLINES}; what is asked of a single GPU has its own, see "
        "gpu-lost",
        source="ronde's own",
        severity=Severity.FAIL,
        fix="Look at what hangs there: ps -eo pid,stat,wchan:32,cmd; for a driver or "
        "a dead file server mostly a restart helps",
        needs="",
        why="A rank that asks the same hangs as well, and all others wait for it.",
        facts=("probe.failed",),
        judge=_judge_hung,
    ),
    Check(
        id="probe-ended",
        family=Family.CLUSTER,
        title="looking at the host works",
        reads="whether each probe, a process of its own, gives its facts",
        threshold="all of them",
        source="ronde's own",
        severity=Severity.WARN,
        fix="Type there: python -m ronde check; and report it if it fails as well",
        needs="",
        why="What this probe looks at is not known of the host.",
        facts=("probe.failed",),
        judge=_judge_ended,
    ),
    Check(
        id="clock-offset",
        family=Family.CLUSTER,
        title="all clocks show the same time",
        reads="each host's clock against this machine's, the quickest of several "
        "exchanges, beyond what the exchange may be off",
        threshold="100 ms from the middle host; a failure above 5 s",
        source="ronde's own: below 100 ms traces of several hosts can be laid side by "
        "side",
        severity=Severity.FAIL,
        fix="As root: timedatectl set-ntp true, or chronyc makestep",
        needs="several hosts",
        why="Logs, traces and file times of several hosts contradict each other; "
        "tokens and certificates are refused.",
        facts=(_OFFSET,),
        judge=_judge_offsets,
    ),
    Check(
        id="same-machine",
        family=Family.CLUSTER,
        title="each host is a machine of its own",
        reads="the boot's id, the host's name and its namespaces",
        threshold="no two alike",
        source="ronde's own",
        severity=Severity.WARN,
        fix="Name it once in the list of hosts, with all its slots",
        needs="several hosts",
        why="Ranks take the same GPUs twice: NCCL says 'Duplicate GPU detected'.",
        facts=("host.identity",),
        judge=_judge_identity,
    ),
    Check(
        id="cpus-alike",
        family=Family.CLUSTER,
        title="all hosts have as many CPUs",
        reads="CPUs that affinity, cpuset and quota leave",
        threshold="no less than most hosts have",
        source="ronde's own: collectives go at the pace of the slowest",
        severity=Severity.WARN,
        fix="Look at who limits it there: taskset -p $$; cpu.max and cpuset.cpus of "
        "its control group; CPUs offline in lscpu",
        needs="several hosts",
        why="Data is prepared slower on that host, and all others wait.",
        facts=("host.num_cpus", "host.cpu_quota"),
        judge=fewer_than_most(
            "cpus-alike",
            ("host.num_cpus", "host.cpu_quota"),
            _usable_cpus,
            lambda amount: f"{amount:g} CPUs may be used",
        ),
    ),
    Check(
        id="memory-alike",
        family=Family.CLUSTER,
        title="all hosts have as much memory",
        reads="MemTotal of /proc/meminfo",
        threshold=f"{LITTLE_MEMORY:.0%} of what most hosts have",
        source="ronde's own",
        severity=Severity.WARN,
        fix="Look for memory that firmware has taken out: dmidecode -t memory, the "
        "BMC's log",
        needs="several hosts",
        why="A module that failed is gone; and what fits on the others does not fit "
        "there.",
        facts=("host.memory_bytes",),
        judge=fewer_than_most(
            "memory-alike",
            ("host.memory_bytes",),
            lambda values: values["host.memory_bytes"],
            lambda amount: f"{format_size(int(amount))} of memory",
            LITTLE_MEMORY,
        ),
    ),
    *cluster_pace.CHECKS,
    *cluster_product.CHECKS,
)
