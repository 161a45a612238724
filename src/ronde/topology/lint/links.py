"""Rules on links: the PCI bus's, and those between GPUs."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from ronde.topology.graph import NVSWITCH, GpuDevice, Level, LinkKind, PciDevice
from ronde.topology.lint.view import (
    Hit,
    HostView,
    gt_per_s,
    known_gb_per_s,
    rate_loss,
    rule,
)
from ronde.topology.paths.speeds import (
    LOCAL_GB_PER_S,
    max_nvlinks,
    nvlink_gb_per_s,
    pci_gb_per_s,
    pci_theory_gb_per_s,
    xgmi_gb_per_s,
)

_TINY_GB_PER_S = 1.0
_CODES = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
# GT/s of a lane, by compute capability.
_CHIP_SPEEDS = {60: 8, 61: 8, 70: 8, 75: 8, 80: 16, 86: 16, 89: 16, 90: 32, 100: 32}
_SWITCH_CLASS = 0x068000
# Compute capability of the last chip whose number of NVLinks is known.
_LATEST_SM = 103


@rule(
    "slow-bridge",
    "a bridge whose own link is slower than that of a device below it",
    "Compare with lspci -vv: reseat the board where LnkSta is below LnkCap, correct "
    "the file where it has less than LnkSta; nothing, where slot or switch are of an "
    "older generation.",
)
def _slow_bridges(view: HostView) -> Iterator[Hit]:
    roots = [gt_per_s(each.speed) for each in view.host.devices if not each.parent]
    for bus_id, ends in view.ends.items():
        bridge = view.devices[bus_id]
        has = known_gb_per_s(bridge)
        # A port with a rate alone (hwloc) has that of the link below it, which is the
        # device's own.
        farther = [end for end in ends if bridge.speed or end.parent != bus_id]
        should = max(map(known_gb_per_s, farther), default=0.0)
        if 0 < has < should and not _is_tiny(bridge):
            # Slow by its generation alone, and no slot of the host has a later one.
            is_as_built = (
                2 * has >= should
                and all(end.width <= bridge.width for end in farther)
                and all(speed <= gt_per_s(bridge.speed) for speed in roots)
            )
            yield Hit(
                bridge.name,
                Level.NOTE if is_as_built else rate_loss(has, should),
                f"The link above the bridge is slower ({_link_words(bridge)}) than the "
                "link of a device below it.",
                "What leaves the bridge upwards, to the processor and to other "
                f"bridges, shares {has:g} GB/s where one device has {should:g} "
                "(NCCL's figures).",
                has,
                should,
            )


@rule(
    "tiny-link",
    "a GPU's link below 1 GB/s, as virtual machines report it",
    "Give NCCL_TOPO_FILE with the host's real speeds, or give the virtual root port "
    "x-speed and x-width; on bare metal reseat the card.",
)
def _tiny_links(view: HostView) -> Iterator[Hit]:
    gpus = [bus_id for bus_id in _gpus_on_bus(view) if bus_id in view.devices]
    above = [b for b, ends in view.ends.items() if any(e.bus_id in gpus for e in ends)]
    for device in (view.devices[bus_id] for bus_id in [*gpus, *above]):
        if _is_tiny(device):
            has = known_gb_per_s(device)
            yield Hit(
                device.name,
                Level.ERROR,
                f"The link is reported as {_link_words(device)}, as by virtual "
                "machines that pass none of the real one on.",
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
    for device in _devices_that_matter(view):
        # A source without either leaves it to others; an empty speed or no lanes are
        # a wrong answer.
        is_given = device.width >= 0 or device.speed
        is_known = gt_per_s(device.speed) and device.width > 0
        if is_given and not is_known and not device.gb_per_s:
            has = pci_gb_per_s(device)
            yield Hit(
                device.name,
                Level.WARNING,
                f"The link speed is unknown ({_link_words(device)}).",
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
    for device in _devices_that_matter(view):
        rate, has = gt_per_s(device.speed), pci_gb_per_s(device)
        should = device.width * _CODES.get(rate, 0) / 80
        if should > 0 and abs(has - should) > 1e-6 * should:
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
    for device in _devices_that_matter(view):
        now = device._replace(
            speed=device.speed_now or device.speed,
            width=device.width_now if device.width_now > 0 else device.width,
        )
        has, should = _physical_gb_per_s(now), _physical_gb_per_s(device)
        leads_to_gpu = device.bus_id in view.gpus or any(
            end.parent == device.bus_id and end.bus_id in view.gpus
            for end in view.ends.get(device.bus_id, ())
        )
        may_rest = now.width >= device.width and leads_to_gpu
        if 0 < has < should:
            yield Hit(
                device.name,
                Level.NOTE if may_rest else rate_loss(has, should),
                f"The link runs at {_link_words(now)} and both ends can do "
                f"{_link_words(device)}.",
                f"It carries {has:.4g} of {should:.4g} GB/s (PCIe's limit one way).",
                has,
                should,
                may_rest * "Look again under load: GPUs lower the speed at rest.",
            )


@rule(
    "old-slot",
    "a GPU's link of an older generation than its chip's",
    "Nothing, where slot or processor are of that generation; else look at the slot's "
    "setting in the firmware, or correct the file.",
)
def _old_slots(view: HostView) -> Iterator[Hit]:
    for bus_id, gpu in _gpus_on_bus(view).items():
        device = view.devices.get(bus_id)
        if device is None or gpu.gcn or _is_tiny(device):
            continue
        chip, speed = _CHIP_SPEEDS.get(gpu.sm, 0), gt_per_s(device.speed)
        if 0 < speed < chip:
            has = known_gb_per_s(device)
            should = has * chip / speed
            yield Hit(
                device.name,
                Level.NOTE,
                f"The link is reported as {_link_words(device)}, and the chip (sm "
                f"{gpu.sm}) can do {chip} GT/s.",
                f"It has {has:g} GB/s where {should:g} are possible (NCCL's figures).",
                has,
                should,
            )


def _gpus_on_bus(view: HostView) -> dict[str, GpuDevice]:
    """Return the GPUs but those in one package with their processor."""
    links = [link for link in view.host.links if link.kind is LinkKind.C2C]
    in_package = {end for link in links for end in (link.source, link.target)}
    return {name: gpu for name, gpu in view.gpus.items() if name not in in_package}


def _devices_that_matter(view: HostView) -> Iterator[PciDevice]:
    known = view.gpus.keys() | view.ports.keys() | view.ends.keys()
    return (device for device in view.host.devices if device.bus_id in known)


def _physical_gb_per_s(device: PciDevice) -> float:
    """Return what the link above a device can carry; 0 if unknown."""
    return pci_theory_gb_per_s(device.speed, device.width) or device.gb_per_s


def _link_words(device: PciDevice) -> str:
    """Return the link above a device in words: ``16.0 GT/s PCIe x16``."""
    if not device.speed and device.gb_per_s:
        return f"{device.gb_per_s:g} GB/s"
    speed = device.speed if gt_per_s(device.speed) else f'"{device.speed}"'
    return f"{speed} x{device.width}" if device.width >= 0 else speed


@rule(
    "link-to-itself",
    "NVLink or xGMI that leads from a GPU to itself",
    "Write the bus address of the GPU at the other end as target; nvidia-smi topo -m "
    "and nvidia-smi nvlink -R show it.",
)
def _to_itself(view: HostView) -> Iterator[Hit]:
    for name, links in view.direct_links.items():
        own = [link for link in links if link.target == name]
        if own:
            num = sum(link.num_links for link in own)
            has, should = _bus_rate(view, name), num * _link_rate(view, name)
            yield Hit(
                name,
                Level.ERROR,
                f"{num} links between GPUs lead from the GPU to itself.",
                f"They connect it to no other GPU{_rates(has, should)}.",
                has,
                should,
            )


@rule(
    "gpu-listed-as-switch",
    "NVLink to a GPU whose class is given as that of a switch",
    'Write one line, target="fffffff:ff:ff.0", tclass="0x068000" and the GPU\'s own '
    'number of links, where there are switches; else tclass="0x030200".',
)
def _as_switches(view: HostView) -> Iterator[Hit]:
    for name, links in view.direct_links.items():
        to_gpus = [link for link in links if link.target in view.gpus]
        wrong = [link for link in to_gpus if link.target_class == _SWITCH_CLASS]
        if wrong:
            num = sum(link.num_links for link in wrong)
            yield Hit(
                name,
                Level.ERROR,
                f"NVLinks lead to {len(wrong)} GPUs whose class is given as that of an "
                "NVLink switch (0x068000).",
                f"NCCL takes all {num} for links into one switch and adds them up.",
            )


@rule(
    "too-many-nvlinks",
    "more NVLinks than the chip has",
    "Let the counts of one GPU add up to what nvidia-smi nvlink -s shows.",
)
def _too_many(view: HostView) -> Iterator[Hit]:
    for gpu in view.gpus.values():
        num, most = _num_links(view, gpu.name), max_nvlinks(gpu.sm)
        # Of later chips nobody knows yet how many they have.
        is_known = 0 < gpu.sm <= _LATEST_SM and not gpu.gcn
        if not is_known or not 0 < most < num:
            continue
        rate = nvlink_gb_per_s(gpu.sm)
        has, should = num * rate, most * rate
        cap = f", over its cap of {LOCAL_GB_PER_S:g}" if has > LOCAL_GB_PER_S else ""
        yield Hit(
            gpu.name,
            Level.ERROR,
            f"{num} NVLinks are listed, and the chip (sm {gpu.sm}) has {most}.",
            f"NCCL plans with {has:.1f} GB/s{cap}, where {should:.1f} exist, and "
            "chooses channels and algorithms by that.",
            has,
            should,
        )


@rule(
    "gpu-without-links",
    "a GPU without NVLink or xGMI on a host where others have it",
    "Look at nvidia-smi nvlink -s and, with switches, at the fabric manager's log; "
    "reset or replace the GPU, or leave it out.",
)
def _missing(view: HostView) -> Iterator[Hit]:
    linked = {gpu.name for gpu in view.host.gpus if _num_links(view, gpu.name)}
    # Some sources have them as ``NV4`` of a pair.
    bonded = [each for each in view.host.relations if each.path.startswith("NV")]
    linked |= {end for each in bonded for end in (each.source, each.target)}
    rates = [_num_links(view, name) * _link_rate(view, name) for name in linked]
    for gpu in view.host.gpus:
        if linked and gpu.name not in linked:
            has, should = _bus_rate(view, gpu.name), max(rates)
            yield Hit(
                gpu.name,
                Level.ERROR,
                "The GPU has no links to other GPUs, and others of this host have.",
                "Every ring through it falls back to the PCI bus"
                f"{_rates(has, should)}.",
                has,
                should,
            )


@rule(
    "uneven-nvlinks",
    "a GPU with fewer NVLinks than others of its kind",
    "Look at nvidia-smi nvlink -s and -e for links that are down or count errors, and "
    "reset the GPU.",
)
def _uneven(view: HostView) -> Iterator[Hit]:
    totals = {
        gpu.name: num
        for gpu in view.gpus.values()
        if not gpu.gcn and (num := _num_links(view, gpu.name))
    }
    kinds = {view.gpus[name].sm for name in totals}
    most = max(totals.values(), default=0)
    for name, num in totals.items():
        if num < most and len(kinds) == 1:
            rate = _link_rate(view, name)
            has, should = num * rate, most * rate
            yield Hit(
                name,
                rate_loss(num, most),
                f"{num} NVLinks are up, and other GPUs of this host have {most}.",
                f"Collectives run at the slowest GPU's rate{_rates(has, should)}.",
                has,
                should,
            )


@rule(
    "one-way-link",
    "links between two GPUs with fewer links back",
    "Give both GPUs the same count; nvidia-smi nvlink -R shows it.",
)
def _one_way(view: HostView) -> Iterator[Hit]:
    counts: Counter[tuple[str, str]] = Counter()
    for link in chain.from_iterable(view.direct_links.values()):
        is_between = link.source in view.gpus and link.target in view.gpus
        if is_between and link.source != link.target:
            counts[link.source, link.target] += link.num_links
    for (source, target), num in counts.items():
        if counts[target, source] < num:
            yield Hit(
                source,
                Level.WARNING,
                f"{num} links lead to {target}, and {counts[target, source]} lead "
                "back.",
                "What comes back has less bandwidth, or none of its own.",
            )


@rule(
    "link-to-hidden-gpu",
    "links to a GPU that is not listed",
    "Nothing, where the job has a part of the GPUs; else list them.",
)
def _to_hidden(view: HostView) -> Iterator[Hit]:
    for name, links in view.direct_links.items():
        hidden = [
            link.target
            for link in links
            if link.target not in (*view.gpus, NVSWITCH)
            and link.target_class >> 16 in (0x03, 0x12)
        ]
        if hidden:
            yield Hit(
                name,
                Level.NOTE,
                f"Links lead to {len(hidden)} GPUs that are not listed, such as "
                f"{hidden[0]}.",
                "NCCL drops these links.",
            )


@rule(
    "no-peer-access",
    "GPUs that may not reach each other's memory",
    "CNS: the processor's chipset does not; TNS: no bus between them does; GNS: this "
    "kind of GPU does not. In a virtual machine look whether the host passes peer "
    "access on; switch ACS off on the bridges.",
)
def _no_peer_access(view: HostView) -> Iterator[Hit]:
    bad: dict[str, Counter[str]] = {}
    for each in view.host.relations:
        if each.peer not in ("", "OK", "X") and each.source != each.target:
            bad.setdefault(each.source, Counter())[each.peer] += 1
    for name, words in bad.items():
        counts = ", ".join(f"{word} for {num}" for word, num in sorted(words.items()))
        yield Hit(
            name,
            Level.WARNING,
            f"The driver does not let it reach the memory of other GPUs ({counts}).",
            "NCCL copies through the host's shared memory instead.",
        )


def _num_links(view: HostView, name: str) -> int:
    own = view.direct_links.get(name, ())
    return sum(link.num_links for link in own if link.target != name)


def _link_rate(view: HostView, name: str) -> float:
    """Return NCCL's GB/s for one link of a GPU; 0 where its chip is unknown."""
    gpu = view.gpus.get(name)
    if gpu and gpu.gcn:
        return xgmi_gb_per_s(gpu.gcn)
    return nvlink_gb_per_s(gpu.sm) if gpu and gpu.sm > 0 else 0.0


def _bus_rate(view: HostView, name: str) -> float:
    """Return the GB/s of the best way from one GPU to any other; 0 for none."""
    others = (gpu.name for gpu in view.host.gpus if gpu.name != name)
    ways = (view.paths.between(name, other) for other in others)
    return max((way.gb_per_s for way in ways if way), default=0.0)


def _rates(has: float, should: float) -> str:
    is_loss = 0 < has < should
    return f": {has:g} instead of {should:g} GB/s (NCCL's figures)" if is_loss else ""
