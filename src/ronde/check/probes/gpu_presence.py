"""Signs of GPUs of NVIDIA's that need no answer of NVML's."""

import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ronde.check.facts import Value
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.pci import is_gpu, read_link
from ronde.topology.probes.sysfs import read_functions

_NVIDIA = 0x10DE
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
_CARD = re.compile(r"nvidia\d+")
_VERSION = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")


def read_cards(root: str) -> list[Value]:
    """Return ``address`` and ``driver``, empty for none, of each card on the bus.

    Args:
        root: Where ``sys`` is; empty for this machine.
    """
    return [
        {"address": address, "driver": _driver(root, address)}
        for address, each in read_functions(root).items()
        if each.vendor == _NVIDIA and is_gpu(each.class_code, each.vendor)
    ]


def read_module(root: str) -> str:
    """Return the version of the kernel's module; empty if it is not loaded.

    Args:
        root: Where ``proc`` is; empty for this machine.
    """
    text = read_text(f"{root}/proc/driver/nvidia/version")
    match = _VERSION.search(text)
    if match is None:
        return ""
    return f"{match[1]} (open)" if "Open Kernel Module" in text else match[1]


@contextmanager
def opened_files(root: str) -> Generator[dict[str, str]]:
    """Open the device files; give why each cannot be opened, empty for one that is.

    They stay open meanwhile. Where nobody uses the GPUs and the driver is not
    persistent, it starts each of them, which takes seconds, when its file is opened,
    all at once in the background, and stops each again when the last one is closed.

    Args:
        root: Where ``dev`` is; empty for this machine.
    """
    with ExitStack() as closing:
        yield {
            f"/dev/{name}": _open(f"{root}/dev/{name}", closing)
            for name in _list_files(root)
        }


def _list_files(root: str) -> list[str]:
    names = list_names(f"{root}/dev")
    found = [name for name in names if _CARD.fullmatch(name)]
    if not found:
        return []
    wanted = [*found, "nvidiactl"]
    # With its helper, CUDA makes this one as soon as it needs it.
    if not os.path.exists(f"{root}/usr/bin/nvidia-modprobe"):  # noqa: PTH110
        wanted.append("nvidia-uvm")
    return wanted


def _driver(root: str, address: str) -> str:
    return read_link(f"{root}/sys/bus/pci/devices/{address}/driver").rpartition("/")[2]


def _open(path: str, closing: ExitStack) -> str:
    """Return why a file cannot be opened; empty for one that is, which gets closed."""
    try:
        closing.callback(os.close, os.open(path, _OPENING))
    except OSError as error:
        return error.strerror or str(error)
    return ""
