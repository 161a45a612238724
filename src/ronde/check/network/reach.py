"""Do hosts reach each other, at full size and at once?

Every host listens, and then every host reaches every other; see ``visits`` for what
each host does. Of pairs with a fault the host that they share is named.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ronde.check.check import (
    FAIL,
    WARN,
    Fleet,
    HostPair,
    Problem,
    Problems,
    Value,
    check,
    name_some,
)
from ronde.check.hosts import HostSet, ProbeStep, Reply
from ronde.check.majority import same_everywhere, spell
from ronde.check.network.interfaces import ADDRESS
from ronde.units import format_size

# By the host's and the other's name: the fact ``REACH``; a pair is in this order.
Reached = Mapping[str, Mapping[str, Mapping[str, Any]]]
REACH = "network.reach"
"""Fact: by the other host's name, what ``visits.reach`` returns of it.

Where connecting failed, ``is_heard`` is whether datagrams arrived there.
"""

# Fact: of the interface that leads to most other hosts, in bytes.
MTU = "network.peer_mtu"
# Of more hosts, each reaches its neighbours in a ring, and some at random.
_MAX_ALL_PAIRS = 32
_NUM_SHIFTS = 4
_LISTEN_S, _REACH_S = 4.0, 12.0


def run(hosts: HostSet) -> None:
    """Have the hosts reach each other; what looks bad gets a second try."""
    if len(hosts.names) < 2:
        return
    listening = hosts.ask_all({"do": "listen"}, _LISTEN_S)
    for host, reply in listening.items():
        hosts.note(host, ADDRESS, hosts.addresses[host])
        if reply.failure:
            hosts.note_unread(host, REACH, reply.failure)
    plan = plan_partners([n for n in hosts.names if not listening[n].failure])
    reached = _reach(hosts, listening, plan)
    doubtful = {*failing_pairs(reached), *lossy_pairs(reached)}
    again = {
        host: [other for other in others if (host, other) in doubtful]
        for host, others in plan.items()
    }
    for (host, other), found in _each(_reach(hosts, listening, again)):
        reached[host][other] = better(reached[host][other], dict(found))
    if failing := failing_pairs(reached):
        heard = hosts.ask_all({"do": "listen"}, _LISTEN_S)
        for host, other in failing:
            if other in heard and not heard[other].failure:
                is_heard = host in heard[other].values["heard"]
                reached[host][other]["is_heard"] = is_heard
    for host, others in reached.items():
        hosts.note(host, REACH, others)
        if mtu := own_mtu(others):
            hosts.note(host, MTU, mtu)


def plan_partners(names: Sequence[str]) -> dict[str, list[str]]:
    """Return whom each host reaches and is reached by; few meet at one host."""
    num = len(names)
    shifts = list(range(1, num))
    if num > _MAX_ALL_PAIRS:
        chosen = random.Random(num).sample(range(2, (num + 1) // 2), _NUM_SHIFTS)  # noqa: S311
        shifts = sorted({s % num for each in (1, *chosen) for s in (each, -each)})
    return {
        name: [names[(place + shift) % num] for shift in shifts]
        for place, name in enumerate(names)
    }


def better(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the better of two tries: one success shows that it works."""
    if second["error"] or (second["lost_bytes"] and not first["error"]):
        return first if not first["error"] else second
    mtu = max(first.get("mtu") or 0, second.get("mtu") or 0)
    return first | second | ({"mtu": mtu} if mtu else {})


