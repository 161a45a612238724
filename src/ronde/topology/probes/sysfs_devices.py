"""PCI devices that matter and the bridges above them, as the kernel shows them.

A PCI switch is several bridges in sysfs: one above, and one for each port below. Of the
two devices that a link joins, this keeps the lower, as NCCL does: then a switch is one
device, and each device has the link above it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN, NumaNode, PciDevice
from ronde.topology.kernel_files import (
    list_names,
    read_list,
    read_mask,
    read_number,
    read_text,
)
from ronde.topology.pci import bus_order, is_address, read_path
from ronde.topology.probes.pci_kinds import is_network, is_nvswitch

_BUS = "sys/bus/pci/devices"
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s.*")
# What the kernel says of a device that is not on PCI Express.
_NO_WIDTH = 255


class Function(NamedTuple):
    """A function of a device on the bus.

    Attributes:
        chain: Its address, then those of the bridges above it, all of them.
        class_code: Class, subclass and interface; ``UNKNOWN``.
        vendor: ``UNKNOWN`` where not told.
        is_virtual: Whether it is one of many that a device shows of itself (SR-IOV).
    """

    chain: tuple[str, ...]
    class_code: int
    vendor: int
    is_virtual: bool


def read_functions(root: str) -> dict[str, Function]:
    """Return all that is on the bus by address, in the order of drivers.

    Args:
        root: Where ``sys`` is; empty for this machine.
    """
    names = [name for name in list_names(f"{root}/{_BUS}") if is_address(name)]
    found: dict[str, Function] = {}
    for address in sorted(names, key=bus_order):
        own = f"{root}/{_BUS}/{address}"
        class_code = _code(own, "class")
        found[address] = Function(
            chain=_chain(read_path(own) or address),
            class_code=class_code,
            vendor=_code(own, "vendor"),
            is_virtual=is_network(class_code) and bool(list_names(f"{own}/physfn")),
        )
    return found


def find_network(functions: Mapping[str, Function]) -> list[str]:
    """Return the addresses of network adapters and NVSwitches.

    Virtual functions are not among them: one that is in use has a port.
    """
    return [
        address
        for address, each in functions.items()
        if (is_network(each.class_code) and not each.is_virtual)
        or is_nvswitch(each.class_code, each.vendor)
    ]


def read_devices(
    root: str,
    functions: Mapping[str, Function],
    wanted: Iterable[str],
    nodes: Sequence[NumaNode],
) -> tuple[PciDevice, ...]:
    """Return devices and what is above them, parents before children.

    Args:
        root: Where ``sys`` is; empty for this machine.
        functions: All that is on the bus.
        wanted: Addresses of the devices.
        nodes: For devices of which only the CPUs near them are told.
    """
    found: dict[str, PciDevice] = {}
    for address in sorted(set(wanted), key=bus_order):
        chain = functions[address].chain if address in functions else (address,)
        for place in range((len(chain) - 1) // 2 * 2, -1, -2):
            if chain[place] not in found:
                found[chain[place]] = _read_device(root, chain[place:], nodes)
    return tuple(found.values())


def _read_device(
    root: str, chain: Sequence[str], nodes: Sequence[NumaNode]
) -> PciDevice:
    """Return the first of a chain, with the link to the second."""
    own = f"{root}/{_BUS}/{chain[0]}"
    # Both ends can do more than their link: it is what the weaker one can.
    ends = [f"{root}/{_BUS}/{address}" for address in chain[:2]]
    return PciDevice(
        bus_id=chain[0],
        parent=chain[2] if len(chain) > 2 else "",
        node=_read_node(root, chain, nodes),
        class_code=_code(own, "class"),
        vendor=_code(own, "vendor"),
        device=_code(own, "device"),
        subsystem_vendor=_code(own, "subsystem_vendor"),
        subsystem_device=_code(own, "subsystem_device"),
        speed=_slowest(read_text(f"{end}/max_link_speed") for end in ends),
        width=_narrowest(read_number(f"{end}/max_link_width", UNKNOWN) for end in ends),
        speed_now=_slowest([read_text(f"{own}/current_link_speed")]),
        width_now=_narrowest([read_number(f"{own}/current_link_width", UNKNOWN)]),
    )


def _chain(path: str) -> tuple[str, ...]:
    """Return the addresses of a place on the bus from the device up to its root."""
    chain: list[str] = []
    for part in reversed(path.split("/")):
        if not is_address(part):
            break
        chain.append(part)
    return tuple(chain)


def _read_node(root: str, chain: Sequence[str], nodes: Sequence[NumaNode]) -> int:
    """Return the node of a device, of the next above, or that has all CPUs near it."""
    known = {node.number for node in nodes}
    for address in chain:
        node = read_number(f"{root}/{_BUS}/{address}/numa_node", UNKNOWN)
        if node >= 0 and node in known:
            return node
    own = f"{root}/{_BUS}/{chain[0]}"
    near = read_mask(f"{own}/local_cpus") or read_list(f"{own}/local_cpulist")
    for node in nodes:
        around = sum(1 << cpu for cpu in node.cpus)
        if near & around and not near & ~around:
            return node.number
    return UNKNOWN


def _slowest(speeds: Iterable[str]) -> str:
    told = [(float(m[1]), m[0]) for m in map(_SPEED.fullmatch, speeds) if m]
    return min(told, key=lambda speed: speed[0], default=(0.0, ""))[1]


def _narrowest(widths: Iterable[int]) -> int:
    told = [width for width in widths if 0 <= width < _NO_WIDTH]
    return min([w for w in told if w] or told, default=UNKNOWN)


def _code(directory: str, name: str) -> int:
    try:
        return max(UNKNOWN, int(read_text(f"{directory}/{name}"), 16))
    except ValueError:
        return UNKNOWN
