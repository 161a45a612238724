"""Pairs of hosts with a fault: which are they, and which host do they share?"""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

Pair = tuple[str, str]
"""From whom, to whom."""

Reached = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By the host's and the other's name: the fact ``REACH``."""

REACH = "network.reach"
"""Fact: by the other host's name, what ``operations.reaching.reach`` tells of it.

Where connecting failed, ``is_heard`` says whether datagrams arrived there.
"""

MTU = "network.peer_mtu"
"""Fact: of the interface that leads to most other hosts, in bytes."""

BUSY = "network.busy_ports"
"""Fact: ports that the user wants to be free and that are in use."""

TAIL_RATIO = 10.0
"""A 99th percentile round trip so many times the median is a tail,"""

MIN_TAIL_S = 0.050
"""and not below this: a busy machine's scheduler makes tens of milliseconds.

A lost packet costs 200 ms, the least that Linux waits before it sends it again.
"""

SLOW_SHARE = 0.3
"""Slow is what has less than this share of the usual speed."""

MIN_HOSTS = 3
"""Of fewer there is no usual speed."""


def failing_pairs(reached: Reached) -> list[Pair]:
    """Return the pairs of which the first cannot connect to the second."""
    return [
        (host, other)
        for host, others in reached.items()
        for other, told in others.items()
        if told["error"]
    ]


def lost_pairs(reached: Reached) -> list[Pair]:
    """Return the failing pairs, without those whose traffic does arrive.

    A connection needs both directions. Where neither host can connect to the other,
    but datagrams arrive in one direction, only the other direction is at fault.
    """
    failing = failing_pairs(reached)
    arriving = {
        (host, other) for host, other in failing if reached[host][other].get("is_heard")
    }
    return [
        (host, other)
        for host, other in failing
        if (host, other) not in arriving
        or (other, host) not in failing
        or (other, host) in arriving
    ]


def lossy_pairs(reached: Reached) -> list[Pair]:
    """Return the pairs on whose way large messages or packets are lost.

    A packet is as large as both ends allow.
    """
    mtus = {host: own_mtu(others) for host, others in reached.items()}
    found: list[Pair] = []
    for host, others in reached.items():
        for other, told in others.items():
            least = min(told["own_mtu"], mtus.get(other, 0))
            is_small = bool(told.get("mtu")) and told["mtu"] < least
            if not told["error"] and (told["lost_bytes"] or is_small):
                found.append((host, other))
    return found


def own_mtu(others: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the MTU of the interface that leads to most others; 0 if to none."""
    counts = Counter(told["own_mtu"] for told in others.values() if told["own_mtu"])
    return counts.most_common(1)[0][0] if counts else 0


def lagging_pairs(reached: Reached) -> list[Pair]:
    """Return the pairs some of whose round trips take far longer than most."""
    return [
        (host, other)
        for host, others in reached.items()
        for other, told in others.items()
        if told.get("p99_s", 0) > max(MIN_TAIL_S, TAIL_RATIO * told.get("rtt_s", 0))
    ]


def usual_speed(reached: Reached) -> float:
    """Return the usual speed in 1e6 bytes a second; 0 for less than ``MIN_HOSTS``.

    It is the median over hosts of the fastest transfer that each takes part in: one
    slow host among three makes two of three links slow, but only itself.
    """
    fastest: dict[str, float] = {}
    for pair, speed in _speeds(reached).items():
        for host in pair:
            fastest[host] = max(fastest.get(host, 0.0), speed)
    return statistics.median(fastest.values()) if len(fastest) >= MIN_HOSTS else 0.0


def slow_pairs(reached: Reached) -> list[Pair]:
    """Return the pairs with transfers far slower than usual."""
    least = SLOW_SHARE * usual_speed(reached)
    return [pair for pair, speed in _speeds(reached).items() if speed < least]


def _speeds(reached: Reached) -> dict[Pair, float]:
    return {
        (host, other): told["mb_per_s"]
        for host, others in reached.items()
        for other, told in others.items()
        if told.get("mb_per_s")
    }


def blame(
    pairs: Collection[Pair], at_receiver: Collection[Pair] = ()
) -> dict[str, list[Pair]]:
    """Return the hosts that share the pairs, and by host its pairs.

    Again and again the host with faults with most others is taken. Where several have
    equally many, all of them are. Of a pair that shares a host with no other, it is
    the sender if only one direction is at fault, and else both.

    Args:
        pairs: Those with a fault.
        at_receiver: Those of them of which it is known that the receiver is at fault.
    """
    left = list(dict.fromkeys(pairs))
    blamed: dict[str, list[Pair]] = {}
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
