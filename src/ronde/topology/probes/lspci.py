"""The list of PCI devices that ``lspci`` prints, with or without ids and details."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ronde.errors import UsageError
from ronde.topology import pci
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    NetPort,
    NumaNode,
    PciDevice,
    Topology,
)
from ronde.topology.probes.base import Saved, bad_value, first_lines, lines_of_one

_ADDRESS = r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_LINE = re.compile(rf"({_ADDRESS})\s+(\S.*)")
_CLASS = re.compile(r"\[([0-9a-f]{4})\]:\s*")
_IDS = re.compile(r"\s*\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_START = re.compile(rf"{_ADDRESS} [^\n:]+:")
_BRIDGE = 0x0604
# What lspci calls classes and vendors without -nn.
_CLASS_NAMES = {
    "VGA compatible controller": 0x0300,
    "3D controller": 0x0302,
    "Display controller": 0x0380,
    "Processing accelerators": 0x1200,
    "PCI bridge": _BRIDGE,
    "Bridge": 0x0680,
    "Ethernet controller": 0x0200,
    "Infiniband controller": 0x0207,
    "Network controller": 0x0280,
}
_VENDOR_NAMES = {"NVIDIA": 0x10DE, "Advanced Micro Devices": 0x1002}
# Details that -vv and -vvv add; root alone sees most of them.
_NUMA = re.compile(r"\s+NUMA node: ([0-9]{1,5})")
_BUSES = re.compile(r"\s+Bus: primary=[0-9a-f]{2}, secondary=([0-9a-f]{2}),.*")
_LINK = re.compile(
    r"\s+Lnk(Cap|Sta):.*?\bSpeed ([0-9.]{1,5})GT/s[^,]*, Width x([0-9]{1,2})\b.*"
)
_REDIRECTS = re.compile(
    r"\s+ACSCtl:.*\b(?:SrcValid|ReqRedir|CmpltRedir|UpstreamFwd)\+.*"
)


class LspciProbe:
    """Reads ``lspci``, best with ``-nnvvv`` by root, else with fewer options.

    ``-vv`` adds links, what lies above what, and NUMA nodes; ``-vvv`` ACS.
    """

    format = "lspci"

    def recognises(self, saved: Saved) -> bool:
        return any(map(_START.match, first_lines(saved.text)))

    def read(self, saved: Saved) -> Topology:
        listed: dict[str, _Listed] = {}
        own = None
        lines = lines_of_one(saved.text.splitlines(), saved.name)
        for number, line in enumerate(lines, 1):
            if match := _LINE.fullmatch(line.rstrip()):
                own = _read_device(saved.name, number, line, match)
                address = own.device.bus_id
                if listed.setdefault(address, own) is not own:
                    rule = "a device must be listed once"
                    raise bad_value(saved.name, number, rule, address)
            elif own:
                own.take(line)
        if not listed:
            raise UsageError(
                f"{saved.name} must be a list of lspci, got no line of a device. "
                "Write it with: lspci -nnvvv -D"
            )
        bridges = {e.bus_below: name for name, e in listed.items() if e.bus_below}
        parents = {name: bridges.get(name[:-5], "") for name in listed}
        for name in _parents_first(parents):
            listed[name] = listed.pop(name)
            listed[name].join(listed.get(parents[name]))
        return Topology((_host(saved, listed.values()),))


@dataclass(slots=True)
class _Listed:
    """What is listed of a device."""

    device: PciDevice
    title: str
    most: tuple[float, int] | None = None  # GT/s and lanes that its own port can do
    bus_below: str = ""  # of a bridge, with its domain: ``0000:17``

    def take(self, line: str) -> None:
        """Read a line of details."""
        if match := _LINK.fullmatch(line):
            rate, width = float(match[2]), int(match[3])
            if match[1] == "Cap":
                self.most = rate, width
            else:
                speed = _speed(rate)
                self.device = self.device._replace(speed_now=speed, width_now=width)
        elif match := _NUMA.fullmatch(line):
            self.device = self.device._replace(node=int(match[1]))
        elif match := _BUSES.fullmatch(line):
            self.bus_below = f"{self.device.bus_id[:-7]}{match[1]}"
        elif _REDIRECTS.fullmatch(line):
            self.device = self.device._replace(is_redirecting=True)

    def join(self, above: "_Listed | None") -> None:
        """Put the device below a bridge; its link is what both of its ends can do."""
        if above:
            self.device = self.device._replace(parent=above.device.bus_id)
        if self.most:
            rate, width = map(min, self.most, (above and above.most) or self.most)
            speed = _speed(rate)
            self.device = self.device._replace(speed=speed, width=int(width))


def _read_device(origin: str, number: int, line: str, match: re.Match[str]) -> _Listed:
    address, rest = pci.plain_address(match[1]), match[2]
    kind = _CLASS.search(rest)
    name, is_named, title = rest.partition(": ")
    if kind is None and is_named:
        vendor = next((v for n, v in _VENDOR_NAMES.items() if n in title), UNKNOWN)
        code = _CLASS_NAMES.get(name, 0) << 8
        return _Listed(PciDevice(address, class_code=code, vendor=vendor), title)
    ids = list(_IDS.finditer(rest, kind.end())) if kind else []
    if kind is None or not ids:
        rule = "a device must have its class and its ids in brackets, as lspci"
        raise bad_value(origin, number, f"{rule} -nn writes them", line)
    code, vendor, device = (int(t, 16) for t in (kind[1], *ids[-1].groups()))
    return _Listed(
        PciDevice(address, class_code=code << 8, vendor=vendor, device=device),
        rest[kind.end() : ids[-1].start()],
    )


def _speed(rate: float) -> str:
    return f"{rate:.1f} GT/s PCIe"


def _parents_first(parents: Mapping[str, str]) -> list[str]:
    """Return addresses, each after that of the bridge above it."""
    ordered: dict[str, None] = {}
    for name in parents:
        chain = [name]
        while (above := parents.get(chain[-1], "")) and above not in chain:
            chain.append(above)
        ordered |= dict.fromkeys(reversed(chain))
    return list(ordered)


def _host(saved: Saved, listed: Iterable[_Listed]) -> HostTopology:
    gpus: list[GpuDevice] = []
    ports: list[NetPort] = []
    kept: list[PciDevice] = []
    for each in listed:
        device, address = each.device, each.device.bus_id
        code = device.class_code
        if pci.is_gpu(code, device.vendor):
            sm = pci.compute_capability(each.title)
            gpus.append(GpuDevice(address, len(gpus), sm=sm, title=each.title))
        elif pci.is_network(code):
            # Ports have no names: the address stands for it.
            ports.append(NetPort(address, address, kind=pci.port_kind(code)))
        elif not pci.is_nvswitch(code, device.vendor) and code >> 8 != _BRIDGE:
            continue
        kept.append(device)
    numbers = sorted({device.node for device in kept} - {UNKNOWN})
    nodes = tuple(NumaNode(number) for number in numbers)
    sources = (f"{LspciProbe.format} {saved.name}",)
    return HostTopology("", sources, nodes, tuple(kept), tuple(gpus), tuple(ports))
