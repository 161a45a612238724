"""Nodes of one job that are not alike."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ronde.topology.findings import Finding, Severity
from ronde.topology.graph import HostTopology, LinkKind
from ronde.topology.lint.host_view import told_gb_per_s
from ronde.topology.lint.rule import rate_loss
from ronde.topology.paths.speeds import max_nvlinks, nvlink_gb_per_s, port_gb_per_s


class FleetRule(NamedTuple):
    """Something in which the nodes of a job have to be alike.

    Attributes:
        name: What findings and options call it.
        meaning: What it looks for, one line.
        subject: What is counted, for people.
        measure: Returns what a host has of it, or None where nothing is told.
        rate: Returns the GB/s that this number stands for; 0 where it stands for none.
        consequence: Of a host with less.
        remedy: What to do.
    """

    name: str
    meaning: str
    subject: str
    measure: Callable[[HostTopology], float | None]
    rate: Callable[[HostTopology], float]
    consequence: str
    remedy: str


def lint_fleet(hosts: Sequence[HostTopology]) -> tuple[Finding, ...]:
    """Return in what hosts differ from what most of them are.

    Hosts that tell nothing of a thing are left aside; fewer than two have no fleet.
    """
    return tuple(finding for rule in FLEET_RULES for finding in _compare(rule, hosts))


def _compare(rule: FleetRule, hosts: Sequence[HostTopology]) -> Iterator[Finding]:
    told = [(host, num) for host in hosts if (num := rule.measure(host)) is not None]
    numbers = Counter(num for _, num in told)
    if len(numbers) < 2:
        return
    # With as many of either, what is more is taken for right.
    usual = max(numbers, key=lambda num: (numbers[num], num))
    should = max(rule.rate(host) for host, num in told if num == usual)
    for host, num in told:
        if num == usual:
            continue
        has = rule.rate(host)
        is_less = num < usual
        lost = rate_loss(has, should) if should else Severity.WARNING
        rates = f" {has:g} instead of {should:g} GB/s." if should and is_less else ""
        yield Finding(
            rule=rule.name,
            severity=lost if is_less else Severity.WARNING,
            element=host.name,
            what=f"It has {num:g} {rule.subject}, and {numbers[usual]} of "
            f"{len(told)} nodes have {usual:g}.",
            consequence=rule.consequence + rates,
            remedy=rule.remedy,
            has_gb_per_s=has if is_less else 0.0,
            should_gb_per_s=should if is_less else 0.0,
        )


def _num_gpus(host: HostTopology) -> float | None:
    return len(host.gpus)


def _fewest_nvlinks(host: HostTopology) -> float | None:
    if not host.gpus:
        return None
    counts: Counter[str] = Counter()
    for link in host.links:
        if link.kind is LinkKind.NVLINK and link.source != link.target:
            counts[link.source] += link.num_links
    # A source that tells more than the chip has must not pass for the better one.
    return min(min(counts[gpu.name], max_nvlinks(gpu.sm)) for gpu in host.gpus)


def _nvlink_rate(host: HostTopology) -> float:
    sm = max((gpu.sm for gpu in host.gpus), default=0)
    if sm <= 0:
        return 0.0
    return (_fewest_nvlinks(host) or 0) * nvlink_gb_per_s(sm)


def _port_rates(host: HostTopology) -> list[float]:
    """Return the GB/s of every port that carries traffic between hosts."""
    rates = [
        port_gb_per_s(port)
        for port in host.ports
        if port.bus_id and port.is_up and port.mbit_per_s > 0
    ]
    return [rate for rate in rates if 2 * rate >= max(rates)]


def _num_ports(host: HostTopology) -> float | None:
    return len(_port_rates(host)) or None


def _network_rate(host: HostTopology) -> float:
    return sum(_port_rates(host))


def _told_network_rate(host: HostTopology) -> float | None:
    return _network_rate(host) or None


def _slowest_gpu_link(host: HostTopology) -> float | None:
    gpus = {gpu.bus_id for gpu in host.gpus}
    rates = [told_gb_per_s(d) for d in host.devices if d.bus_id in gpus]
    return min((rate for rate in rates if rate), default=None)


def _slowest_gpu_rate(host: HostTopology) -> float:
    return _slowest_gpu_link(host) or 0.0


def _num_cores(host: HostTopology) -> float | None:
    return sum(len(node.cpus) for node in host.numa_nodes) or None


def _no_rate(host: HostTopology) -> float:
    del host
    return 0.0


FLEET_RULES = (
    FleetRule(
        name="node-gpus-differ",
        meaning="a node with another number of GPUs than most",
        subject="GPUs",
        measure=_num_gpus,
        rate=_no_rate,
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
        rate=_nvlink_rate,
        consequence="All nodes run with what the weakest has, often with 2 channels.",
        remedy="Look at nvidia-smi nvlink -s and the fabric manager on that node, or "
        "leave it out.",
    ),
    FleetRule(
        name="node-network-differs",
        meaning="a node whose network ports carry another sum than most",
        subject="GB/s of network",
        measure=_told_network_rate,
        rate=_network_rate,
        consequence="Collectives over the nodes run at the rate of the slowest.",
        remedy="Look at ibstat or ip link on that node for ports that are down or "
        "slow.",
    ),
    FleetRule(
        name="node-ports-differ",
        meaning="a node with another number of fast network ports than most",
        subject="fast network ports",
        measure=_num_ports,
        rate=_no_rate,
        consequence="Rails do not match: some GPUs reach their peers through switches "
        "of a higher tier.",
        remedy="Look at ibstat on that node.",
    ),
    FleetRule(
        name="node-gpu-links-differ",
        meaning="a node whose slowest GPU link is not that of most",
        subject="GB/s at its slowest GPU's PCI link",
        measure=_slowest_gpu_link,
        rate=_slowest_gpu_rate,
        consequence="Copies from and to the host, and the network, run slower there.",
        remedy="Look at lspci -vv for LnkSta below LnkCap on that node.",
    ),
    FleetRule(
        name="node-cores-differ",
        meaning="a node with another number of cores than most",
        subject="hardware threads",
        measure=_num_cores,
        rate=_no_rate,
        consequence="Loading data may be slower there, and all wait for it.",
        remedy="Look at lscpu for offline cores, and at SMT in the firmware.",
    ),
)
