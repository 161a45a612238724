"""Hosts and checks made by hand."""

from ronde.check import (
    Check,
    Family,
    Fleet,
    HostFacts,
    Problem,
    Severity,
    all_checks,
    differing,
)


def make_check(name, family, severity, judge, *facts, fix="do the right thing"):
    return Check(
        id=name,
        family=family,
        title=f"{name} is as it should be",
        reads="/proc/self/limits",
        threshold="at least 32 GiB",
        source="a vendor's guide",
        severity=severity,
        fix=fix,
        needs="",
        why="training crawls",
        facts=facts,
        judge=judge,
    )


def alike(fact, title):
    """Return a judge that finds hosts that differ from most in a fact."""
    return lambda fleet: differing(fleet, fact, title)


def each_host(fact, tell):
    """Return a judge that looks at one fact of each host by itself."""

    def judge(fleet):
        for facts in fleet.having(fact):
            what = tell(facts.values[fact])
            if what:
                yield Problem(what, host=facts.host)

    return judge


def _report_small(value):
    return f"{value} GiB can be locked" if value < 32 else ""


def of_family(family):
    """Return ronde's own checks of a family."""
    return tuple(check for check in all_checks() if check.family is family)


CHECKS = (
    make_check(
        "locked-memory",
        Family.HOST,
        Severity.FAIL,
        each_host("host.memlock_gib", _report_small),
        "host.memlock_gib",
        fix="ulimit -l unlimited",
    ),
    make_check(
        "governor",
        Family.HOST,
        Severity.WARN,
        alike("host.governor", "governor"),
        "host.governor",
    ),
    make_check(
        "torch",
        Family.VERSIONS,
        Severity.FAIL,
        alike("versions.torch", "torch"),
        "versions.torch",
    ),
    make_check(
        "gpu-heat",
        Family.GPU,
        Severity.FAIL,
        each_host("gpu.heat", lambda _: ""),
        "gpu.heat",
    ),
    make_check(
        "latency",
        Family.NETWORK,
        Severity.WARN,
        each_host("network.reach", lambda _: ""),
        "network.reach",
    ),
)

NO_GPU = "/dev/nvidia0: permission denied; root would help"


def make_host(name, *, memlock=64, governor="performance", torch="2.13"):
    """Return facts of a host without network facts and with an unreadable GPU."""
    values = {
        "host.memlock_gib": memlock,
        "host.governor": governor,
        "versions.torch": torch,
    }
    return HostFacts(name, values, {"gpu.": NO_GPU}, {"host": 0.1})


def make_fleet(num_hosts, **odd):
    """Return hosts node1, node2, ...; ``node2={...}`` changes the facts of one."""
    names = [f"node{number}" for number in range(1, num_hosts + 1)]
    return Fleet(tuple(make_host(name, **odd.get(name, {})) for name in names), {})
