"""GPUs, as their drivers show them in /proc and /sys, else by their PCI class."""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.topology.gpus import read_driver_gpus
from ronde.topology.graph import UNKNOWN, GpuDevice, Link, LinkKind
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.pci import bus_order
from ronde.topology.probes.nvidia_models import compute_capability
from ronde.topology.probes.pci_kinds import is_gpu
from ronde.topology.probes.sysfs_devices import Function

_NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
_KFD = "sys/class/kfd/kfd/topology/nodes"
_KFD_XGMI = "11"
# AMD's and Intel's on the first bus are parts of the processor, for screens.
_FIRST_BUS = "0000:00:"


class _KfdNode(NamedTuple):
    """An AMD GPU as the driver for computing shows it."""

    bus_id: str
    sm: int
    gcn: str


def read_gpus(
    root: str, functions: Mapping[str, Function]
) -> tuple[tuple[GpuDevice, ...], tuple[Link, ...]]:
    """Return the GPUs by bus address, and AMD's links between them.

    Of a maker whose driver tells, those that it tells of; containers show more on the
    bus. Of NVIDIA's links the kernel knows nothing.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
        functions: All that is on the bus.
    """
    nvidia = {
        address: GpuDevice(
            bus_id=address,
            number=UNKNOWN,
            sm=compute_capability(told.model),
            title=told.model,
            uuid=told.uuid,
        )
        for address, told in read_driver_gpus(root).items()
    }
    kfd = _read_kfd(root)
    amd = {
        each.bus_id: GpuDevice(each.bus_id, UNKNOWN, sm=each.sm, gcn=each.gcn)
        for each in kfd.values()
    }
    told = {vendor for vendor, gpus in ((_NVIDIA, nvidia), (_AMD, amd)) if gpus}
    found = nvidia | amd
    for address, each in functions.items():
        if each.vendor not in told and _is_gpu(address, each):
            found.setdefault(address, GpuDevice(address, UNKNOWN))
    ordered = sorted(found, key=bus_order)
    gpus = tuple(found[name]._replace(number=n) for n, name in enumerate(ordered))
    return gpus, _read_xgmi(root, kfd)


def _is_gpu(address: str, each: Function) -> bool:
    is_inside = each.vendor in (_AMD, _INTEL) and address.startswith(_FIRST_BUS)
    return is_gpu(each.class_code, each.vendor) and not is_inside


def _read_kfd(root: str) -> dict[str, _KfdNode]:
    """Return AMD's GPUs by the number of their node."""
    found: dict[str, _KfdNode] = {}
    for number in list_names(f"{root}/{_KFD}"):
        # Those that this container may not use have a number that cannot be read.
        if read_text(f"{root}/{_KFD}/{number}/gpu_id") in ("", "0"):
            continue
        told = _properties(f"{root}/{_KFD}/{number}/properties")
        location, version = told.get("location_id", 0), told.get("gfx_target_version")
        found[number] = _KfdNode(
            bus_id=f"{told.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:"
            f"{location >> 3 & 0x1F:02x}.{location & 7}",
            sm=told.get("simd_count", UNKNOWN) // max(1, told.get("simd_per_cu", 1)),
            gcn=_gcn(version) if version else "",
        )
    return found


def _gcn(version: int) -> str:
    """Return ``90a`` for 90010, of which each part becomes one hexadecimal digit."""
    return f"{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _read_xgmi(root: str, kfd: Mapping[str, _KfdNode]) -> tuple[Link, ...]:
    links: list[Link] = []
    for number, each in kfd.items():
        directory = f"{root}/{_KFD}/{number}/io_links"
        for name in list_names(directory):
            told = _properties(f"{directory}/{name}/properties")
            target = kfd.get(str(told.get("node_to")))
            if target is None or str(told.get("type")) != _KFD_XGMI:
                continue
            least, most = told.get("min_bandwidth", 0), told.get("max_bandwidth", 0)
            # The driver tells what one link carries, and all together, in MB/s.
            links.append(
                Link(
                    kind=LinkKind.XGMI,
                    source=each.bus_id,
                    target=target.bus_id,
                    num_links=max(1, most // least) if least > 0 else 1,
                )
            )
    return tuple(links)


def _properties(path: str) -> dict[str, int]:
    """Return the numbers of lines such as ``simd_count 1216``."""
    pairs = (line.partition(" ") for line in read_text(path).splitlines())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}
