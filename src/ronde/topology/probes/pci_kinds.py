"""What a PCI device is, by its class and its maker, and its address in one spelling."""

import re

_NVIDIA, _AMD = 0x10DE, 0x1002
_DISPLAY, _NETWORK, _ACCELERATOR = 0x03, 0x02, 0x12
_VGA = 0x0300
_OTHER_BRIDGE = 0x0680

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])", re.IGNORECASE
)


def plain_address(text: str) -> str:
    """Return an address as sysfs spells it: ``0000:c2:00.0``; empty if it is none.

    nvidia-smi writes eight digits for the domain, lspci leaves it out where all are in
    the first.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def is_gpu(class_code: int, vendor: int) -> bool:
    """Return whether a device computes, which what only drives a screen does not.

    NVIDIA's are of any display class; others' are 3D or other display controllers, for
    the VGA controllers of servers are management processors; AMD has accelerators, too.

    Args:
        class_code: Class, subclass and interface.
        vendor: PCI's number of the maker.
    """
    kind = class_code >> 8
    if kind >> 8 == _DISPLAY:
        return vendor == _NVIDIA or kind != _VGA
    return kind >> 8 == _ACCELERATOR and vendor == _AMD


def is_network(class_code: int) -> bool:
    """Return whether a device is a network adapter."""
    return class_code >> 16 == _NETWORK


def is_nvswitch(class_code: int, vendor: int) -> bool:
    """Return whether a device is a switch of NVLink's."""
    return class_code >> 8 == _OTHER_BRIDGE and vendor == _NVIDIA
