"""Rules on several hosts, which have to be alike; and the list of all rules."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ronde.topology.graph import Diagnostic, HostTopology, Level, LinkKind
from ronde.topology.lint.host import HOST_RULES, known_gb_per_s, rate_loss
from ronde.topology.paths.speeds import max_nvlinks, nvlink_gb_per_s, port_gb_per_s
from ronde.topology.search_graph import GRAPH_RULES


def lint_fleet(hosts: Sequence[HostTopology]) -> tuple[Diagnostic, ...]:
    """Return in what hosts differ from what most of them are.

    Hosts whose number is unknown are left aside; fewer than two have no fleet.
    """
    return tuple(finding for rule in FLEET_RULES for finding in rule.find(hosts))


class FleetRule(NamedTuple):
    """Something in which the nodes of a job have to be alike."""

    name: str  # In findings and options.
    meaning: str  # What it looks for, one line.
    # What a host has, below 0 if unknown; and the GB/s of one of it, 0 for none.
    measure: Callable[[HostTopology], tuple[float, float]]
    subject: str  # What is counted, for people.
    consequence: str  # Of a host with less.
    remedy: str

    def find(self, hosts: Sequence[HostTopology]) -> Iterator[Diagnostic]:
        """Yield a finding for every host that has not what most have."""
        known = [
            (host, num, num * rate)
            for host in hosts
            for num, rate in [self.measure(host)]
            if num >= 0
        ]
        counts = Counter(num for _, num, _ in known)
        # With as many of either, what is more is taken for right.
        usual = max(counts, key=lambda num: (counts[num], num), default=0)
        should = max((sum_ for _, num, sum_ in known if num == usual), default=0.0)
        for host, num, has in known:
            if num == usual:
                continue
            is_loss = bool(should) and num < usual
            severity, loss = Level.WARNING, ""
            if is_loss:
                severity = rate_loss(has, should)
                loss = f" {has:g} instead of {should:g} GB/s."
            what = f"It has {num:g} {self.subject}, and {counts[usual]} of {len(known)}"
            yield Diagnostic(
                self.name,
                severity,
                host.name,
                f"{what} nodes have {usual:g}.",
                self.consequence + loss,
                self.remedy,
                *((has, should) if is_loss else (0.0, 0.0)),
            )


def _gpus(host: HostTopology) -> tuple[float, float]:
    return len(host.gpus), 0.0


def _cpus(host: HostTopology) -> tuple[float, float]:
    return sum(len(node.cpus) for node in host.numa_nodes) or -1, 0.0


def _fewest_nvlinks(host: HostTopology) -> tuple[float, float]:
    counts: Counter[str] = Counter()
    for link in host.links:
        if link.kind is LinkKind.NVLINK and link.source != link.target:
            counts[link.source] += link.num_links
    # A source with more links than the chip has must not pass for the better one.
    totals = (min(counts[gpu.name], max_nvlinks(gpu.sm)) for gpu in host.gpus)
    sm = max((gpu.sm for gpu in host.gpus), default=0)
    return min(totals, default=-1), nvlink_gb_per_s(sm) if sm > 0 else 0.0


def _port_rates(host: HostTopology) -> list[float]:
    """Return the GB/s of every port that carries traffic between hosts."""
    rates = [
        port_gb_per_s(port)
        for port in host.ports
        if port.bus_id and port.is_up and port.mbit_per_s > 0
    ]
    return [rate for rate in rates if 2 * rate >= max(rates)]


def _network(host: HostTopology) -> tuple[float, float]:
    return sum(_port_rates(host)) or -1, 1.0


def _ports(host: HostTopology) -> tuple[float, float]:
    return len(_port_rates(host)) or -1, 0.0


def _slowest_gpu_link(host: HostTopology) -> tuple[float, float]:
    gpus = {gpu.bus_id for gpu in host.gpus}
    rates = [known_gb_per_s(d) for d in host.devices if d.bus_id in gpus]
    return min((rate for rate in rates if rate), default=-1), 1.0


FLEET_RULES = (
    FleetRule(
        "node-gpus-differ",
        "a node with another number of GPUs than most",
        _gpus,
        "GPUs",
        "NCCL cannot pair GPUs of the nodes rank by rank: it falls back to fewer "
        "channels, and rings wait for the smallest node.",
        "Look for the missing GPU in nvidia-smi -L and dmesg (Xid 79: it fell off the "
        "bus), or start the same number of ranks everywhere.",
    ),
    FleetRule(
        "node-nvlinks-differ",
        "a node whose GPUs have other NVLinks than most nodes'",
        _fewest_nvlinks,
        "NVLinks at the GPU with the fewest",
        "All nodes run with what the weakest has, often with 2 channels.",
        "Look at nvidia-smi nvlink -s and the fabric manager on that node, or leave it "
        "out.",
    ),
    FleetRule(
        "node-network-differs",
        "a node whose network ports carry another sum than most",
        _network,
        "GB/s of network",
        "Collectives over the nodes run at the rate of the slowest.",
        "Look at ibstat or ip link on that node for ports that are down or slow.",
    ),
    FleetRule(
        "node-ports-differ",
        "a node with another number of fast network ports than most",
        _ports,
        "fast network ports",
        "Rails do not match: some GPUs reach their peers through switches of a higher "
        "tier.",
        "Look at ibstat on that node.",
    ),
    FleetRule(
        "node-gpu-links-differ",
        "a node whose slowest GPU link is not that of most",
        _slowest_gpu_link,
        "GB/s at its slowest GPU's PCI link",
        "Copies from and to the host, and the network, run slower there.",
        "Look at lspci -vv for LnkSta below LnkCap on that node.",
    ),
    FleetRule(
        "node-cores-differ",
        "a node with another number of cores than most",
        _cpus,
        "hardware threads",
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
