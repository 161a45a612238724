"""What a host is, from all that tells it: the kernel, and NVML on this machine."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ronde.topology.gpus import read_gpus
from ronde.topology.graph import HostTopology
from ronde.topology.merging import merge_hosts
from ronde.topology.probes.sysfs_tree import read_host

_THIS_MACHINE = Path("/")
_NVIDIA = 0x10DE
# NVIDIA's driver has one of these, the last one in WSL.
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


class Detected(NamedTuple):
    """A host that was looked at.

    Attributes:
        host: What it is made of.
        notices: What could not be asked, or is not what programs see, a sentence each.
    """

    host: HostTopology
    notices: tuple[str, ...]


def detect_host(root: Path, environ: Mapping[str, str]) -> Detected:
    """Return what a host is made of, whatever of it this process may use.

    What cannot be read or asked is left out or unknown, and is never an error.

    Args:
        root: Where ``proc`` and ``sys`` are; only at ``/`` drivers are asked, too.
        environ: Says with ``CUDA_VISIBLE_DEVICES`` and the like which GPUs a program
            would see; there is a notice where these are not all.
    """
    host = read_host(root)
    notices: list[str] = []
    if root == _THIS_MACHINE:
        host = host._replace(name=host.name or os.uname().nodename)
        host, said = _ask_nvml(host)
        notices += said
    return Detected(host, (*notices, *_hidden(str(root).rstrip("/"), environ)))


def _ask_nvml(host: HostTopology) -> tuple[HostTopology, tuple[str, ...]]:
    """Return this machine with what NVML adds, and notices."""
    if not any(map(os.path.exists, _DRIVERS)):
        # Where there is neither card nor library, nobody expects a word about them.
        if not _has_nvidia(host) and find_spec("pynvml") is None:
            return host, ()
        return host, ("No driver of NVIDIA's is loaded, and NVML cannot be asked.",)
    # Its import takes longer than all the rest, and is of no use without a driver.
    from ronde.topology.probes.nvml import read_nvml

    told, notices = read_nvml()
    return (merge_hosts((host, told)) if told and told.gpus else host), notices


def _has_nvidia(host: HostTopology) -> bool:
    vendors = {device.bus_id: device.vendor for device in host.devices}
    return any(vendors.get(gpu.bus_id) == _NVIDIA for gpu in host.gpus)


def _hidden(top: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice about GPUs that an environment hides from programs."""
    num_all, num_seen = len(read_gpus(top, {})), len(read_gpus(top, environ))
    if num_seen >= num_all:
        return ()
    seen = f"The environment lets programs see {num_seen} of {num_all} GPUs"
    return (f"{seen}; all are listed.",)
