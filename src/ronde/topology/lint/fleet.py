"""Nodes of one job that are not alike."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ronde.topology.findings import Diagnostic, Level
from ronde.topology.graph import HostTopology, LinkKind
from ronde.topology.lint.view import known_gb_per_s, rate_loss
from ronde.topology.paths.speeds import max_nvlinks, nvlink_gb_per_s, port_gb_per_s


class FleetRule(NamedTuple):
    """Something in which the nodes of a job have to be alike."""

    name: str  # What findings and options call it.
    meaning: str  # What it looks for, one line.
    subject: str  # What is counted, for people.
    measure: Callable[[HostTopology], float]  # What a host has; below 0 if unknown.
    consequence: str  # Of a host with less.
    remedy: str  # What to do.
    # GB/s of one unit of it on a host; none where it stands for no bandwidth.
    rate: Callable[[HostTopology], float] | None = None


def lint_fleet(hosts: Sequence[HostTopology]) -> tuple[Diagnostic, ...]:
    """Return in what hosts differ from what most of them are.

    Hosts whose number is unknown are left aside; fewer than two have no fleet.
    """
    return tuple(finding for rule in FLEET_RULES for finding in _compare(rule, hosts))


def _compare(rule: FleetRule, hosts: Sequence[HostTopology]) -> Iterator[Diagnostic]:
    known = [(host, num) for host in hosts if (num := rule.measure(host)) >= 0]
    numbers = Counter(num for _, num in known)
    if len(numbers) < 2:
        return
    # With as many of either, what is more is taken for right.
    usual = max(numbers, key=lambda num: (numbers[num], num))
    rates = [rule.rate(host) if rule.rate else 0.0 for host, _ in known]
    should = max(
        num * rate for (_, num), rate in zip(known, rates, strict=True) if num == usual
    )
    for (host, num), rate in zip(known, rates, strict=True):
        if num == usual:
            continue
        has, is_less = num * rate, num < usual
        has_rate = bool(should) and is_less
        yield Diagnostic(
            rule=rule.name,
            severity=rate_loss(has, should) if has_rate else Level.WARNING,
            element=host.name,
            what=f"It has {num:g} {rule.subject}, and {numbers[usual]} of "
            f"{len(known)} nodes have {usual:g}.",
            consequence=rule.consequence
            + (f" {has:g} instead of {should:g} GB/s." if has_rate else ""),
            remedy=rule.remedy,
            has_gb_per_s=has if is_less else 0.0,
            should_gb_per_s=should if is_less else 0.0,
        )


def _fewest_nvlinks(host: HostTopology) -> float:
    counts: Counter[str] = Counter()
    for link in host.links:
        if link.kind is LinkKind.NVLINK and link.source != link.target:
            counts[link.source] += link.num_links
    # A source with more links than the chip has must not pass for the better one.
    totals = (min(counts[gpu.name], max_nvlinks(gpu.sm)) for gpu in host.gpus)
    return min(totals, default=-1)


def _nvlink_rate(host: HostTopology) -> float:
    sm = max((gpu.sm for gpu in host.gpus), default=0)
    return nvlink_gb_per_s(sm) if sm > 0 else 0.0


def _port_rates(host: HostTopology) -> list[float]:
    """Return the GB/s of every port that carries traffic between hosts."""
    rates = [
        port_gb_per_s(port)
        for port in host.ports
        if port.bus_id and port.is_up and port.mbit_per_s > 0
    ]
    return [rate for rate in rates if 2 * rate >= max(rates)]


def _slowest_gpu_link(host: HostTopology) -> float:
    gpus = {gpu.bus_id for gpu in host.gpus}
    rates = [known_gb_per_s(d) for d in host.devices if d.bus_id in gpus]
    return min((rate for rate in rates if rate), default=-1)


def _num_gpus(host: HostTopology) -> float:
    return len(host.gpus)


def _network_rate(host: HostTopology) -> float:
    return sum(_port_rates(host)) or -1


def _num_ports(host: HostTopology) -> float:
    return len(_port_rates(host)) or -1


def _num_cpus(host: HostTopology) -> float:
    return sum(len(node.cpus) for node in host.numa_nodes) or -1


def _unit(_: HostTopology) -> float:
    return 1.0


FLEET_RULES = (
    FleetRule(
        name="node-gpus-differ",
        meaning="a node with another number of GPUs than most",
        subject="GPUs",
        measure=_num_gpus,
        consequence="NCCL cannot pair GPUs of the nodes rank by rank: it falls back "
        "to fewer channels, and rings wait for the smallest node.",
        remedy="Look for the missing GPU in nvidia-smi -L and dmesg (Xid 79: it fell "
        "off the bus), or start the same number of ranks everywhere.",
    ),
    FleetRule(
        name="node-nvlinks-differ",
        meaning="a node whose GPUs have other NVLinks than most nodes'",
        subject="NVLinks at the GPU with the fewest",
        measure=_fewest_nvlinks,
        consequence="All nodes run with what the weakest has, often with 2 channels.",
        remedy="Look at nvidia-smi nvlink -s and the fabric manager on that node, or "
        "leave it out.",
        rate=_nvlink_rate,
    ),
    FleetRule(
        name="node-network-differs",
        meaning="a node whose network ports carry another sum than most",
        subject="GB/s of network",
        measure=_network_rate,
        consequence="Collectives over the nodes run at the rate of the slowest.",
        remedy="Look at ibstat or ip link on that node for ports that are down or "
        "slow.",
        rate=_unit,
    ),
    FleetRule(
        name="node-ports-differ",
        meaning="a node with another number of fast network ports than most",
        subject="fast network ports",
        measure=_num_ports,
        consequence="Rails do not match: some GPUs reach their peers through switches "
        "of a higher tier.",
        remedy="Look at ibstat on that node.",
    ),
    FleetRule(
        name="node-gpu-links-differ",
        meaning="a node whose slowest GPU link is not that of most",
        subject="GB/s at its slowest GPU's PCI link",
        measure=_slowest_gpu_link,
        consequence="Copies from and to the host, and the network, run slower there.",
        remedy="Look at lspci -vv for LnkSta below LnkCap on that node.",
        rate=_unit,
    ),
    FleetRule(
        name="node-cores-differ",
        meaning="a node with another number of cores than most",
        subject="hardware threads",
        measure=_num_cpus,
        consequence="Loading data may be slower there, and all wait for it.",
        remedy="Look at lscpu for offline cores, and at SMT in the firmware.",
    ),
)
