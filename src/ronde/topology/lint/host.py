"""All rules; one host against them, and several hosts against each other."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ronde.topology.graph import Diagnostic, HostTopology, Level, LinkKind
from ronde.topology.lint import devices, links
from ronde.topology.lint.view import Rule, known_gb_per_s, rate_loss, view_of
from ronde.topology.paths.speeds import max_nvlinks, nvlink_gb_per_s, port_gb_per_s
from ronde.topology.search_graph import GRAPH_RULES

HOST_RULES = tuple(
    rule
    for module in (links, devices)
    for rule in vars(module).values()
    if isinstance(rule, Rule)
)


def lint_host(host: HostTopology) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a host, or looks so, in the order of the rules."""
    view = view_of(host)
    return tuple(finding for rule in HOST_RULES for finding in rule.find(view))


def lint_fleet(hosts: Sequence[HostTopology]) -> tuple[Diagnostic, ...]:
    """Return in what hosts differ from what most of them are.

    Hosts whose number is unknown are left aside; fewer than two have no fleet.
    """
    return tuple(finding for rule in FLEET_RULES for finding in rule.find(hosts))


def _unit(_: HostTopology) -> float:
    return 1.0


class FleetRule(NamedTuple):
    """Something in which the nodes of a job have to be alike."""

    name: str  # In findings and options.
    meaning: str  # What it looks for, one line.
    subject: str  # What is counted, for people.
    measure: Callable[[HostTopology], float]  # What a host has; below 0 if unknown.
    consequence: str  # Of a host with less.
    remedy: str
    # GB/s of one unit of it on a host; none where it stands for no bandwidth.
    rate: Callable[[HostTopology], float] | None = None

    def find(self, hosts: Sequence[HostTopology]) -> Iterator[Diagnostic]:
        """Yield a finding for every host that has not what most have."""
        known = [(host, num) for host in hosts if (num := self.measure(host)) >= 0]
        counts = Counter(num for _, num in known)
        if len(counts) < 2:
            return
        # With as many of either, what is more is taken for right.
        usual = max(counts, key=lambda num: (counts[num], num))
        rates = [self.rate(host) if self.rate else 0.0 for host, _ in known]
        sums = [num * rate for (_, num), rate in zip(known, rates, strict=True)]
        should = max(s for (_, n), s in zip(known, sums, strict=True) if n == usual)
        for (host, num), has in zip(known, sums, strict=True):
            is_less = num < usual
            has_rate = bool(should) and is_less
            loss = f" {has:g} instead of {should:g} GB/s." if has_rate else ""
            if num != usual:
                yield Diagnostic(
                    self.name,
                    rate_loss(has, should) if has_rate else Level.WARNING,
                    host.name,
                    f"It has {num:g} {self.subject}, and {counts[usual]} of "
                    f"{len(known)} nodes have {usual:g}.",
                    self.consequence + loss,
                    self.remedy,
                    has if is_less else 0.0,
                    should if is_less else 0.0,
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


FLEET_RULES = (
    FleetRule(
        "node-gpus-differ",
        "a node with another number of GPUs than most",
        "GPUs",
        _num_gpus,
        "NCCL cannot pair GPUs of the nodes rank by rank: it falls back to fewer "
        "channels, and rings wait for the smallest node.",
        "Look for the missing GPU in nvidia-smi -L and dmesg (Xid 79: it fell off the "
        "bus), or start the same number of ranks everywhere.",
    ),
    FleetRule(
        "node-nvlinks-differ",
        "a node whose GPUs have other NVLinks than most nodes'",
        "NVLinks at the GPU with the fewest",
        _fewest_nvlinks,
        "All nodes run with what the weakest has, often with 2 channels.",
        "Look at nvidia-smi nvlink -s and the fabric manager on that node, or leave it "
        "out.",
        _nvlink_rate,
    ),
    FleetRule(
        "node-network-differs",
        "a node whose network ports carry another sum than most",
        "GB/s of network",
        _network_rate,
        "Collectives over the nodes run at the rate of the slowest.",
        "Look at ibstat or ip link on that node for ports that are down or slow.",
        _unit,
    ),
    FleetRule(
        "node-ports-differ",
        "a node with another number of fast network ports than most",
        "fast network ports",
        _num_ports,
        "Rails do not match: some GPUs reach their peers through switches of a higher "
        "tier.",
        "Look at ibstat on that node.",
    ),
    FleetRule(
        "node-gpu-links-differ",
        "a node whose slowest GPU link is not that of most",
        "GB/s at its slowest GPU's PCI link",
        _slowest_gpu_link,
        "Copies from and to the host, and the network, run slower there.",
        "Look at lspci -vv for LnkSta below LnkCap on that node.",
        _unit,
    ),
    FleetRule(
        "node-cores-differ",
        "a node with another number of cores than most",
        "hardware threads",
        _num_cpus,
        "Loading data may be slower there, and all wait for it.",
        "Look at lscpu for offline cores, and at SMT in the firmware.",
    ),
)


class CatalogueEntry(NamedTuple):
    """A rule as people choose it."""

    subject: str
    name: str
    meaning: str


CATALOGUE = (
    *(CatalogueEntry("a host", rule.name, rule.meaning) for rule in HOST_RULES),
    *(CatalogueEntry("several hosts", each.name, each.meaning) for each in FLEET_RULES),
    *(CatalogueEntry("an NCCL graph file", *each) for each in GRAPH_RULES.items()),
)
"""All rules, by what they look at."""
