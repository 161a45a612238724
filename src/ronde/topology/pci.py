"""Parse addresses and classes of PCI devices, and models of GPUs."""

import os
import re

from ronde.topology.kernel_files import read_number

UNKNOWN = -1

# Domains have four digits, and more where firmware or a hypervisor makes them up.
_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_ANY_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])", re.IGNORECASE
)
_NVIDIA, _AMD = 0x10DE, 0x1002
_DISPLAY, _NETWORK, _ACCELERATOR = 0x03, 0x02, 0x12
_VGA, _OTHER_BRIDGE, _INFINIBAND = 0x0300, 0x0680, 0x0207
_CAPABILITIES = {
    60: "P100",
    61: "P4 P40",
    70: "V100 V100S",
    75: "T4",
    80: "A100 A800 A30 A100X",
    86: "A2 A10 A10G A16 A40 A6000 3090",
    89: "L4 L20 L40 L40S",
    90: "H20 H100 H200 H800 GH200",
    100: "B100 B200 GB200",
    103: "B300 GB300",
}
_BY_WORD = {word: sm for sm, words in _CAPABILITIES.items() for word in words.split()}


def read_path(link: str) -> str:
    """Return the bus path of the PCI device that a sysfs link points to.

    It looks like ``pci0000:80/0000:80:02.2/0000:82:00.0``; empty for other devices.
    """
    parts = read_link(link).partition("/devices/")[2].split("/")
    ends = [n for n, part in enumerate(parts, 1) if is_address(part)]
    return "/".join(parts[: ends[-1]]) if ends else ""


def read_link(link: str) -> str:
    """Return the target of a symbolic link; "" for other files."""
    try:
        return os.readlink(link)  # noqa: PTH115 - see kernel_files
    except OSError:
        return ""


def bus_id(path: str) -> str:
    return path.rpartition("/")[2]


def is_address(text: str) -> bool:
    return _ADDRESS.fullmatch(text) is not None


def bus_order(address: str) -> list[int]:
    """Return a sort key for PCI addresses: drivers number devices in this order."""
    return [int(part, 16) for part in address.replace(".", ":").split(":")]


def read_node(root: str, path: str) -> int:
    """Return the memory node of a device, else of the nearest bridge with a node."""
    while path:
        node = read_number(f"{root}/sys/devices/{path}/numa_node", UNKNOWN)
        if node >= 0:
            return node
        path = path.rpartition("/")[0]
    return UNKNOWN


def plain_address(text: str) -> str:
    """Return an address as sysfs spells it: ``0000:c2:00.0``; "" for other text."""
    # nvidia-smi writes eight digits for the domain, lspci may omit it.
    match = _ANY_ADDRESS.fullmatch(text)
    if match is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def is_gpu(class_code: int, vendor: int) -> bool:
    """Return True for GPUs that compute, not for those that only drive a screen."""
    kind = class_code >> 8
    if kind >> 8 == _DISPLAY:
        # The VGA controllers of servers are management processors.
        return vendor == _NVIDIA or kind != _VGA
    return kind >> 8 == _ACCELERATOR and vendor == _AMD


def is_network(class_code: int) -> bool:
    return class_code >> 16 == _NETWORK


def is_nvswitch(class_code: int, vendor: int) -> bool:
    return class_code >> 8 == _OTHER_BRIDGE and vendor == _NVIDIA


def port_kind(class_code: int) -> str:
    """Return the kind of an adapter's ports; "" for Ethernet, which may be EFA."""
    return "infiniband" if class_code >> 8 == _INFINIBAND else ""


def compute_capability(title: str) -> int:
    """Return ten times the compute capability of a GPU model, or ``UNKNOWN``.

    It is 90 for ``NVIDIA H100 80GB HBM3``.

    Source: https://developer.nvidia.com/cuda-gpus
    """
    words = re.split(r"[^A-Z0-9]+", title.upper())
    return next((_BY_WORD[word] for word in words if word in _BY_WORD), UNKNOWN)
