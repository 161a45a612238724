"""Interfaces: their speed, their size of packets, and whether they stay up."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.fleet import Fleet
from ronde.check.reachability import REACH

MAX_DOWNS_A_DAY = 5
DATA_MBIT_PER_S = 25_000
LEAST_JUMBO = 8500

_INTERFACES = "network.interfaces"
_PORTS = "network.rdma_ports"
_UPTIME = "network.uptime_s"
_DAY_S = 86400


class Slower(NamedTuple):
    """What is slower on a host than on most.

    Attributes:
        host: Where.
        name: Of the interface or port.
        mbit_per_s: What it has.
        usual: What most have, for people.
    """

    host: str
    name: str
    mbit_per_s: int
    usual: str


def find_slower(
    fleet: Fleet, fact: str, pick: Callable[[dict[str, Any]], int]
) -> Iterator[Slower]:
    """Yield what is slower than the one of the same name on most other hosts.

    In a draw the fastest counts: no interface is faster than it should be.

    Args:
        fleet: The hosts.
        fact: Its values are objects by the name of an interface or port.
        pick: Returns the Mbit/s of one; 0 leaves it out.
    """
    hosts = list(fleet.having(fact))
    for name in dict.fromkeys(name for each in hosts for name in each.values[fact]):
        rates = {
            each.host: pick(each.values[fact][name])
            for each in hosts
            if name in each.values[fact]
        }
        counts = Counter(rate for rate in rates.values() if rate)
        if not counts:
            continue
        usual = max(counts, key=lambda rate: (counts[rate], rate))
        for host, rate in rates.items():
            if 0 < rate < usual:
                num = counts[usual]
                told = f"{usual / 1000:g} Gbit/s on {num} host{'s' * (num > 1)}"
                yield Slower(host, name, rate, told)


def _judge_speed(fleet: Fleet) -> Iterator[Finding]:
    def pick(interface: dict[str, Any]) -> int:
        is_link = interface["kind"] == "physical" and interface["state"] == "up"
        return interface["mbit_per_s"] if is_link else 0

    for host, name, rate, usual in find_slower(fleet, _INTERFACES, pick):
        what = f"{name} runs at {rate / 1000:g} Gbit/s"
        fix = f"ethtool {name}: look at speed and errors; then cable and switch port."
        yield Finding("link-speed", Severity.WARN, host, what, usual, fix)


def _judge_flaps(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(_INTERFACES, _UPTIME):
        days = max(1.0, facts.values[_UPTIME] / _DAY_S)
        # Each time a link goes down it comes up again.
        downs: dict[str, int] = {
            name: interface["carrier_changes"] // 2
            for name, interface in facts.values[_INTERFACES].items()
            if interface["kind"] == "physical"
        }
        downs |= {n: port["downs"] for n, port in facts.values.get(_PORTS, {}).items()}
        for name, number in downs.items():
            if number > MAX_DOWNS_A_DAY * days:
                what = f"{name} went down {number} times in {days:.3g} days or less"
                yield Finding("link-flaps", Severity.WARN, facts.host, what)


def _judge_jumbo(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(_INTERFACES, REACH):
        leading = {told["interface"] for told in facts.values[REACH].values()}
        for name, interface in facts.values[_INTERFACES].items():
            is_real = interface["kind"] != "paravirtual"
            is_fast = is_real and interface["mbit_per_s"] >= DATA_MBIT_PER_S
            if name in leading and is_fast and interface["mtu"] < LEAST_JUMBO:
                speed = f"{interface['mbit_per_s'] / 1000:g} Gbit/s"
                what = f"{name} ({speed}) has an MTU of {interface['mtu']}"
                yield Finding("jumbo-frames", Severity.INFORM, facts.host, what)


CHECKS = (
    Check(
        id="link-speed",
        family=Family.NETWORK,
        title="links run as fast as on the other hosts",
        reads="/sys/class/net/*/speed of physical interfaces that are up",
        threshold="what the interface of the same name has on most hosts",
        source="most hosts' speed; where two speeds are equally many, the faster one",
        severity=Severity.WARN,
        fix="ethtool INTERFACE: look at speed and errors; then cable and switch port.",
        needs="several hosts",
        why="The slowest link sets the pace of every reduction.",
        facts=(_INTERFACES,),
        judge=_judge_speed,
    ),
    Check(
        id="link-flaps",
        family=Family.NETWORK,
        title="links stay up",
        reads="carrier_changes of physical interfaces and link_downed of RDMA ports "
        "since the start, over the uptime",
        threshold=f"at most {MAX_DOWNS_A_DAY} times a day, the first day whole",
        source="Azure's node health checks drain a host at five flaps in 24 hours",
        severity=Severity.WARN,
        fix="Look when it was: journalctl -k | grep -i 'link is'. Then cable, "
        "transceiver and switch port; drain the host while it goes on.",
        needs="",
        why="A link that goes away for seconds ends a run, or stops it for minutes.",
        facts=(_INTERFACES, _UPTIME),
        judge=_judge_flaps,
    ),
    Check(
        id="jumbo-frames",
        family=Family.NETWORK,
        title="fast links carry large packets",
        reads="the MTU of the interface that leads to other hosts",
        threshold=f"{LEAST_JUMBO} bytes from {DATA_MBIT_PER_S // 1000} Gbit/s on",
        source="jumbo frames have about 9000 bytes; some clouds stop at 8500 to 8900",
        severity=Severity.INFORM,
        fix="If every switch between takes them: ip link set dev INTERFACE mtu 9000, "
        "on all hosts at once.",
        needs="several hosts",
        why="TCP takes more CPU a byte with small packets.",
        facts=(_INTERFACES, REACH),
        judge=_judge_jumbo,
    ),
)
"""Interfaces."""
