"""Rules on the links of the PCI bus."""

from collections.abc import Iterable, Iterator

from ronde.topology.findings import Level
from ronde.topology.graph import LinkKind, PciDevice
from ronde.topology.lint.view import (
    Hit,
    HostView,
    gt_per_s,
    known_gb_per_s,
    link_words,
    physical_gb_per_s,
    rate_loss,
    rule,
)
from ronde.topology.paths.speeds import pci_gb_per_s

_TINY_GB_PER_S = 1.0
_CODES = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
# GT/s of a lane, by compute capability.
_CHIP_SPEEDS = {60: 8, 61: 8, 70: 8, 75: 8, 80: 16, 86: 16, 89: 16, 90: 32, 100: 32}


@rule(
    "slow-bridge",
    "a bridge whose own link is slower than that of a device below it",
    "Compare with lspci -vv: reseat the board where LnkSta is below LnkCap, correct "
    "the file where it has less than LnkSta; nothing, where slot or switch are of an "
    "older generation.",
)
def _slow_bridges(view: HostView) -> Iterator[Hit]:
    for bus_id, ends in view.ends.items():
        bridge = view.devices[bus_id]
        has = known_gb_per_s(bridge)
        # A port with a rate alone (hwloc) has that of the link below it, which is the
        # device's own.
        farther = [end for end in ends if bridge.speed or end.parent != bus_id]
        should = max(map(known_gb_per_s, farther), default=0.0)
        if 0 < has < should and not _is_tiny(bridge):
            is_as_built = 2 * has >= should and _is_of_its_host(view, bridge, farther)
            yield Hit(
                bridge.name,
                Level.NOTE if is_as_built else rate_loss(has, should),
                f"The link above the bridge is slower ({link_words(bridge)}) than the "
                "link of a device below it.",
                "What leaves the bridge upwards, to the processor and to other "
                f"bridges, shares {has:g} GB/s where one device has {should:g} "
                "(NCCL's figures).",
                has,
                should,
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


@rule(
    "tiny-link",
    "a GPU's link below 1 GB/s, as virtual machines report it",
    "Give NCCL_TOPO_FILE with the host's real speeds, or give the virtual root port "
    "x-speed and x-width; on bare metal reseat the card.",
)
def _tiny_links(view: HostView) -> Iterator[Hit]:
    # A GPU in one package with its processor leaves the bus aside.
    in_package = _in_package(view)
    gpus = [b for b in view.gpus if b not in in_package and b in view.devices]
    above = [b for b, ends in view.ends.items() if any(e.bus_id in gpus for e in ends)]
    for device in (view.devices[bus_id] for bus_id in [*gpus, *above]):
        if _is_tiny(device):
            has = known_gb_per_s(device)
            yield Hit(
                device.name,
                Level.ERROR,
                f"The link is reported as {link_words(device)}, as by virtual machines "
                "that pass none of the real one on.",
                f"NCCL plans with {has:.1f} GB/s and leaves the device aside as far as "
                "it can.",
                has,
            )


def _is_tiny(device: PciDevice) -> bool:
    return 0 < known_gb_per_s(device) < _TINY_GB_PER_S


@rule(
    "unknown-link-speed",
    "an empty link speed or no lanes, which NCCL takes for PCIe 3 x16",
    "Write what lspci -vv shows on the bare machine, such as "
    'link_speed="16.0 GT/s PCIe" link_width="16".',
)
def _unknown_speeds(view: HostView) -> Iterator[Hit]:
    for device in view.host.devices:
        # A source without either leaves it to others; an empty speed or no lanes are
        # a wrong answer.
        is_given = device.width >= 0 or device.speed
        is_known = gt_per_s(device.speed) and device.width > 0
        if is_given and not is_known and not device.gb_per_s and _matters(view, device):
            has = pci_gb_per_s(device)
            yield Hit(
                device.name,
                Level.WARNING,
                f"The link speed is unknown ({link_words(device)}).",
                f"NCCL takes it for {has:g} GB/s, PCIe 3 where the speed is missing "
                "and 16 lanes where the width is; PCIe 4 x16 would be 24, PCIe 5 x16 "
                "48.",
                has,
            )


@rule(
    "speed-spelling",
    "a link speed in a spelling that NCCL does not know",
    'Write it as the kernel does: "16.0 GT/s PCIe".',
)
def _spellings(view: HostView) -> Iterator[Hit]:
    for device in view.host.devices:
        rate = gt_per_s(device.speed)
        if rate not in _CODES or device.width <= 0 or not _matters(view, device):
            continue
        has = pci_gb_per_s(device)
        should = device.width * _CODES[rate] / 80
        if abs(has - should) > 1e-6 * should:
            yield Hit(
                device.name,
                rate_loss(has, should),
                f'NCCL does not know the speed\'s spelling "{device.speed}".',
                f"NCCL takes {has:g} GB/s, PCIe 3, where {should:g} was meant.",
                has,
                should,
                f'Write "{rate:.1f} GT/s PCIe".',
            )


@rule(
    "trained-down",
    "a link that runs below what both of its ends can do",
    "Reseat the card or its riser, look for errors in dmesg (AER), and look at the "
    "slot's setting in the firmware.",
)
def _trained_down(view: HostView) -> Iterator[Hit]:
    for device in view.host.devices:
        now = device._replace(
            speed=device.speed_now or device.speed,
            width=device.width_now if device.width_now > 0 else device.width,
        )
        has, should = physical_gb_per_s(now), physical_gb_per_s(device)
        if not 0 < has < should or not _matters(view, device):
            continue
        leads_to_gpu = device.bus_id in view.gpus or any(
            end.parent == device.bus_id and end.bus_id in view.gpus
            for end in view.ends.get(device.bus_id, ())
        )
        may_rest = now.width >= device.width and leads_to_gpu
        yield Hit(
            device.name,
            Level.NOTE if may_rest else rate_loss(has, should),
            f"The link runs at {link_words(now)} and both ends can do "
            f"{link_words(device)}.",
            f"It carries {has:.4g} of {should:.4g} GB/s (PCIe's limit one way).",
            has,
            should,
            "Look again under load: GPUs lower the speed at rest." if may_rest else "",
        )


@rule(
    "old-slot",
    "a GPU's link of an older generation than its chip's",
    "Nothing, where slot or processor are of that generation; else look at the slot's "
    "setting in the firmware, or correct the file.",
)
def _old_slots(view: HostView) -> Iterator[Hit]:
    in_package = _in_package(view)
    for bus_id, gpu in view.gpus.items():
        device = view.devices.get(bus_id)
        if device is None or gpu.gcn or bus_id in in_package or _is_tiny(device):
            continue
        chip, speed = _CHIP_SPEEDS.get(gpu.sm, 0), gt_per_s(device.speed)
        if 0 < speed < chip:
            has = known_gb_per_s(device)
            should = has * chip / speed
            yield Hit(
                device.name,
                Level.NOTE,
                f"The link is reported as {link_words(device)}, and the chip (sm "
                f"{gpu.sm}) can do {chip} GT/s.",
                f"It has {has:g} GB/s where {should:g} are possible (NCCL's figures).",
                has,
                should,
            )


def _in_package(view: HostView) -> set[str]:
    """Return what a link inside a package joins: GPUs and their processors."""
    links = [link for link in view.host.links if link.kind is LinkKind.C2C]
    return {end for link in links for end in (link.source, link.target)}


def _matters(view: HostView, device: PciDevice) -> bool:
    """Whether it is a GPU, a network adapter or a bridge above one."""
    return any(device.bus_id in known for known in (view.gpus, view.ports, view.ends))


RULES = (
    _slow_bridges,
    _tiny_links,
    _unknown_speeds,
    _spellings,
    _trained_down,
    _old_slots,
)
