"""How fast a host computes, against the others."""

from collections.abc import Iterator, Mapping

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.families.host_judges import Few, find_few, tell_usual
from ronde.check.fleet import Fleet

PACE = "cluster.compute_s"
"""Fact: seconds for a fixed piece of work, while all hosts do it."""

PACE_CPU = "cluster.compute_cpu_s"
"""Fact: seconds of CPU for the same work, the best of many on several CPUs."""

SLOW = 2.0
VERY_SLOW = 4.0
SLOW_CPU = 1.5


def find_slow(paces: Mapping[str, float], limit: float) -> tuple[str, ...]:
    """Return the hosts that need more than so many times what most need.

    In a draw, and of two hosts, that is all of them; see ``find_few``.

    Args:
        paces: Seconds by name of the host.
        limit: Above so many times, more than 1.
    """
    return find_few(_speeds(paces), 1 / limit).hosts


def _speeds(paces: Mapping[str, float]) -> dict[str, float]:
    return {host: 1 / max(pace, 1e-9) for host, pace in paces.items()}


def _judge_pace(fleet: Fleet) -> Iterator[Finding]:
    facts = {each.host: each.values for each in fleet.having(PACE, PACE_CPU)}
    walls = {host: float(values[PACE]) for host, values in facts.items()}
    cpus = {host: float(values[PACE_CPU]) for host, values in facts.items()}
    slow_cpus = find_slow(cpus, SLOW_CPU)
    speeds = _speeds(walls)
    few, fewest = find_few(speeds, 1 / SLOW), find_few(speeds, 1 / VERY_SLOW)
    for host, wall in walls.items():
        if host not in few.hosts and host not in slow_cpus:
            continue
        share = min(1.0, cpus[host] / max(wall, 1e-9))
        yield Finding(
            "slow-host",
            _severity(host, fewest),
            host,
            f"{_show(wall)} for a piece of work, with {share:.0%} of a CPU",
            tell_usual(host, speeds, few, lambda speed: _show(1 / speed)),
            "Its CPU is clocked down or another model: look at governor, power cap "
            "and heat"
            if host in slow_cpus
            else "",
        )


def _severity(host: str, fewest: Few) -> Severity:
    # In a draw no single host can be said to crawl.
    is_bad = host in fewest.hosts and not fewest.is_draw
    return Severity.FAIL if is_bad else Severity.WARN


def _show(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms"


CHECKS = (
    Check(
        id="slow-host",
        family=Family.CLUSTER,
        title="all hosts compute as fast",
        reads="the time of a fixed computation on one CPU, done on all hosts at once "
        "and up to five times, and its CPU time on the quickest of up to eight CPUs",
        threshold="twice what most hosts need, four times a failure; 1.5 times the "
        "CPU time",
        source="ronde's own: hosts that share two busy CPUs stay below twice",
        severity=Severity.FAIL,
        fix="Look at who else uses its CPUs and who limits it: top, taskset -p $$, "
        "nice, cpu.max of its control group",
        needs="several hosts",
        why="Every collective waits for the slowest host.",
        facts=(PACE, PACE_CPU),
        judge=_judge_pace,
    ),
)
