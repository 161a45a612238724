"""Where a device sits on the bus, and to which memory node that is near."""

import os
import re

from ronde.topology.kernel_files import read_number
from ronde.topology.machine import UNKNOWN_NODE

# Domains have four digits, and more where firmware or a hypervisor makes them up.
_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


def read_path(link: str) -> str:
    """Return the place on the bus of what a link of sysfs leads to.

    That is host bridge, bridges and device: ``pci0000:80/0000:80:02.2/0000:82:00.0``;
    empty for what is below no PCI device.
    """
    parts = read_link(link).partition("/devices/")[2].split("/")
    ends = [n for n, part in enumerate(parts, 1) if is_address(part)]
    return "/".join(parts[: ends[-1]]) if ends else ""


def read_link(link: str) -> str:
    """Return where a link of sysfs leads to; empty for what is no link."""
    try:
        return os.readlink(link)  # noqa: PTH115 - see kernel_files
    except OSError:
        return ""


def bus_id(path: str) -> str:
    """Return the address of the device at a place on the bus."""
    return path.rpartition("/")[2]


def is_address(text: str) -> bool:
    """Return whether a text is the address of a device: ``0000:1b:00.0``."""
    return _ADDRESS.fullmatch(text) is not None


def bus_order(address: str) -> list[int]:
    """Return a key that sorts addresses as drivers count devices."""
    return [int(part, 16) for part in address.replace(".", ":").split(":")]


def read_node(root: str, path: str) -> int:
    """Return the memory node of a device, else of the nearest bridge that has one.

    Args:
        root: Where ``sys`` is; empty for this machine.
        path: The device's place on the bus.
    """
    while path:
        node = read_number(f"{root}/sys/devices/{path}/numa_node", UNKNOWN_NODE)
        if node >= 0:
            return node
        path = path.rpartition("/")[0]
    return UNKNOWN_NODE
