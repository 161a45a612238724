"""Rules on the links of the PCI bus."""

from collections.abc import Iterable, Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.graph import LinkKind, PciDevice
from ronde.topology.lint.host_view import (
    HostView,
    gt_per_s,
    physical_gb_per_s,
    told_gb_per_s,
)
from ronde.topology.lint.rule import Rule, rate_loss
from ronde.topology.paths.speeds import pci_gb_per_s

_TINY_GB_PER_S = 1.0
_CODES = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
_CHIP_SPEEDS = {60: 8, 61: 8, 70: 8, 75: 8, 80: 16, 86: 16, 89: 16, 90: 32, 100: 32}
"""GT/s of a lane, by compute capability."""


def _slow_bridges(view: HostView) -> Iterator[Finding]:
    for bus_id, ends in view.ends.items():
        bridge = view.devices.get(bus_id)
        if bridge is None:
            continue
        has = told_gb_per_s(bridge)
        # A port that tells a rate alone (hwloc) tells that of the link below it, which
        # is the device's own.
        farther = [end for end in ends if bridge.speed or end.parent != bus_id]
        should = max(map(told_gb_per_s, farther), default=0.0)
        if 0 < has < should and not _is_tiny(bridge):
            is_as_built = 2 * has >= should and _is_of_its_host(view, bridge, farther)
            yield Finding(
                rule="slow-bridge",
                severity=Severity.NOTE if is_as_built else rate_loss(has, should),
                element=bridge.name,
                what=f"The link above the bridge is slower ({_link(bridge)}) than the "
                "link of a device below it.",
                consequence="What leaves the bridge upwards, to the processor and to "
                f"other bridges, shares {has:g} GB/s where one device has {should:g} "
                "(NCCL's figures).",
                remedy="Compare with lspci -vv: reseat the board where LnkSta is below "
                "LnkCap, correct the file where it says less than LnkSta; nothing, "
                "where slot or switch are of an older generation.",
                has_gb_per_s=has,
                should_gb_per_s=should,
            )


def _is_of_its_host(
    view: HostView, bridge: PciDevice, ends: Iterable[PciDevice]
) -> bool:
    """Whether a link is slow by its generation alone, and no slot has a later one."""
    return all(end.width <= bridge.width for end in ends) and all(
        gt_per_s(device.speed) <= gt_per_s(bridge.speed)
        for device in view.host.devices
        if not device.parent
    )


def _tiny_links(view: HostView) -> Iterator[Finding]:
    # A GPU in one package with its processor leaves the bus aside.
    in_package = _in_package(view)
    gpus = [bus_id for bus_id in view.gpus if bus_id not in in_package]
    above_gpus = [
        view.devices[bus_id]
        for bus_id, ends in view.ends.items()
        if bus_id in view.devices and any(end.bus_id in gpus for end in ends)
    ]
    own = [view.devices[bus_id] for bus_id in gpus if bus_id in view.devices]
    for device in [*own, *above_gpus]:
        if _is_tiny(device):
            yield Finding(
                rule="tiny-link",
                severity=Severity.ERROR,
                element=device.name,
                what=f"The link is told to be {_link(device)}, as virtual machines "
                "tell that pass none of the real one on.",
                consequence=f"NCCL plans with {told_gb_per_s(device):.1f} GB/s and "
                "leaves the device aside as far as it can.",
                remedy="Give NCCL_TOPO_FILE with the host's real speeds, or give the "
                "virtual root port x-speed and x-width; on bare metal reseat the card.",
                has_gb_per_s=told_gb_per_s(device),
            )


def _is_tiny(device: PciDevice) -> bool:
    return 0 < told_gb_per_s(device) < _TINY_GB_PER_S


def _unknown_speeds(view: HostView) -> Iterator[Finding]:
    for device in view.host.devices:
        # A source that told neither leaves it to others; one that told an empty speed
        # or no lanes has it settled, and wrongly.
        is_told = device.width >= 0 or device.speed
        is_known = gt_per_s(device.speed) and device.width > 0
        if is_told and not is_known and not device.gb_per_s and _matters(view, device):
            has = pci_gb_per_s(device)
            yield Finding(
                rule="unknown-link-speed",
                severity=Severity.WARNING,
                element=device.name,
                what=f"The link has no known speed ({_link(device)}).",
                consequence=f"NCCL takes it for {has:g} GB/s, PCIe 3 where the speed "
                "is missing and 16 lanes where the width is, whatever it is; PCIe 4 "
                "x16 would be 24, PCIe 5 x16 48.",
                remedy="Write what lspci -vv shows on the bare machine, such as "
                'link_speed="16.0 GT/s PCIe" link_width="16".',
                has_gb_per_s=has,
            )


