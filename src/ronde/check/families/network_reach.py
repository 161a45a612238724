"""Do hosts reach each other, at full size, at once and at full speed?"""

from collections.abc import Iterator, Sequence

from ronde.check.check import Check, Family, Finding, Severity, alike
from ronde.check.facts import Fleet
from ronde.check.network.interfaces import ADDRESS
from ronde.check.reachability import (
    BUSY,
    MIN_HOSTS,
    MIN_TAIL_S,
    MTU,
    REACH,
    SLOW_SHARE,
    TAIL_RATIO,
    Pair,
    Reached,
    blame,
    failing_pairs,
    lagging_pairs,
    lossy_pairs,
    lost_pairs,
    own_mtu,
    slow_pairs,
    usual_speed,
)
from ronde.units import format_duration, format_size

_FIRST_FREE_PORT = 1024
_MAX_NAMED = 4
_MANY = "several hosts"


def _judge_address(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having(ADDRESS):
        if not facts.values[ADDRESS]:
            what = "it has no address but loopback and link-local ones"
            yield Finding("own-address", Severity.FAIL, facts.host, what)


def _judge_reach(fleet: Fleet) -> Iterator[Finding]:
    reached = _reached(fleet)
    failing, pairs = failing_pairs(reached), lost_pairs(reached)
    refused = [(a, b) for a, b in pairs if reached[a][b]["is_refused"]]
    for host, own in blame(pairs, refused).items():
        told = [_who(host, own, "it cannot connect to {}", "{} cannot connect to it")]
        if not any((b, a) in own for a, b in own):
            is_half = set(own).isdisjoint((b, a) for a, b in failing)
            told.append(
                "the other way " + ("it works" if is_half else "packets arrive")
            )
        sender, receiver = own[0]
        first = reached[sender][receiver]
        told.append(first["error"])
        if first.get("is_heard"):
            told.append("datagrams arrive")
        ends = f"from {sender} to {receiver}"
        fix = (
            f"Let TCP through {ends}, all ports: nft list ruleset, or iptables -S, on "
            f"{receiver} and {sender}; then routes (ip route get) and cloud rules."
        )
        yield Finding("reachable", Severity.FAIL, host, "; ".join(told), fix=fix)


def _judge_packets(fleet: Fleet) -> Iterator[Finding]:
    reached = _reached(fleet)
    for host, own in blame(lossy_pairs(reached)).items():
        ways = _who(host, own, "to {}", "from {}")
        least = min(int(reached[a][b].get("mtu") or 0) for a, b in own)
        here = own_mtu(reached[host]) if host in reached else 0
        if least and least < here:
            what = f"{ways}: no packets above {least} bytes arrive, its MTU is {here}"
        else:
            size = format_size(max(reached[a][b]["lost_bytes"] for a, b in own))
            what = f"{ways}: messages of {size} are lost, those of 8 bytes arrive"
        yield Finding("path-mtu", Severity.FAIL, host, what)


def _judge_tails(fleet: Fleet) -> Iterator[Finding]:
    reached = _reached(fleet)
    for host, own in blame(lagging_pairs(reached)).items():
        sender, receiver = max(own, key=lambda pair: reached[pair[0]][pair[1]]["p99_s"])
        worst = reached[sender][receiver]
        what = (
            f"{_who(host, own, 'to {}', 'from {}')}: one round trip in a hundred takes "
            f"{format_duration(worst['p99_s'])}, half of them "
            f"{format_duration(worst['rtt_s'])} or less"
        )
        yield Finding("latency-tail", Severity.WARN, host, what)


def _judge_speeds(fleet: Fleet) -> Iterator[Finding]:
    reached = _reached(fleet)
    usual = f"{usual_speed(reached):.3g} MB/s between hosts"
    blamed = blame(slow_pairs(reached))
    if len(blamed) > max(2, len(reached) / 2):
        # Nothing stands out where most are slow against a few.
        return
    for host, own in blamed.items():
        best = max(reached[a][b]["mb_per_s"] for a, b in own)
        what = f"{_who(host, own, 'to {}', 'from {}')}: {best:.3g} MB/s"
        yield Finding("slow-link", Severity.WARN, host, what, usual)


def _judge_busy(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(BUSY):
        for port in facts.values[BUSY]:
            what = f"port {port} cannot be listened at"
            fix = f"See who has it: ss -ltnp 'sport = :{port}'. Or take another port."
            if port < _FIRST_FREE_PORT:
                fix += f" Below {_FIRST_FREE_PORT} root alone may listen."
            yield Finding("free-ports", Severity.WARN, facts.host, what, fix=fix)


def _reached(fleet: Fleet) -> Reached:
    return {facts.host: facts.values[REACH] for facts in fleet.having(REACH)}


def _who(host: str, pairs: Sequence[Pair], outwards: str, inwards: str) -> str:
    """Return in words with whom a host has faults, each direction by its pattern."""
    told: list[str] = []
    to = [other for sender, other in pairs if sender == host]
    by = [sender for sender, other in pairs if other == host]
    for pattern, names in ((outwards, to), (inwards, by)):
        if names:
            more = f" and {len(names) - _MAX_NAMED} more"
            listed = ", ".join(names[:_MAX_NAMED])
            named = listed + (more if len(names) > _MAX_NAMED else "")
            told.append(pattern.format(named))
    return " and ".join(told)


CHECKS = (
    Check(
        id="own-address",
        family=Family.NETWORK,
        title="there is an address by which others can reach the host",
        reads="the addresses of its interfaces, and the other hosts' routes to them",
        threshold="at least one that is neither loopback nor link-local",
        source="what any connection between hosts needs; no tool's number",
        severity=Severity.FAIL,
        fix="Bring the interface up and give it an address: ip address; ip link.",
        needs=_MANY,
        why="Ranks on other hosts cannot meet those of this one; the start fails.",
        facts=(ADDRESS,),
        judge=_judge_address,
    ),
    Check(
        id="reachable",
        family=Family.NETWORK,
        title="hosts can connect to each other at ports that the kernel chooses",
        reads="TCP connections and datagrams between all pairs, each way; more than "
        "32 hosts try a ring and eight others at random",
        threshold="every connection is made within a second, at the second try at last",
        source="NCCL and Gloo listen at ports that the kernel chooses, every rank "
        "connects to some of the others; no tool's number",
        severity=Severity.FAIL,
        fix="Let all TCP ports between the hosts through: nft list ruleset, or "
        "iptables -S; then routes and cloud rules.",
        needs=_MANY,
        why="The start hangs until its timeout, and the message names no host.",
        facts=(REACH,),
        judge=_judge_reach,
    ),
    Check(
        id="mtu",
        family=Family.NETWORK,
        title="the interfaces between hosts have the same MTU",
        reads="the MTU of the interface that leads to the other hosts",
        threshold="what most hosts have",
        source="one MTU on one network, as in RFC 894; what most hosts have counts; a "
        "warning, for TCP takes the smaller of two, and path-mtu finds what is lost",
        severity=Severity.WARN,
        fix="ip link set dev INTERFACE mtu BYTES, and in the network's configuration.",
        needs=_MANY,
        why="All that speak with the host send small packets, which takes more CPU; "
        "what is no TCP, such as RDMA over Ethernet, may lose large ones.",
        facts=(MTU,),
        judge=alike("mtu", Severity.WARN, MTU, "MTU"),
    ),
    Check(
        id="path-mtu",
        family=Family.NETWORK,
        title="packets as large as both ends allow arrive",
        reads="datagrams of several sizes that may not be cut; 64KiB by TCP",
        threshold="the smaller MTU of both ends",
        source="path MTU discovery (RFC 1191, RFC 8899)",
        severity=Severity.FAIL,
        fix="Give switches and tunnels between them the hosts' MTU, or the hosts "
        "theirs: ip link set dev INTERFACE mtu BYTES; and let ICMP 'too big' through.",
        needs=_MANY,
        why="Small messages pass, large ones hang or crawl.",
        facts=(REACH,),
        judge=_judge_packets,
    ),
    Check(
        id="latency-tail",
        family=Family.NETWORK,
        title="all round trips take about equally long",
        reads="up to 100 echoes of 8 bytes between all pairs",
        threshold=f"the 99th percentile is at most {TAIL_RATIO:g} times the median, or "
        f"{MIN_TAIL_S * 1e3:g} ms",
        source="ronde's own; a lost packet costs 200 ms, a busy machine tens of them",
        severity=Severity.WARN,
        fix="Look for retransmissions and drops: nstat -az TcpRetransSegs; ip -s link; "
        "and for pause frames: ethtool -S INTERFACE.",
        needs=_MANY,
        why="Every step waits for the slowest message of all ranks.",
        facts=(REACH,),
        judge=_judge_tails,
    ),
    Check(
        id="slow-link",
        family=Family.NETWORK,
        title="transfers to and from the host are as fast as between the others",
        reads="the fastest of a few TCP transfers of up to 1MiB between all pairs",
        threshold=f"{SLOW_SHARE:.0%} of the usual: the median over {MIN_HOSTS} or more "
        "hosts of the fastest each takes part in",
        source="ronde's own; so short a transfer tells a tenth from the whole, no more",
        severity=Severity.WARN,
        fix="Look at the rate and errors: ethtool INTERFACE; ip -s link; tc qdisc. "
        "Measure at length: ronde check --bandwidth.",
        needs="three hosts",
        why="The slowest link sets the pace of every reduction.",
        facts=(REACH,),
        judge=_judge_speeds,
    ),
    Check(
        id="free-ports",
        family=Family.NETWORK,
        title="the ports that you named are free",
        reads="an attempt to listen at each, where ports were named",
        threshold="it can be listened at",
        source="what a program that is to listen there needs; no tool's number",
        severity=Severity.WARN,
        fix="See who has it: ss -ltnp. Or take another port.",
        needs="--port",
        why="A run whose ranks meet at such a port does not start.",
        facts=(BUSY,),
        judge=_judge_busy,
    ),
)
"""Reaching each other."""
