"""The cores, GPUs and network adapters of a machine that ranks share.

Functions take ``root``: the directory that holds proc, sys and dev; empty for this
machine.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.topology.cpu_sets import members, parse_list, parse_mask
from ronde.topology.kernel_files import (
    list_names,
    read_list,
    read_mask,
    read_number,
    read_text,
)
from ronde.topology.pci import bus_id, bus_order, is_address, read_node, read_path

UNKNOWN_NODE = -1
"""The memory node of what the kernel does not place."""


class Core(NamedTuple):
    """One physical core."""

    cpus: tuple[int, ...]  # Its hardware threads that this process may use, ascending.
    node: int  # Its memory node, or ``UNKNOWN_NODE``.


class Gpu(NamedTuple):
    """One GPU."""

    number: int  # Its place in the order of bus addresses, whatever is hidden.
    bus_id: str  # As sysfs writes it: ``0000:1b:00.0``; empty where it is not known.
    node: int  # Its memory node, or ``UNKNOWN_NODE``.
    name: str  # What the driver calls it; empty if unknown.
    maker: str  # ``nvidia``, ``amd`` or ``intel``.
    uuid: str  # ``GPU-...``; empty if unknown.
    # Its place on the bus: host bridge, bridges and itself, as sysfs has them.
    path: str
    visible_as: str  # What names it in ``CUDA_VISIBLE_DEVICES`` and the like.


class Nic(NamedTuple):
    """One network interface or RDMA adapter that is up."""

    name: str  # ``eth0``, ``mlx5_0``.
    kind: str  # ``ethernet`` for what has sockets, ``infiniband`` for an RDMA adapter.
    bus_id: str  # As sysfs writes it; empty for what is no PCI device.
    node: int  # Its memory node, or ``UNKNOWN_NODE``.
    mbit_per_s: int  # Its rate; 0 where unknown.
    path: str  # Its place on the bus, like a GPU's; empty for what is no PCI device.


class NearPort(NamedTuple):
    """How near a port to train over is to a GPU."""

    gpu: str  # The GPU's address, as sysfs writes it.
    port: str  # Its name: ``mlx5_0``.
    order: tuple[float, ...]  # Smaller is nearer; of equals, none is better.


class Machine(NamedTuple):
    """What ranks on one machine have to share."""

    # Those that this process may use, by memory node and number.
    cores: tuple[Core, ...]
    cpu_limit: float  # CPUs that the control groups allow at a time, 0 for no limit.
    # Those that a program of this process would see, in its order; all of one maker.
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]  # Those that are up, by name.
    # What is known of these GPUs and the ports to train over, port by port.
    near: tuple[NearPort, ...] = ()


def read_cpu_limit(root: str) -> float:
    """Return how many CPUs may be used at a time, 0 for no limit."""
    limits = [limit for group in list_groups(root, "cpu") if (limit := _limit(group))]
    return min(limits, default=0.0)


def read_cpuset(root: str) -> int:
    """Return the set of CPUs that may be used, 0 if unknown."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for group in list_groups(root, "cpuset"):
        for name in names:
            cpus = read_list(f"{group}/{name}")
            if cpus:
                return cpus
    return 0


