"""The list of PCI devices that ``lspci -nn`` prints."""

import re

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
    port_kind,
)
from ronde.topology.probes.base import Saved, bad_value, first_lines, lines_of_one

_ADDRESS = r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_LINE = re.compile(rf"({_ADDRESS})\s+(\S.*)")
_CLASS = re.compile(r"\[([0-9a-f]{4})\]:\s*")
_IDS = re.compile(r"\s*\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_START = re.compile(rf"{_ADDRESS} [^\n:]+:")
_BRIDGE = 0x0604


class LspciProbe:
    """Reads ``lspci -nn``, also with ``-D``, ``-k`` or ``-v``.

    It has neither what lies above what, nor speeds and NUMA nodes.
    """

    format = "lspci -nn"

    def recognises(self, saved: Saved) -> bool:
        return any(map(_START.match, first_lines(saved.text)))

    def read(self, saved: Saved) -> Topology:
        """Return GPUs, network adapters, NVSwitches and bridges, in the file's order.

        Raises:
            UsageError: There are none of lspci's lines, or they have no numbers, or
                are of several hosts.
        """
        titles = _read_titles(saved)
        devices = tuple(filter(_matters, titles))
        gpus = [each for each in devices if is_gpu(each.class_code, each.vendor)]
        host = HostTopology(
            sources=(f"{self.format} {saved.name}",),
            devices=devices,
            gpus=tuple(
                GpuDevice(
                    gpu.bus_id,
                    number,
                    sm=compute_capability(titles[gpu]),
                    title=titles[gpu],
                )
                for number, gpu in enumerate(gpus)
            ),
            # Ports have no names: the address stands for it.
            ports=tuple(
                NetPort(each.bus_id, each.bus_id, kind=port_kind(each.class_code))
                for each in devices
                if is_network(each.class_code)
            ),
        )
        return Topology(hosts=(host,))


def _read_titles(saved: Saved) -> dict[PciDevice, str]:
    found: dict[PciDevice, str] = {}
    known: set[str] = set()
    lines = lines_of_one(saved.text.splitlines(), saved.name)
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            continue
        address, rest = plain_address(match[1]), match[2]
        kind = _CLASS.search(rest)
        ids = list(_IDS.finditer(rest, kind.end())) if kind else []
        if kind is None or not ids:
            rule = (
                "a device must have its class and its ids in brackets, as lspci -nn "
                "writes them"
            )
            raise bad_value(saved.name, number, rule, line)
        if address in known:
            raise bad_value(saved.name, number, "a device must be listed once", address)
        known.add(address)
        code, vendor, device = (int(t, 16) for t in (kind[1], *ids[-1].groups()))
        key = PciDevice(address, class_code=code << 8, vendor=vendor, device=device)
        found[key] = rest[kind.end() : ids[-1].start()]
    if not found:
        raise UsageError(
            f"{saved.name} must be a list of lspci -nn, got no line of a device. Write "
            "it with: lspci -nn -D"
        )
    return found


def _matters(device: PciDevice) -> bool:
    code, vendor = device.class_code, device.vendor
    is_end = is_gpu(code, vendor) or is_network(code)
    return is_end or is_nvswitch(code, vendor) or code >> 8 == _BRIDGE
