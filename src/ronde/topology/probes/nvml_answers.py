"""What NVML says of GPUs as plain values, and the graph that it makes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    PciDevice,
    Relation,
)
from ronde.topology.probes.pci_kinds import plain_address

FORM = "NVML"
"""How sources of this kind begin."""

PCI_SPEEDS = {
    1: "2.5 GT/s PCIe",
    2: "5.0 GT/s PCIe",
    3: "8.0 GT/s PCIe",
    4: "16.0 GT/s PCIe",
    5: "32.0 GT/s PCIe",
    6: "64.0 GT/s PCIe",
}
"""Of a lane by generation, as the kernel writes them."""

_NVLINK_2_GB_PER_S, _NVLINK_3_GB_PER_S = 25.0, 26.0
_GPU, _SWITCH = 0, 2
_CLASSES = {_GPU: 0x030200, _SWITCH: 0x068000}
"""PCI classes by NVML's number for what an NVLink leads to."""
_HIDDEN_DOMAIN = "ffffff"
# nvidia-smi's words by NVML's number.
_PEERS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}


class Remote(NamedTuple):
    """Where an NVLink leads.

    Attributes:
        kind: NVML's number: 0 a GPU, 2 a switch, 255 unknown.
        address: As NVML spells it; empty where it does not tell.
    """

    kind: int
    address: str


class GpuAnswers(NamedTuple):
    """What NVML says of a GPU.

    Attributes:
        address: On the bus, as NVML spells it: ``00000000:1B:00.0``.
        title: Its model.
        uuid: ``GPU-...``.
        sm: Compute capability, such as 90; ``UNKNOWN``.
        ids: Number of the device above that of its vendor, 16 bits each; ``UNKNOWN``.
        subsystem_ids: The same of the board; ``UNKNOWN``.
        generation: Of its PCI link as trained now; ``UNKNOWN``.
        width: Of its PCI link as trained now; ``UNKNOWN``.
        node: NUMA node of the processor that it is near; ``UNKNOWN``.
        nvlinks: One for each that is active.
        nvlink_mb_per_s: At which each of them signals; ``UNKNOWN``.
        c2c_mb_per_s: One for each link to its processor that is active.
    """

    address: str
    title: str = ""
    uuid: str = ""
    sm: int = UNKNOWN
    ids: int = UNKNOWN
    subsystem_ids: int = UNKNOWN
    generation: int = UNKNOWN
    width: int = UNKNOWN
    node: int = UNKNOWN
    nvlinks: tuple[Remote, ...] = ()
    nvlink_mb_per_s: int = UNKNOWN
    c2c_mb_per_s: tuple[int, ...] = ()


def payload_gb_per_s(signalling_mb_per_s: float) -> float:
    """Return what an NVLink carries of the rate at which it signals; 0 where untold.

    Source: NVLink 2 spends 1 bit in 33 on coding (25.781 -> 25), later ones 1 in 17
    (26.562 -> 25, 53.125 -> 50).
    """
    rate = max(0.0, signalling_mb_per_s / 1e3)
    if rate >= _NVLINK_3_GB_PER_S:
        return rate * 16 / 17
    return rate * 32 / 33 if rate > _NVLINK_2_GB_PER_S else rate


def graph_of(
    gpus: Sequence[GpuAnswers], peers: Mapping[tuple[int, int], int]
) -> HostTopology:
    """Return the graph of what NVML says.

    Args:
        gpus: In NVML's order.
        peers: NVML's number for access to each other's memory, by places in ``gpus``.
    """
    named = [
        GpuDevice(
            bus_id=plain_address(gpu.address),
            number=number,
            sm=gpu.sm,
            title=gpu.title,
            uuid=gpu.uuid,
        )
        for number, gpu in enumerate(gpus)
    ]
    names = [gpu.name for gpu in named]
    lost = [
        (name, num_lost)
        for name, gpu in zip(names, gpus, strict=True)
        if (num_lost := sum(1 for remote in gpu.nvlinks if not _target(remote)))
    ]
    return HostTopology(
        sources=(FORM,),
        devices=tuple(
            _device(gpu.bus_id, said)
            for gpu, said in zip(named, gpus, strict=True)
            if gpu.bus_id
        ),
        gpus=tuple(named),
        links=tuple(link for each in map(_links, names, gpus) for link in each),
        relations=tuple(
            Relation(names[one], names[other], peer=_PEERS[said])
            for (one, other), said in peers.items()
            # One direction stands for both where they are alike.
            if said in _PEERS and (one < other or said != peers.get((other, one)))
        ),
        remarks=tuple(
            f"NVML does not tell where {num_lost} NVLinks of {name} lead."
            for name, num_lost in lost
        ),
    )


def _device(name: str, gpu: GpuAnswers) -> PciDevice:
    device, vendor = _split(gpu.ids)
    subsystem_device, subsystem_vendor = _split(gpu.subsystem_ids)
    return PciDevice(
        bus_id=name,
        node=gpu.node,
        vendor=vendor,
        device=device,
        subsystem_vendor=subsystem_vendor,
        subsystem_device=subsystem_device,
        speed_now=PCI_SPEEDS.get(gpu.generation, ""),
        width_now=gpu.width,
    )


def _links(name: str, gpu: GpuAnswers) -> list[Link]:
    targets = Counter(
        (target, _CLASSES.get(remote.kind, UNKNOWN))
        for remote in gpu.nvlinks
        if (target := _target(remote))
    )
    each = payload_gb_per_s(gpu.nvlink_mb_per_s)
    links = [
        Link(LinkKind.NVLINK, name, target, count, round(count * each, 3), target_class)
        for (target, target_class), count in targets.items()
    ]
    if gpu.c2c_mb_per_s:
        gb_per_s = sum(gpu.c2c_mb_per_s) / 1000
        node = f"numa/{gpu.node}"
        links.append(Link(LinkKind.C2C, name, node, len(gpu.c2c_mb_per_s), gb_per_s))
    return links


def _target(remote: Remote) -> str:
    """Return the name of what an NVLink leads to; empty where nobody knows."""
    address = plain_address(remote.address)
    if not address or address.startswith(_HIDDEN_DOMAIN):
        # Virtual machines do not see the switches.
        return NVSWITCH if remote.kind == _SWITCH else ""
    return address


def _split(ids: int) -> tuple[int, int]:
    """Return the upper and the lower 16 bits."""
    return (ids >> 16, ids & 0xFFFF) if ids >= 0 else (UNKNOWN, UNKNOWN)