def _spellings(view: HostView) -> Iterator[Finding]:
    for device in view.host.devices:
        rate = gt_per_s(device.speed)
        if rate not in _CODES or device.width <= 0 or not _matters(view, device):
            continue
        has = pci_gb_per_s(device)
        should = device.width * _CODES[rate] / 80
        if abs(has - should) > 1e-6 * should:
            yield Finding(
                rule="speed-spelling",
                severity=rate_loss(has, should),
                element=device.name,
                what=f'NCCL does not know the speed\'s spelling "{device.speed}".',
                consequence=f"NCCL takes {has:g} GB/s, PCIe 3, where {should:g} was "
                "meant.",
                remedy=f'Write "{rate:.1f} GT/s PCIe".',
                has_gb_per_s=has,
                should_gb_per_s=should,
            )


def _trained_down(view: HostView) -> Iterator[Finding]:
    for device in view.host.devices:
        now = device._replace(
            speed=device.speed_now or device.speed,
            width=device.width_now if device.width_now > 0 else device.width,
        )
        has, should = physical_gb_per_s(now), physical_gb_per_s(device)
        if not 0 < has < should or not _matters(view, device):
            continue
        is_narrow = now.width < device.width
        may_rest = not is_narrow and _leads_to_gpu(view, device)
        yield Finding(
            rule="trained-down",
            severity=Severity.NOTE if may_rest else rate_loss(has, should),
            element=device.name,
            what=f"The link runs at {_link(now)} and both ends can do {_link(device)}.",
            consequence=f"It carries {has:.4g} of {should:.4g} GB/s (PCIe's limit one "
            "way).",
            remedy="Look again under load: GPUs lower the speed at rest."
            if may_rest
            else "Reseat the card or its riser, look for errors in dmesg (AER), and "
            "look at the slot's setting in the firmware.",
            has_gb_per_s=has,
            should_gb_per_s=should,
        )


def _old_slots(view: HostView) -> Iterator[Finding]:
    in_package = _in_package(view)
    for bus_id, gpu in view.gpus.items():
        device = view.devices.get(bus_id)
        chip, told = _CHIP_SPEEDS.get(gpu.sm, 0), 0.0
        if device and not gpu.gcn and bus_id not in in_package:
            told = gt_per_s(device.speed)
        if device and 0 < told < chip and not _is_tiny(device):
            has = told_gb_per_s(device)
            yield Finding(
                rule="old-slot",
                severity=Severity.NOTE,
                element=device.name,
                what=f"The link is told as {_link(device)}, and the chip (sm "
                f"{gpu.sm}) can do {chip} GT/s.",
                consequence=f"It has {has:g} GB/s where {has * chip / told:g} are "
                "possible (NCCL's figures).",
                remedy="Nothing, where slot or processor are of that generation; else "
                "look at the slot's setting in the firmware, or correct the file.",
                has_gb_per_s=has,
                should_gb_per_s=has * chip / told,
            )


def _in_package(view: HostView) -> set[str]:
    """Return what a link inside a package joins: GPUs and their processors."""
    links = [link for link in view.host.links if link.kind is LinkKind.C2C]
    return {end for link in links for end in (link.source, link.target)}


def _matters(view: HostView, device: PciDevice) -> bool:
    """Whether it is a GPU, a network adapter or a bridge above one."""
    known = view.gpus, view.ports, view.ends
    return any(device.bus_id in group for group in known)


def _leads_to_gpu(view: HostView, device: PciDevice) -> bool:
    """Whether it is an end of the link to a GPU."""
    return device.bus_id in view.gpus or any(
        end.parent == device.bus_id and end.bus_id in view.gpus
        for end in view.ends.get(device.bus_id, ())
    )


def _link(device: PciDevice) -> str:
    if not device.speed and device.gb_per_s:
        return f"{device.gb_per_s:g} GB/s"
    speed = f'"{device.speed}"' if not gt_per_s(device.speed) else device.speed
    return f"{speed} x{device.width}" if device.width >= 0 else speed


RULES = (
    Rule(
        "slow-bridge",
        "a bridge whose own link is slower than that of a device below it",
        _slow_bridges,
    ),
    Rule(
        "tiny-link",
        "a GPU's link below 1 GB/s, as virtual machines tell it",
        _tiny_links,
    ),
    Rule(
        "unknown-link-speed",
        "an empty link speed or no lanes, which NCCL takes for PCIe 3 x16",
        _unknown_speeds,
    ),
    Rule(
        "speed-spelling",
        "a link speed that is spelled as NCCL does not know it",
        _spellings,
    ),
    Rule(
        "trained-down",
        "a link that runs below what both of its ends can do",
        _trained_down,
    ),
    Rule(
        "old-slot",
        "a GPU's link of an older generation than its chip's",
        _old_slots,
    ),
)