def _reach(
    hosts: HostSet, listening: Mapping[str, Reply], plan: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Return what hosts find of those they are to reach; store why one could not."""
    questions: dict[str, dict[str, Value]] = {}
    for host, others in plan.items():
        targets = [
            {"name": o, "address": hosts.addresses[o], **listening[o].values}
            for o in others
            if hosts.addresses[o]
        ]
        if targets:
            questions[host] = {"do": "reach", "name": host, "targets": targets}
    reached: dict[str, dict[str, Any]] = {}
    for host, reply in hosts.ask(questions, _REACH_S).items():
        if reply.failure:
            hosts.note_unread(host, REACH, reply.failure)
        else:
            reached[host] = reply.values["reached"]
    return reached


STEP = ProbeStep("reaching", run, (ADDRESS, MTU, REACH))


def _each(reached: Reached) -> Iterator[tuple[HostPair, Mapping[str, Any]]]:
    for host, others in reached.items():
        for other, found in others.items():
            yield (host, other), found


def failing_pairs(reached: Reached) -> list[HostPair]:
    return [pair for pair, found in _each(reached) if found["error"]]


def lost_pairs(reached: Reached) -> list[HostPair]:
    """Return the failing pairs, without those whose traffic does arrive.

    A connection needs both directions. Where neither host can connect to the other,
    but datagrams arrive in one direction, only the other direction is at fault.
    """
    failing = dict.fromkeys(failing_pairs(reached))
    arriving = {(a, b) for a, b in failing if reached[a][b].get("is_heard")}
    innocent = {p for p in arriving if p[::-1] in failing and p[::-1] not in arriving}
    return [pair for pair in failing if pair not in innocent]


def lossy_pairs(reached: Reached) -> list[HostPair]:
    """Return the pairs that lose messages or packets as large as both ends allow."""
    mtus = {host: own_mtu(others) for host, others in reached.items()}
    found: list[HostPair] = []
    for pair, each in _each(reached):
        least = min(each["own_mtu"], mtus.get(pair[1], 0))
        is_small = bool(each.get("mtu")) and each["mtu"] < least
        if not each["error"] and (each["lost_bytes"] or is_small):
            found.append(pair)
    return found


def own_mtu(others: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the MTU of the interface that leads to most others; 0 if to none."""
    counts = Counter(each["own_mtu"] for each in others.values() if each["own_mtu"])
    return counts.most_common(1)[0][0] if counts else 0


def blame(
    pairs: Collection[HostPair], at_receiver: Collection[HostPair] = ()
) -> dict[str, list[HostPair]]:
    """Return the hosts that share pairs with a fault, and by host its pairs.

    Again and again the host with faults with most others is taken, in a draw all of
    them. Of a pair that shares a host with no other, it is the sender, or of those in
    ``at_receiver`` the receiver; where both directions are at fault, both.
    """
    left = list(dict.fromkeys(pairs))
    blamed: dict[str, list[HostPair]] = {}
    while left:
        links = {frozenset(pair) for pair in left}
        counts = Counter(host for link in links for host in link)
        most = max(counts.values())
        if most == 1:
            for pair in left:
                host = pair[1] if pair in at_receiver else pair[0]
                blamed.setdefault(host, []).append(pair)
            break
        worst = {host for host, count in counts.items() if count == most}
        for host in worst:
            blamed[host] = [pair for pair in left if host in pair]
        left = [pair for pair in left if not worst.intersection(pair)]
    return blamed


def _name_ways(
    host: str,
    pairs: Sequence[HostPair],
    outwards: str = "to {}",
    inwards: str = "from {}",
) -> str:
    """Return with whom a host has faults, each direction by its pattern."""
    to = [other for sender, other in pairs if sender == host]
    by = [sender for sender, other in pairs if other == host]
    ways = ((outwards, to), (inwards, by))
    return " and ".join(p.format(name_some(names)) for p, names in ways if names)


@check(FAIL, ADDRESS)
def own_address(fleet: Fleet) -> Problems:
    """There is an address by which others can reach the host.

    reads: the addresses of its interfaces, and the other hosts' routes to them
    threshold: at least one that is neither loopback nor link-local
    source: what any connection between hosts needs; no tool's number
    fix: Bring the interface up and give it an address: ip address; ip link.
    needs: several hosts
    why: Ranks on other hosts cannot meet those of this one; the start fails.
    """
    for host, address in fleet.known(ADDRESS).items() if len(fleet.hosts) > 1 else ():
        if not address:
            what = "it has only loopback and link-local addresses"
            yield Problem(what, host=host)


@check(FAIL, REACH)
def reachable(fleet: Fleet) -> Problems:
    """Hosts can connect to each other at ports that the kernel chooses.

    reads: TCP and datagrams between all pairs; above 32 hosts a ring and eight others
    threshold: every connection is made within a second, at the second try at last
    source: NCCL and Gloo: every rank listens at a port that the kernel chooses
    fix: Let TCP through: nft list ruleset, or iptables -S; then routes and cloud rules.
    needs: several hosts
    why: The start hangs until its timeout, and the message names no host.
    """
    reached = fleet.known(REACH)
    failing, pairs = failing_pairs(reached), lost_pairs(reached)
    refused = [(a, b) for a, b in pairs if reached[a][b]["is_refused"]]
    for host, own in blame(pairs, refused).items():
        sender, receiver = own[0]
        first = reached[sender][receiver]
        what = _name_ways(
            host, own, "it cannot connect to {}", "{} cannot connect to it"
        )
        if not any((b, a) in own for a, b in own):
            is_half = set(own).isdisjoint((b, a) for a, b in failing)
            what += f"; the other way {'it works' if is_half else 'packets arrive'}"
        what += f"; {first['error']}" + "; datagrams arrive" * bool(
            first.get("is_heard")
        )
        fix = (
            f"Let TCP through from {sender} to {receiver}, all ports: nft list "
            f"ruleset, or iptables -S, on {receiver} and {sender}; then routes (ip "
            "route get) and cloud rules."
        )
        yield Problem(what, fix=fix, host=host)


@same_everywhere(WARN, MTU, "MTU")
def mtu(size_bytes: int) -> str:
    """The interfaces between hosts have the same MTU.

    reads: the MTU of the interface that leads to the other hosts
    threshold: what most hosts have
    source: one MTU on one network, as in RFC 894; TCP takes the smaller of two
    fix: ip link set dev INTERFACE mtu BYTES, and in the network's configuration.
    needs: several hosts
    why: Small packets take more CPU; RDMA over Ethernet may lose large ones.
    """
    return spell(size_bytes)


@check(FAIL, REACH)
def path_mtu(fleet: Fleet) -> Problems:
    """Packets as large as both ends allow arrive.

    reads: datagrams of several sizes that may not be cut; 64KiB by TCP
    threshold: the smaller MTU of both ends
    source: path MTU discovery (RFC 1191, RFC 8899)
    fix: Give switches and tunnels between them the hosts' MTU, or the hosts theirs: ip
        link set dev INTERFACE mtu BYTES; and let ICMP 'too big' through.
    needs: several hosts
    why: Small messages pass, large ones hang or crawl.
    """
    reached = fleet.known(REACH)
    for host, own in blame(lossy_pairs(reached)).items():
        ways = _name_ways(host, own)
        least = min(int(reached[a][b].get("mtu") or 0) for a, b in own)
        here = own_mtu(reached[host]) if host in reached else 0
        if least and least < here:
            what = f"{ways}: no packets above {least} bytes arrive, its MTU is {here}"
        else:
            size = format_size(max(reached[a][b]["lost_bytes"] for a, b in own))
            what = f"{ways}: messages of {size} are lost, those of 8 bytes arrive"
        yield Problem(what, host=host)
