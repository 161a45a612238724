"""What small jobs of two hosts show, beside how fast they are."""

from collections.abc import Iterator, Mapping

from ronde.check.check import Check, Family, Finding, Severity, name_pair
from ronde.check.facts import Fleet, Value

_RATES = "network.bandwidth"
_FAILURES = "network.bandwidth_failures"
_WAY = "network.bandwidth_way"
_REMARKS = "network.nccl_remarks"
_PORTS = "network.rdma_ports"
_SOCKETS = "sockets-between-nodes"
_STREAMS = "tcp"
_MAX_NAMED = 4


def _judge_failures(fleet: Fleet) -> Iterator[Finding]:
    """Blame a host that could do it with nobody; else tell of the two."""
    failures: dict[str, Mapping[str, str]] = {}
    able: set[str] = set()
    way = ""
    for facts in fleet.having(_FAILURES, _WAY):
        way = facts.values[_WAY]
        if way != _STREAMS:
            failures[facts.host] = facts.values[_FAILURES]
            able |= {facts.host} if facts.values.get(_RATES) else set()
    for host, reasons in failures.items():
        if reasons and host not in able:
            named = list(reasons)[:_MAX_NAMED]
            num_more = len(reasons) - len(named)
            partners = f"{', '.join(named)}{f' and {num_more} more' * (num_more > 0)}"
            yield _fail(host, way, partners, reasons[named[0]])
    for host, other in _pairs(failures, able):
        yield _fail(name_pair(host, other), way, "", failures[host][other])


def _pairs(
    failures: Mapping[str, Mapping[str, str]], able: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield each pair once whose hosts both are able to do it with others."""
    told: set[frozenset[str]] = set()
    for host, reasons in failures.items():
        for other in reasons:
            pair = frozenset((host, other))
            if pair <= able and pair not in told:
                told.add(pair)
                yield host, other


def _fail(where: str, way: str, partners: str, reason: str) -> Finding:
    among = f"with {partners}" if partners else "between the two"
    what = f"no all_reduce by {way} {among}: {reason.rstrip('.')}"
    return Finding("pair-job", Severity.FAIL, where, what)


def _judge_remarks(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(_REMARKS):
        remarks: dict[str, Value] = facts.values[_REMARKS]
        for rule, remark in remarks.items():
            what = f"{rule}: {remark['what'].rstrip('.')}"
            severity = _weigh(rule, remark, facts.values)
            fix = remark["remedy"]
            yield Finding("nccl-choice", severity, facts.host, what, fix=fix)


def _weigh(rule: str, remark: Value, values: Mapping[str, Value]) -> Severity:
    if remark["is_error"] or (rule == _SOCKETS and _has_port(values)):
        return Severity.FAIL
    return Severity.WARN


def _has_port(values: Mapping[str, Value]) -> bool:
    """Say whether the kernel has an RDMA port that is up, whatever NCCL found."""
    ports: dict[str, Value] = values.get(_PORTS, {})
    return any(port["state"] == "ACTIVE" for port in ports.values())


CHECKS: tuple[Check, ...] = (
    Check(
        id="pair-job",
        family=Family.NETWORK,
        title="each two hosts can do a collective together",
        reads="the exit code and the words of ronde bench all_reduce, started on both "
        "hosts: a rank for each GPU with NCCL, for each slot with Gloo",
        threshold="each job ends well, and all its sums are right; a host that fails "
        "with all others is told alone",
        source="NVIDIA's nccl-tests: a run with a wrong element has failed",
        severity=Severity.FAIL,
        fix="ronde run -H ONE,OTHER -x NCCL_DEBUG=INFO ronde bench all_reduce shows "
        "the same at length.",
        needs="several hosts, torch, and --bandwidth gloo or nccl",
        why="What two hosts cannot do, no job that has both can.",
        facts=(_FAILURES, _WAY),
        judge=_judge_failures,
    ),
    Check(
        id="nccl-choice",
        family=Family.NETWORK,
        title="NCCL chose the fast way between hosts and between GPUs",
        reads="what NCCL says of itself in these jobs, as ronde topo log reads it",
        threshold="an error of ronde topo log fails, and so do sockets where an RDMA "
        "port is up; its warnings warn",
        source="NCCL's manual on NCCL_DEBUG=INFO; docs/topology-log.md has the rules",
        severity=Severity.FAIL,
        fix="See docs/topology-log.md for the rule that is named.",
        needs="several hosts with GPUs, and --bandwidth",
        why="By sockets, or through the host's memory, a tenth of the bandwidth is "
        "left, and nothing else tells.",
        facts=(_REMARKS,),
        judge=_judge_remarks,
        besides=(_PORTS,),
    ),
)
