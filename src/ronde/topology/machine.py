"""Read the cores, GPUs and interfaces that ranks share from /proc and /sys."""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ronde.memory import list_groups
from ronde.topology.cpu_sets import members, parse_mask
from ronde.topology.kernel_files import (
    list_names,
    list_numbers,
    read_fields,
    read_list,
    read_mask,
    read_number,
    read_text,
)
from ronde.topology.pci import bus_id, bus_order, is_address, read_node, read_path

UNKNOWN_NODE = -1  # A memory node that the kernel does not know.


class Core(NamedTuple):
    """A physical core, its usable hardware threads, and its memory node."""

    cpus: tuple[int, ...]  # Its hardware threads that this process may use, ascending.
    node: int  # Its memory node, or ``UNKNOWN_NODE``.


class Gpu(NamedTuple):
    """A GPU that programs can see, with the name to select it."""

    bus_id: str  # As sysfs writes it: ``0000:1b:00.0``; empty where it is not known.
    node: int  # Its memory node, or ``UNKNOWN_NODE``.
    name: str  # The driver's name for it; empty if unknown.
    maker: str  # ``nvidia``, ``amd`` or ``intel``.
    uuid: str  # ``GPU-...``; empty if unknown.
    visible_as: str  # Its name in ``CUDA_VISIBLE_DEVICES`` and the like.


class NearPort(NamedTuple):
    """The distance of a network port from a GPU."""

    gpu: str  # The GPU's address, as sysfs writes it.
    port: str  # Its name: ``mlx5_0``.
    order: tuple[float, ...]  # Smaller is nearer; of equals, none is better.


class Machine(NamedTuple):
    """The resources that ranks on one machine share."""

    cores: tuple[Core, ...]  # That this process may use, by memory node and number.
    cpu_limit: float  # CPU quota of the control groups, in CPUs; 0 for no limit.
    gpus: tuple[Gpu, ...]  # That its programs would see, in their order; of one maker.
    mbit_per_s: dict[str, int]  # Of each network interface that is up; 0 if unknown.
    near: tuple[NearPort, ...] = ()  # Of these GPUs and the ports to train over.


class RankResources(NamedTuple):
    """The cores, memory node and devices of one rank."""

    num_cores: int  # Physical cores that it may count on, for its threads.
    # Hardware threads that it is bound to; empty for none in particular.
    cpus: tuple[int, ...] = ()
    memory_node: int = UNKNOWN_NODE  # Node for its memory, or ``UNKNOWN_NODE``.
    env: Mapping[str, str] = MappingProxyType({})  # Variables that name its devices.
    device: str = ""  # Its device, for output; empty for none.
    nic: str = ""  # The nearest network port, for output; empty if unknown.
    why: str = ""  # The reason, for output.
    has_enough: bool = True  # False where ranks share the cores meant for each.


def count_slots(environ: Mapping[str, str]) -> int:
    return len(read_gpus("", environ)) or count_cores()


def count_cores() -> int:
    return usable_cores(Machine(read_cores(""), read_cpu_limit(""), (), {}))


def usable_cores(machine: Machine) -> int:
    """Return the number of physical cores, limited by the CPU quota; at least 1."""
    limit = int(machine.cpu_limit) if machine.cpu_limit else len(machine.cores)
    return max(1, min(len(machine.cores), limit))


def read_cpu_limit(root: str) -> float:
    """Return the CPU quota of the control groups, in CPUs; 0 for no limit."""
    limits: list[float] = []
    for group in list_groups(root, "cpu"):
        old = [read_text(f"{group}/cpu.cfs_{name}_us") for name in ("quota", "period")]
        limit = read_text(f"{group}/cpu.max") or " ".join(old)
        quota, _, period = limit.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    return min(filter(None, limits), default=0.0)


