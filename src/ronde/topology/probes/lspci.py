"""The list of PCI devices that ``lspci -nn`` prints."""

import re
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.graph import (
    GpuDevice,
    HostTopology,
    NetPort,
    PciDevice,
    Topology,
)
from ronde.topology.pci import (
    compute_capability,
    is_gpu,
    is_network,
    is_nvswitch,
    plain_address,
)
from ronde.topology.probes.base import Saved, bad_value, first_lines, lines_of_one

_ADDRESS = r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_LINE = re.compile(rf"({_ADDRESS})\s+(\S.*)")
_CLASS = re.compile(r"\[([0-9a-f]{4})\]:\s*")
_IDS = re.compile(r"\s*\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_START = re.compile(rf"{_ADDRESS} [^\n:]+:")
_BRIDGE, _INFINIBAND = 0x0604, 0x0207


class _Entry(NamedTuple):
    device: PciDevice
    title: str


class LspciProbe:
    """Reads ``lspci -nn``, also with ``-D``, ``-k`` or ``-v``.

    What lies above what is not in it, nor are speeds and NUMA nodes.
    """

    format = "lspci -nn"

    def recognises(self, saved: Saved) -> bool:
        """Return whether there are lines of lspci's near the beginning."""
        return any(map(_START.match, first_lines(saved.text)))

    def read(self, saved: Saved) -> Topology:
        """Return GPUs, network adapters, NVSwitches and bridges, in the file's order.

        Raises:
            UsageError: There are none of lspci's lines, or they have no numbers, or
                are of several hosts.
        """
        entries = _entries(saved)
        wanted = [entry for entry in entries if _matters(entry.device)]
        gpus = [each for each in wanted if _is_gpu(each.device)]
        host = HostTopology(
            sources=(f"{self.format} {saved.name}",),
            devices=tuple(entry.device for entry in wanted),
            gpus=tuple(
                GpuDevice(
                    bus_id=device.bus_id,
                    number=number,
                    sm=compute_capability(title),
                    title=title,
                )
                for number, (device, title) in enumerate(gpus)
            ),
            # No name of a port is told: the address stands for it.
            ports=tuple(
                NetPort(device.bus_id, device.bus_id, kind=_kind(device))
                for device, _ in wanted
                if is_network(device.class_code)
            ),
        )
        return Topology(hosts=(host,))


def _entries(saved: Saved) -> list[_Entry]:
    found: dict[str, _Entry] = {}
    lines = lines_of_one(saved.text.splitlines(), saved.name)
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            continue
        entry = _entry(plain_address(match[1]), match[2])
        if entry is None:
            raise bad_value(
                saved.name,
                number,
                "a device must have its class and its ids in brackets, as lspci -nn "
                "writes them",
                line,
            )
        if entry.device.bus_id in found:
            raise bad_value(
                saved.name, number, "a device must be listed once", entry.device.bus_id
            )
        found[entry.device.bus_id] = entry
    if not found:
        raise UsageError(
            f"{saved.name} must be a list of lspci -nn, got no line of a device. Write "
            "it with: lspci -nn -D"
        )
    return list(found.values())


def _entry(bus_id: str, rest: str) -> _Entry | None:
    """Return a device; none where its class or its ids are missing."""
    kind = _CLASS.search(rest)
    ids = list(_IDS.finditer(rest, kind.end())) if kind else []
    if kind is None or not ids:
        return None
    device = PciDevice(
        bus_id=bus_id,
        class_code=int(kind[1], 16) << 8,
        vendor=int(ids[-1][1], 16),
        device=int(ids[-1][2], 16),
    )
    return _Entry(device, rest[kind.end() : ids[-1].start()])


def _kind(device: PciDevice) -> str:
    return "infiniband" if device.class_code >> 8 == _INFINIBAND else ""


def _is_gpu(device: PciDevice) -> bool:
    return is_gpu(device.class_code, device.vendor)


def _matters(device: PciDevice) -> bool:
    return (
        _is_gpu(device)
        or is_network(device.class_code)
        or is_nvswitch(device.class_code, device.vendor)
        or device.class_code >> 8 == _BRIDGE
    )
