"""Read the PCI devices that ``lspci`` prints, with or without ids and details."""

import re
from collections.abc import Mapping

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
from ronde.topology.probes.base import (
    Probe,
    Saved,
    bad_value,
    has_line,
    keep_lower_ends,
    lines_of_one,
)

_ADDRESS = r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_LINE = re.compile(rf"({_ADDRESS})\s+(\S.*)")
_START = re.compile(rf"^{_ADDRESS} [^\n:]+:")
# A class by its number (-n), its name, or both (-nn, and classes without a name).
_CLASS = re.compile(r"(?:([0-9a-f]{4})|(.*?)(?: \[([0-9a-f]{4})\])?): *(?=\S)(.*)")
_IDS = re.compile(r"\s*\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_REVISION = re.compile(r" \((?:rev|prog-if) .*")
_BRIDGE = 0x0604
# Names of classes and vendors without -nn.
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
# Details that -vv and -vvv add; only root sees most of them.
_NUMA = re.compile(r"\s+NUMA node: ([0-9]{1,5})")
_BUSES = re.compile(r"\s+Bus: primary=[0-9a-f]{2}, secondary=([0-9a-f]{2}),.*")
_LINK = re.compile(
    r"\s+Lnk(Cap|Sta):.*?\bSpeed ([0-9.]{1,5})GT/s[^,]*, Width x([0-9]{1,2})\b.*"
)
_REDIRECTS = re.compile(r"\s+ACSCtl:.*\b(?:ReqRedir|CmpltRedir)\+.*")


def _read(saved: Saved) -> Topology:
    devices: dict[str, PciDevice] = {}
    titles: dict[str, str] = {}
    bridges: dict[str, str] = {}  # By the bus below, with its domain: ``0000:17``.
    lines = lines_of_one(saved.text.splitlines(), saved.name)
    own = None
    for number, line in enumerate(lines, 1):
        if match := _LINE.fullmatch(line.rstrip()):
            own, title = _device(saved.name, number, match)
            if own.bus_id in devices:
                rule = "a device must be listed once"
                raise bad_value(saved.name, number, rule, own.bus_id)
            titles[own.bus_id] = title
        elif own and (match := _BUSES.fullmatch(line)):
            bridges[f"{own.bus_id[:-7]}{match[1]}"] = own.bus_id
        elif own:
            own = _with_detail(own, line)
        if own:
            devices[own.bus_id] = own
    if not devices:
        raise UsageError(
            f"{saved.name} lists no PCI devices. Write it with: lspci -nnvvv -D"
        )
    for name, device in devices.items():
        devices[name] = device._replace(parent=bridges.get(name[:-5], ""))
    return Topology((_host(saved, devices, titles),))


def _device(origin: str, number: int, match: re.Match[str]) -> tuple[PciDevice, str]:
    address, line = pci.plain_address(match[1]), match[2]
    kind = _CLASS.fullmatch(line)
    if kind is None:
        rule = "a device must have its class and a name or ids, as lspci writes them"
        raise bad_value(origin, number, rule, line)
    bare, name, code, rest = kind.groups()
    rest = re.sub(r"^(\w{4}:\w{4})\b", r"[\1]", rest) if bare else rest
    ids = list(_IDS.finditer(rest))
    # In a list with ids, a line without ids was cut.
    if name in _CLASS_NAMES and code and not ids:
        rule = "a device must have its class and its ids in brackets, as lspci"
        raise bad_value(origin, number, f"{rule} -nn writes them", line)
    vendor = next((v for n, v in _VENDOR_NAMES.items() if n in rest), UNKNOWN)
    device = UNKNOWN
    if ids and (bare or code):
        vendor, device = (int(text, 16) for text in ids[-1].groups())
        rest = rest[: ids[-1].start()]
    class_code = (int(bare or code or "0", 16) or _CLASS_NAMES.get(name, 0)) << 8
    found = PciDevice(address, class_code=class_code, vendor=vendor, device=device)
    # All bits of a lost device read as 1.
    found = found._replace(is_lost=" (rev ff)" in line)
    return found, _REVISION.sub("", rest)


def _with_detail(device: PciDevice, line: str) -> PciDevice:
    if match := _LINK.fullmatch(line):
        speed, width = f"{float(match[2]):.1f} GT/s PCIe", int(match[3])
        if match[1] == "Cap":
            return device._replace(speed=speed, width=width)
        return device._replace(speed_now=speed, width_now=width)
    if match := _NUMA.fullmatch(line):
        return device._replace(node=int(match[1]))
    has_acs = _REDIRECTS.fullmatch(line) is not None
    return device._replace(is_redirecting=has_acs or device.is_redirecting)


def _host(
    saved: Saved, devices: Mapping[str, PciDevice], titles: Mapping[str, str]
) -> HostTopology:
    gpus: list[GpuDevice] = []
    ports: list[NetPort] = []
    ends: list[str] = []
    for address, device in devices.items():
        code = device.class_code
        if pci.is_gpu(code, device.vendor):
            title = titles[address]
            sm = pci.compute_capability(title)
            gpus.append(GpuDevice(address, len(gpus), sm=sm, title=title))
        elif pci.is_network(code):
            # Ports have no names here; use the address.
            ports.append(NetPort(address, address, kind=pci.port_kind(code)))
        elif not pci.is_nvswitch(code, device.vendor):
            continue
        ends.append(address)
    kept = keep_lower_ends(devices, ends)
    numbers = sorted({device.node for device in kept} - {UNKNOWN})
    nodes = tuple(NumaNode(number) for number in numbers)
    sources = (f"lspci {saved.name}",)
    return HostTopology("", sources, nodes, kept, tuple(gpus), tuple(ports))


# Best is ``-nnvvv`` by root: ``-vv`` adds links, tree and NUMA nodes, ``-vvv`` ACS.
LSPCI = Probe("lspci", has_line(_START), _read)