def read_cores(root: str) -> tuple[Core, ...]:
    """Return the cores that this process may use, by memory node and number."""
    cores: list[Core] = []
    nodes = read_node_cpus(root).items()
    for cpus in split_cores(root, _allowed(root)):
        node = next((n for n, own in nodes if own >> cpus[0] & 1), UNKNOWN_NODE)
        cores.append(Core(cpus, node))
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def split_cores(root: str, cpus: int) -> list[tuple[int, ...]]:
    """Group a set of CPUs by physical core, in ascending order."""
    left = cpus
    cores: list[tuple[int, ...]] = []
    while left:
        cpu = (left & -left).bit_length() - 1
        directory = f"{root}/sys/devices/system/cpu/cpu{cpu}/topology"
        # Masks, not lists: every kernel has them. core_id is no key, since it is unique
        # only within a package.
        threads = read_mask(f"{directory}/thread_siblings") & left | 1 << cpu
        left ^= threads
        cores.append(tuple(members(threads)))
    return cores


def read_online(root: str) -> int:
    directory = f"{root}/sys/devices/system/cpu"
    online = read_list(f"{directory}/online")
    return online or sum(1 << cpu for cpu in list_numbers(directory, "cpu"))


def read_node_cpus(root: str) -> dict[int, int]:
    """Return the CPUs of each memory node, as bits; node numbers may have gaps."""
    directory = f"{root}/sys/devices/system/node"
    numbers = list_numbers(directory, "node")
    return {node: read_mask(f"{directory}/node{node}/cpumap") for node in numbers}


def _allowed(root: str) -> int:
    try:
        mask = read_fields(f"{root}/proc/self/status").get("Cpus_allowed", "")
        affinity = parse_mask(mask.strip())
    except ValueError:
        affinity = 0
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    groups = list_groups(root, "cpuset")
    sets = (read_list(f"{group}/{name}") for group in groups for name in names)
    allowed = read_online(root)
    # Sandboxes show some of these files only, or the host's: a limit that would
    # leave nothing is ignored.
    for limit in (affinity, next(filter(None, sets), 0)):
        allowed = allowed & limit or allowed or limit
    return allowed


VISIBLE_DEVICES = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "HIP_VISIBLE_DEVICES",
    "intel": "ZE_AFFINITY_MASK",
}
"""The variable that selects the GPUs of a program, by maker."""

_PCI_MAKERS = {"0x1002": "amd", "0x8086": "intel"}
# VGA, 3D and other display controllers, and processing accelerators: AMD's and Intel's
# GPUs for computing are of any of these classes.
_PCI_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
# AMD's and Intel's GPUs on this bus are part of the processor.
FIRST_BUS = "0000:00:"


