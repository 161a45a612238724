"""Rules on network adapters and their ports."""

from collections.abc import Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.graph import NetPort, PciDevice
from ronde.topology.limits.link_rates import Figures, pci_figures
from ronde.topology.lint.host_view import HostView, told_gb_per_s
from ronde.topology.lint.rule import Rule, rate_loss
from ronde.topology.paths.speeds import port_gb_per_s

_RATES = (1000, 2500, 5000, 10000, 25000, 40000, 50000, 56000, 100000, 200000, 400000)
_HIGHEST = 1_600_000
_VIRTUAL = ("virbr", "docker", "veth", "br-", "vnet", "tap", "tun", "lo", "dummy")


def _faster_than_link(view: HostView) -> Iterator[Finding]:
    for bus_id, ports in view.ports.items():
        device = view.devices.get(bus_id)
        figures = pci_figures(device) if device else None
        if device is None or figures is None:
            continue
        should = sum(port_gb_per_s(p) for p in ports if _has_likely_rate(p) and p.is_up)
        rates = f"The adapter's {len(ports)} port(s) carry {should:.4g} GB/s, its "
        rates += f"PCI link ({device.speed} x{device.width})"
        if figures.theory < should:
            yield _held_to_link(device, rates, figures, should)
        elif not figures.is_told and figures.practical < should:
            yield _planned_by_bridge(device, rates, figures, should)


def _held_to_link(
    device: PciDevice, rates: str, figures: Figures, should: float
) -> Finding:
    has = figures.theory
    return Finding(
        rule="nic-faster-than-link",
        severity=rate_loss(has, should),
        element=device.name,
        what=f"{rates} {has:.4g} (PCIe's limit).",
        consequence=f"The network is held to {has:.4g} GB/s through this "
        f"adapter; NCCL plans with {told_gb_per_s(device):g}.",
        remedy="Move the adapter to a wider or newer slot, or use fewer of "
        "its ports; correct the file where adapters with links of their own "
        "are told as one.",
        has_gb_per_s=has,
        should_gb_per_s=should,
    )


def _planned_by_bridge(
    device: PciDevice, rates: str, figures: Figures, should: float
) -> Finding:
    """Return the finding on a link that is none, as virtual machines tell it."""
    has = figures.practical
    return Finding(
        rule="nic-faster-than-link",
        severity=Severity.WARNING,
        element=device.name,
        what=f"{rates} counts for {has:g} with NCCL, and is none that limits them: the "
        "adapter is told as a host bridge, or by the least link that there is.",
        consequence=f"NCCL plans with {has:g} GB/s through this adapter, whatever it "
        "carries.",
        remedy="Correct the file: a link of its own for each adapter, as the bare "
        "machine has it.",
        has_gb_per_s=has,
        should_gb_per_s=should,
    )


def _odd_speeds(view: HostView) -> Iterator[Finding]:
    for port in view.host.ports:
        if port.bus_id and port.mbit_per_s > 0 and not _has_likely_rate(port):
            nearest = _nearest_rate(port.mbit_per_s)
            has, should = port_gb_per_s(port), nearest / 8000
            is_huge = port.mbit_per_s > _HIGHEST
            yield Finding(
                rule="odd-nic-speed",
                severity=Severity.WARNING,
                element=port.name,
                what=f"Its speed is told as {port.mbit_per_s} Mb/s, which no port has.",
                consequence=f"NCCL plans with {has:g} GB/s for the port, whatever it "
                f"has; {nearest} Mb/s would be {should:g}.",
                remedy="Write what /sys/class/infiniband/*/ports/1/rate says, in Mb/s"
                + ("; this looks like kb/s." if is_huge else "."),
                has_gb_per_s=0.0 if is_huge else has,
                should_gb_per_s=0.0 if is_huge else should,
            )


def _no_speed(view: HostView) -> Iterator[Finding]:
    for port in view.host.ports:
        if port.mbit_per_s < 0:
            yield Finding(
                rule="nic-without-speed",
                severity=Severity.WARNING if port.is_up else Severity.NOTE,
                element=port.name,
                what=f"Its speed is told as {port.mbit_per_s}.",
                consequence="NCCL takes it for 10000 Mb/s, 1.25 GB/s.",
                remedy="Look whether the link is up; else write its speed into the "
                "file.",
                has_gb_per_s=port_gb_per_s(port),
            )


def _down(view: HostView) -> Iterator[Finding]:
    up_at = {port.bus_id for port in view.host.ports if port.is_up}
    for port in view.host.ports:
        if port.is_up or not port.bus_id:
            continue
        # Of two ports often one has no cable, and Ethernet for management none.
        is_loss = port.kind == "infiniband" and port.bus_id not in up_at
        rate = f"{port_gb_per_s(port):g} GB/s" if port.mbit_per_s > 0 else "its rate"
        yield Finding(
            rule="nic-down",
            severity=Severity.WARNING if is_loss else Severity.NOTE,
            element=port.name,
            what="The port has no link.",
            consequence=f"NCCL does not use it: the node has {rate} less.",
            remedy="Look at ibstat or ip link, at the cable and at the switch's port.",
        )


def _virtual(view: HostView) -> Iterator[Finding]:
    for port in view.host.ports:
        if not port.bus_id and port.title.startswith(_VIRTUAL):
            yield Finding(
                rule="virtual-nic",
                severity=Severity.NOTE,
                element=port.name,
                what="A virtual interface is among the network adapters.",
                consequence="NCCL may choose it, and other hosts cannot be reached "
                "over it.",
                remedy="Leave it out: NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr, or "
                "name the right one.",
            )


def _no_gpudirect(view: HostView) -> Iterator[Finding]:
    if not any(port.gdr == 1 for port in view.host.ports):
        return
    for gpu in view.host.gpus:
        if gpu.gdr == 0:
            yield Finding(
                rule="no-gpudirect",
                severity=Severity.WARNING,
                element=gpu.name,
                what="GPUDirect RDMA is off for the GPU (gdr 0), and on for adapters.",
                consequence="Every byte to and from the network is copied through the "
                "host's memory and crosses the PCI bus twice.",
                remedy="Load nvidia_peermem or use a kernel and driver with DMA-BUF "
                "(for AMD: a kernel with peer memory), and write the file anew.",
            )


def _has_likely_rate(port: NetPort) -> bool:
    """Whether hardware has the rate, alone or as some links that are bound together."""
    return 0 < port.mbit_per_s <= _HIGHEST and any(
        port.mbit_per_s == rate * num for rate in _RATES for num in (1, 2, 3, 4)
    )


def _nearest_rate(mbit_per_s: int) -> int:
    # What is beyond all hardware was written in kb/s.
    wanted = mbit_per_s / 1000 if mbit_per_s > _HIGHEST else mbit_per_s
    return min(_RATES, key=lambda rate: abs(rate - wanted))


RULES = (
    Rule(
        "nic-faster-than-link",
        "a network adapter that carries more than its PCI link",
        _faster_than_link,
    ),
    Rule(
        "odd-nic-speed",
        "a port's speed that no hardware has",
        _odd_speeds,
    ),
    Rule(
        "nic-without-speed",
        "a port's speed below zero, which NCCL takes for 10 Gb/s",
        _no_speed,
    ),
    Rule("nic-down", "a port of an adapter without link", _down),
    Rule("virtual-nic", "a virtual interface among the network adapters", _virtual),
    Rule(
        "no-gpudirect",
        "a GPU whose memory adapters cannot reach though they could others'",
        _no_gpudirect,
    ),
)
