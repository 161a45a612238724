"""The GPUs that a program of this process would see, and where they sit.

Found by the files through which programs reach them, not by what is on the bus:
containers show every device of the host in /sys, and let a few be opened.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.machine import UNKNOWN_NODE, Gpu
from ronde.topology.pci import bus_id, bus_order, is_address, read_node, read_path

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
    """Return them in the program's order: NVIDIA's, else AMD's, else Intel's.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are; empty for this machine.
        environ: Says which of them are hidden.
    """
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
    """What NVIDIA's driver tells of a GPU in /proc.

    Attributes:
        model: ``NVIDIA H100``; empty where it does not tell.
        uuid: ``GPU-...``; empty where it does not tell.
        minor: Number of the device's file.
    """

    model: str
    uuid: str
    minor: str


def read_driver_gpus(root: str) -> dict[str, DriverGpu]:
    """Return the GPUs of NVIDIA's driver by bus address, as drivers count them.

    Args:
        root: Where ``proc`` is; empty for this machine.
    """
    directory = f"{root}/proc/driver/nvidia/gpus"
    addresses = [name for name in list_names(directory) if is_address(name)]
    found: dict[str, DriverGpu] = {}
    for position, address in enumerate(sorted(addresses, key=bus_order)):
        told = _fields(read_text(f"{directory}/{address}/information"))
        uuid = told.get("GPU UUID", "")
        found[address] = DriverGpu(
            model=told.get("Model", ""),
            # A driver that has not looked yet writes question marks.
            uuid="" if "?" in uuid else uuid,
            minor=told.get("Device Minor", str(position)),
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
    for address, told in drivers.items():
        if _may_open(f"{root}/dev/nvidia{told.minor}"):
            path = read_path(f"{root}/sys/bus/pci/devices/{address}")
            found.append(
                Gpu(
                    number=len(found),
                    bus_id=address,
                    node=read_node(root, path),
                    name=told.model,
                    maker="nvidia",
                    uuid=told.uuid,
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
