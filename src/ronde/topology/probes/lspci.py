"""The list of PCI devices that ``lspci -nn`` prints."""

import re

from ronde.errors import UsageError
from ronde.topology import pci
from ronde.topology.graph import GpuDevice, HostTopology, NetPort, PciDevice, Topology
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
        known: set[str] = set()
        devices: list[PciDevice] = []
        gpus: list[GpuDevice] = []
        ports: list[NetPort] = []
        lines = lines_of_one(saved.text.splitlines(), saved.name)
        for number, line in enumerate(lines, 1):
            match = _LINE.fullmatch(line.rstrip())
            if match is None:
                continue
            address, rest = pci.plain_address(match[1]), match[2]
            kind = _CLASS.search(rest)
            ids = list(_IDS.finditer(rest, kind.end())) if kind else []
            if kind is None or not ids:
                rule = "a device must have its class and its ids in brackets, as lspci"
                raise bad_value(saved.name, number, f"{rule} -nn writes them", line)
            if address in known:
                rule = "a device must be listed once"
                raise bad_value(saved.name, number, rule, address)
            known.add(address)
            title = rest[kind.end() : ids[-1].start()]
            code, vendor, device = (int(t, 16) for t in (kind[1], *ids[-1].groups()))
            code <<= 8
            if pci.is_gpu(code, vendor):
                sm = pci.compute_capability(title)
                gpus.append(GpuDevice(address, len(gpus), sm=sm, title=title))
            elif pci.is_network(code):
                # Ports have no names: the address stands for it.
                ports.append(NetPort(address, address, kind=pci.port_kind(code)))
            elif not pci.is_nvswitch(code, vendor) and code >> 8 != _BRIDGE:
                continue
            devices.append(
                PciDevice(address, class_code=code, vendor=vendor, device=device)
            )
        if not known:
            raise UsageError(
                f"{saved.name} must be a list of lspci -nn, got no line of a device. "
                "Write it with: lspci -nn -D"
            )
        sources = (f"{self.format} {saved.name}",)
        host = HostTopology("", sources, (), tuple(devices), tuple(gpus), tuple(ports))
        return Topology((host,))