def list_groups(root: str, controller: str) -> list[str]:
    """Return the directories of this process's groups, each before what is above it.

    Not all that are named need be there.
    """
    mounts = f"{root}/sys/fs/cgroup"
    found: list[str] = []
    for line in read_text(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            tops = (mounts, f"{mounts}/unified")
        elif controller in controllers.split(","):
            tops = (f"{mounts}/{controller}", f"{mounts}/{controllers}")
        else:
            continue
        found += [f"{top}{group}" for group in _upwards(path) for top in tops]
    return found


def _upwards(path: str) -> list[str]:
    """Return a group's path and those above it; just the top for one outside of it."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return [""]
    return ["".join(f"/{p}" for p in parts[:n]) for n in range(len(parts), -1, -1)]


def _limit(group: str) -> float:
    quota, _, period = read_text(f"{group}/cpu.max").partition(" ")
    if not quota:
        quota = read_text(f"{group}/cpu.cfs_quota_us")
        period = read_text(f"{group}/cpu.cfs_period_us")
    is_limit = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if is_limit else 0.0


def read_cores(root: str) -> tuple[Core, ...]:
    """Return the cores by memory node and number, each with its allowed threads."""
    nodes = read_node_cpus(root)
    cores: list[Core] = []
    for cpus in split_cores(root, _allowed(root)):
        first = cpus[0]
        node = next((n for n, near in nodes.items() if near >> first & 1), UNKNOWN_NODE)
        cores.append(Core(cpus, node))
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def split_cores(root: str, cpus: int) -> list[tuple[int, ...]]:
    """Return a set's CPUs by physical core, ascending."""
    left = cpus
    cores: list[tuple[int, ...]] = []
    while left:
        cpu = (left & -left).bit_length() - 1
        directory = f"{root}/sys/devices/system/cpu/cpu{cpu}/topology"
        # Masks, not lists: every kernel has them, and core_id is no key, for it is
        # unique within one package only.
        threads = read_mask(f"{directory}/thread_siblings") & left
        threads |= 1 << cpu
        left ^= threads
        cores.append(tuple(members(threads)))
    return cores


def read_online(root: str) -> int:
    """Return the CPUs that are online, as bits."""
    directory = f"{root}/sys/devices/system/cpu"
    online = read_list(f"{directory}/online")
    if online:
        return online
    names = [name[3:] for name in list_names(directory) if name.startswith("cpu")]
    return parse_list(",".join(n for n in names if n.isdecimal() and len(n) < 5))


def read_node_cpus(root: str) -> dict[int, int]:
    """Return the CPUs of each memory node by its number, as bits; ids have gaps."""
    directory = f"{root}/sys/devices/system/node"
    names = [name[4:] for name in list_names(directory) if name.startswith("node")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return {node: read_mask(f"{directory}/node{node}/cpumap") for node in numbers}


def _allowed(root: str) -> int:
    """Return the CPUs that are online, in the affinity mask and in the cpuset.

    Sandboxes show some of these files only, or the host's: what would leave nothing is
    not believed.
    """
    allowed = read_online(root)
    for limit in (_affinity(root), read_cpuset(root)):
        allowed = allowed & limit or allowed or limit
    return allowed


def _affinity(root: str) -> int:
    for line in read_text(f"{root}/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed":
            try:
                return parse_mask(value.strip())
            except ValueError:
                return 0
    return 0


VISIBLE_DEVICES = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "HIP_VISIBLE_DEVICES",
    "intel": "ZE_AFFINITY_MASK",
}
"""The variable that says which GPUs of a maker a program sees."""

_PCI_MAKERS = {"0x1002": "amd", "0x8086": "intel"}
# VGA, 3D and other display controllers, and processing accelerators: AMD's and Intel's
# GPUs for computing are of any of these classes.
_PCI_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_FIRST_BUS = "0000:00:"


def read_gpus(root: str, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return them in the program's order: NVIDIA's, else AMD's, else Intel's."""
    gpus = _nvidia(root) or _rendering(root, "amd") or _rendering(root, "intel")
    # ROCm hides by two variables, one on top of the other: what the lower one leaves is
    # counted anew by the upper.
    lower = environ.get("ROCR_VISIBLE_DEVICES")
    if gpus and gpus[0].maker == "amd" and lower is not None:
        left = select_gpus(gpus, lower)
        gpus = tuple(gpu._replace(visible_as=str(n)) for n, gpu in enumerate(left))
    return visible_gpus(gpus, environ)


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return those that an environment leaves to be seen.

    To ask again about what is left changes nothing.
    """
    maker = gpus[0].maker if gpus else "nvidia"
    text = environ.get(VISIBLE_DEVICES[maker])
    if text is None and maker == "amd":
        text = environ.get(VISIBLE_DEVICES["nvidia"])
    return tuple(gpus) if text is None else select_gpus(gpus, text)


def select_gpus(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """Return those that a list names, in its order.

    As drivers do, stop at the first item that is no device or was named already. Where
    nothing is known of any GPU, the list is believed.
    """
    chosen: list[Gpu] = []
    for item in text.split(","):
        gpu = _find(gpus, item.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


class DriverGpu(NamedTuple):
    """What NVIDIA's driver shows of a GPU in /proc."""

    model: str  # ``NVIDIA H100``; empty if unknown.
    uuid: str  # ``GPU-...``; empty if unknown.
    minor: str  # Number of the device's file.


def read_driver_gpus(root: str) -> dict[str, DriverGpu]:
    """Return the GPUs of NVIDIA's driver by bus address, as drivers count them."""
    directory = f"{root}/proc/driver/nvidia/gpus"
    addresses = [name for name in list_names(directory) if is_address(name)]
    found: dict[str, DriverGpu] = {}
    for position, address in enumerate(sorted(addresses, key=bus_order)):
        fields = _fields(read_text(f"{directory}/{address}/information"))
        uuid = fields.get("GPU UUID", "")
        found[address] = DriverGpu(
            model=fields.get("Model", ""),
            # A driver that has not looked yet writes question marks.
            uuid="" if "?" in uuid else uuid,
            minor=fields.get("Device Minor", str(position)),
        )
    return found


def _find(gpus: Sequence[Gpu], item: str) -> Gpu | None:
    for gpu in gpus:
        if item == gpu.visible_as:
            return gpu
        if item.startswith("GPU-") and gpu.uuid.startswith(item):
            return gpu._replace(visible_as=item)
    if item.isdigit() and not gpus:
        return _unplaced(int(item), item)
    is_unknown = item.startswith("GPU-") and not any(gpu.uuid for gpu in gpus)
    return _unplaced(-1, item) if is_unknown or item.startswith("MIG-") else None


def _unplaced(index: int, visible_as: str) -> Gpu:
    return Gpu(index, "", UNKNOWN_NODE, "", "nvidia", "", "", visible_as)


def _nvidia(root: str) -> tuple[Gpu, ...]:
    drivers = read_driver_gpus(root)
    if not drivers:
        return _nvidia_files(root)
    found: list[Gpu] = []
    for address, driver in drivers.items():
        if _may_open(f"{root}/dev/nvidia{driver.minor}"):
            path = read_path(f"{root}/sys/bus/pci/devices/{address}")
            found.append(
                Gpu(
                    number=len(found),
                    bus_id=address,
                    node=read_node(root, path),
                    name=driver.model,
                    maker="nvidia",
                    uuid=driver.uuid,
                    path=path,
                    visible_as=str(len(found)),
                )
            )
    return tuple(found)


def _nvidia_files(root: str) -> tuple[Gpu, ...]:
    """Return one GPU a device file, for sandboxes that hide the driver's directory."""
    files = (name[6:] for name in list_names(f"{root}/dev") if name[:6] == "nvidia")
    minors = sorted(int(minor) for minor in files if minor.isdigit())
    usable = [minor for minor in minors if _may_open(f"{root}/dev/nvidia{minor}")]
    return tuple(_unplaced(n, str(n)) for n in range(len(usable)))


def _rendering(root: str, maker: str) -> tuple[Gpu, ...]:
    """Return a maker's GPUs that have a file for rendering, which computing uses too.

    Not those inside the processor, which sit on the first bus.
    """
    devices: dict[str, str] = {}
    for name in list_names(f"{root}/sys/class/drm"):
        path = read_path(f"{root}/sys/class/drm/{name}")
        own = f"{root}/sys/devices/{path}"
        if (
            name.startswith("renderD")
            and _PCI_MAKERS.get(read_text(f"{own}/vendor")) == maker
            and read_text(f"{own}/class").startswith(_PCI_CLASSES)
            and not bus_id(path).startswith(_FIRST_BUS)
            and _may_open(f"{root}/dev/dri/{name}")
        ):
            devices[bus_id(path)] = path
    ordered = [devices[address] for address in sorted(devices, key=bus_order)]
    return tuple(
        Gpu(n, bus_id(path), read_node(root, path), "", maker, "", path, str(n))
        for n, path in enumerate(ordered)
    )


def _may_open(path: str) -> bool:
    # Asks the device control group too, without waking the device as opening it would.
    return os.access(path, os.R_OK | os.W_OK)


def _fields(text: str) -> dict[str, str]:
    """Return the fields of lines such as ``Model:   NVIDIA H100``."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


_LOOPBACK = "772"


def read_nics(root: str) -> tuple[Nic, ...]:
    """Return them by name, without loopback and what only serves a container."""
    found: list[tuple[str, str, str, int]] = []
    for name in list_names(f"{root}/sys/class/net"):
        own = f"{root}/sys/class/net/{name}"
        path = read_path(own)
        is_far_end = not path and bool(list_names(f"{own}/brport"))
        # The carrier of one that is down cannot be read.
        is_up = read_text(f"{own}/carrier") == "1"
        if is_up and not is_far_end and read_text(f"{own}/type") != _LOOPBACK:
            rate = max(0, read_number(f"{own}/speed", 0))
            found.append((name, "ethernet", path, rate))
    for name in list_names(f"{root}/sys/class/infiniband"):
        own = f"{root}/sys/class/infiniband/{name}"
        rates = [
            parse_rate(read_text(f"{own}/ports/{port}/rate"))
            for port in list_names(f"{own}/ports")
            if read_text(f"{own}/ports/{port}/state").startswith("4:")
        ]
        if rates:
            found.append((name, "infiniband", read_path(own), max(rates)))
    nics = [
        Nic(name, kind, bus_id(path), read_node(root, path), rate, path)
        for name, kind, path, rate in found
    ]
    return tuple(sorted(nics, key=lambda nic: nic.name))


def parse_rate(rate: str) -> int:
    """Return the Mbit/s of ``400 Gb/sec (4X NDR)``; 0 if unknown."""
    try:
        return int(float(rate.split(maxsplit=1)[0]) * 1000)
    except (ValueError, IndexError, OverflowError):
        return 0