def read_gpus(root: str, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the visible GPUs of the first maker that has any: NVIDIA, AMD, Intel."""
    gpus = _nvidia(root) or _rendering(root, "amd") or _rendering(root, "intel")
    # ROCm has two variables: the upper one counts the GPUs that the lower one leaves.
    lower = environ.get("ROCR_VISIBLE_DEVICES")
    if gpus and gpus[0].maker == "amd" and lower is not None:
        left = select_gpus(gpus, lower)
        gpus = [gpu._replace(visible_as=str(n)) for n, gpu in enumerate(left)]
    return visible_gpus(gpus, environ)


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a program with this environment sees."""
    maker = gpus[0].maker if gpus else "nvidia"
    text = environ.get(VISIBLE_DEVICES[maker])
    if text is None and maker == "amd":
        text = environ.get(VISIBLE_DEVICES["nvidia"])
    return tuple(gpus) if text is None else select_gpus(gpus, text)


def select_gpus(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """Return the GPUs that a list such as ``0,2`` names, in its order.

    If no GPU is known, each number in the list counts as a GPU.
    """
    chosen: list[Gpu] = []
    for item in text.split(","):
        gpu = _find(gpus, item.strip())
        # As drivers do, stop at an unknown or repeated device.
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def _find(gpus: Sequence[Gpu], item: str) -> Gpu | None:
    is_uuid = item.startswith("GPU-")
    for gpu in gpus:
        if item == gpu.visible_as or (is_uuid and gpu.uuid.startswith(item)):
            return gpu._replace(visible_as=item)
    is_believed = not any(gpu.uuid for gpu in gpus) if is_uuid else not gpus
    if item.startswith("MIG-") or (is_believed and (is_uuid or item.isdigit())):
        return _unplaced(item)
    return None


def _unplaced(visible_as: str) -> Gpu:
    return Gpu("", UNKNOWN_NODE, "", "nvidia", "", visible_as)


class DriverGpu(NamedTuple):
    """A GPU as NVIDIA's driver shows it in /proc."""

    model: str  # ``NVIDIA H100``; empty if unknown.
    uuid: str  # ``GPU-...``; empty if unknown.
    minor: str  # Number of the device's file.


def read_driver_gpus(root: str) -> dict[str, DriverGpu]:
    """Return the GPUs that NVIDIA's driver lists, by bus address and in bus order."""
    directory = f"{root}/proc/driver/nvidia/gpus"
    found: dict[str, DriverGpu] = {}
    for address in sorted(filter(is_address, list_names(directory)), key=bus_order):
        fields = read_fields(f"{directory}/{address}/information")
        uuid = fields.get("GPU UUID", "").strip()
        found[address] = DriverGpu(
            fields.get("Model", "").strip(),
            # Before its first query the driver writes question marks.
            "" if "?" in uuid else uuid,
            fields.get("Device Minor", str(len(found))).strip(),
        )
    return found


def _nvidia(root: str) -> list[Gpu]:
    found: list[Gpu] = []
    drivers = read_driver_gpus(root)
    for address, (model, uuid, minor) in drivers.items():
        if _may_open(f"{root}/dev/nvidia{minor}"):
            node = read_node(root, read_path(f"{root}/sys/bus/pci/devices/{address}"))
            found.append(Gpu(address, node, model, "nvidia", uuid, str(len(found))))
    if drivers:
        return found
    # Sandboxes may hide the driver's directory: count device files.
    minors = list_numbers(f"{root}/dev", "nvidia")
    usable = [minor for minor in minors if _may_open(f"{root}/dev/nvidia{minor}")]
    return [_unplaced(str(n)) for n in range(len(usable))]


def _rendering(root: str, maker: str) -> list[Gpu]:
    """Return a maker's GPUs that have a render node, which compute programs need."""
    devices: dict[str, str] = {}
    for name in list_names(f"{root}/sys/class/drm"):
        path = read_path(f"{root}/sys/class/drm/{name}")
        own = f"{root}/sys/devices/{path}"
        if (
            name.startswith("renderD")
            and _PCI_MAKERS.get(read_text(f"{own}/vendor")) == maker
            and read_text(f"{own}/class").startswith(_PCI_CLASSES)
            and not bus_id(path).startswith(FIRST_BUS)
            and _may_open(f"{root}/dev/dri/{name}")
        ):
            devices[bus_id(path)] = path
    return [
        Gpu(address, read_node(root, devices[address]), "", maker, "", str(n))
        for n, address in enumerate(sorted(devices, key=bus_order))
    ]


def _may_open(path: str) -> bool:
    # This also asks the device control group; opening the file would wake the device.
    return os.access(path, os.R_OK | os.W_OK)


def read_interface_rates(root: str) -> dict[str, int]:
    """Return the Mbit/s of each interface that is up; 0 if unknown."""
    found: dict[str, int] = {}
    for name in list_names(f"{root}/sys/class/net"):
        own = f"{root}/sys/class/net/{name}"
        # The carrier of one that is down cannot be read.
        is_up = read_text(f"{own}/carrier") == "1"
        is_loopback = read_text(f"{own}/type") == "772"
        if is_up and not is_loopback:
            found[name] = max(0, read_number(f"{own}/speed", 0))
    return found


def parse_rate(rate: str) -> int:
    """Parse the rate in ``400 Gb/sec (4X NDR)`` as Mbit/s; 0 for other text."""
    try:
        return int(float(rate.split(maxsplit=1)[0]) * 1000)
    except (ValueError, IndexError, OverflowError):
        return 0
