"""Read topologies from files of all known formats, saved trees, and this machine."""

import gzip
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.graph import HostTopology, Topology, read_topology
from ronde.topology.machine import read_gpus
from ronde.topology.probes.base import MAX_BYTES, Probe, Saved
from ronde.topology.probes.sysfs import read_host

_NVIDIA = 0x10DE
# NVIDIA's driver has one of these, the last one in WSL.
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")


_JSON = Probe(
    "ronde topology",
    lambda saved: saved.data.lstrip()[:1] == b"{",
    lambda saved: read_topology(saved.data, saved.name),
)
"""Reader of the output of ``ronde topo --json``."""


def _find_probes() -> list[Probe]:
    # Imported where a file is read: this machine alone needs none of them.
    from ronde.topology.probes.amd_smi import AMD_SMI
    from ronde.topology.probes.hwloc import HWLOC
    from ronde.topology.probes.lspci import LSPCI
    from ronde.topology.probes.nccl import NCCL_TOPOLOGY
    from ronde.topology.probes.nvidia_smi import NVIDIA_SMI
    from ronde.topology.probes.slurm import SLURM_TOPOLOGY

    # AMD's tables look like NVIDIA's.
    text = [AMD_SMI, NVIDIA_SMI, LSPCI, SLURM_TOPOLOGY]
    return [_JSON, NCCL_TOPOLOGY, HWLOC, *text]


def read_saved(name: str) -> Saved:
    """Return a file's bytes, decompressed if it is gzip; ``-`` is standard input."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        if data.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=BytesIO(data)) as packed:
                data = packed.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"cannot unpack {name}: {error}. It may be truncated."
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}.") from None
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{name} is larger than {MAX_BYTES >> 20} MiB, so it is not a topology."
        )
    name = "standard input" if name == "-" else name
    if not data.strip():
        raise UsageError(f"{name} is empty. Did the program that wrote it fail?")
    return Saved(name, data)


def find_probe(saved: Saved) -> Probe | None:
    """Return the reader that recognises a file; None if there is none."""
    return next((each for each in _find_probes() if each.recognises(saved)), None)


def is_log(saved: Saved) -> bool:
    """Return True for files that ``ronde topo log`` reads."""
    from ronde.topology.probes.others import LOG, recognise_other

    return find_probe(saved) is None and recognise_other(saved)[0] == LOG


def read_file(saved: Saved) -> Topology:
    """Return the topology in a file; a host without a name gets the file's name."""
    from ronde.topology.probes.others import recognise_other

    if probe := find_probe(saved):
        hosts, switches = probe.read(saved)
        return Topology(_named(hosts, Path(saved.name).stem), switches)
    name, cure = recognise_other(saved)
    if name:
        raise UsageError(f"{saved.name} is {name}, not a topology. {cure}")
    formats = ", ".join(probe.format for probe in _find_probes())
    raise UsageError(f"{saved.name} has no known format. Known formats: {formats}.")


class Detected(NamedTuple):
    """A host, read from this machine or a saved sysfs tree, with notices."""

    host: HostTopology
    notices: tuple[str, ...]  # Unknown or hidden facts, a sentence each.


def read_tree(root: Path, environ: Mapping[str, str]) -> Detected:
    """Return a host from a tree with ``sys`` and ``proc``, and notices."""
    if not (root / "sys").is_dir():
        raise UsageError(
            f"root must be a directory that contains sys, got {root}. Give the "
            "directory above sys."
        )
    host, notices = detect_host(root, environ)
    return Detected(_named((host,), root.name)[0], notices)


def detect_host(root: Path, environ: Mapping[str, str]) -> Detected:
    """Read a host from kernel files and, for ``/``, from drivers; never raise.

    A notice tells the user if ``environ`` hides GPUs from programs.
    """
    host, notices = read_host(root), ()
    if root == Path("/"):
        host = host._replace(name=host.name or os.uname().nodename)
        host, notices = _ask_nvml(host)
    top = str(root).rstrip("/")
    num_all, num_seen = len(read_gpus(top, {})), len(read_gpus(top, environ))
    if num_seen < num_all:
        seen = f"The environment lets programs see {num_seen} of {num_all} GPUs"
        notices = (*notices, f"{seen}; all are listed.")
    return Detected(host, notices)


def join_topologies(topologies: Sequence[Topology]) -> Topology:
    return Topology(
        tuple(host for each in topologies for host in each.hosts),
        tuple(switch for each in topologies for switch in each.switches),
    )


def _named(hosts: Sequence[HostTopology], name: str) -> tuple[HostTopology, ...]:
    return tuple(
        host._replace(name=host.name or (f"{name}:{n}" if len(hosts) > 1 else name))
        for n, host in enumerate(hosts)
    )


def _ask_nvml(host: HostTopology) -> Detected:
    if not any(map(os.path.exists, _DRIVERS)):
        cards = {each.bus_id for each in host.devices if each.vendor == _NVIDIA}
        has_nvidia = not cards.isdisjoint(gpu.bus_id for gpu in host.gpus)
        # Without card and library no notice is needed.
        if not has_nvidia and find_spec("pynvml") is None:
            return Detected(host, ())
        notice = "No driver of NVIDIA's is loaded: NVML is not available."
        return Detected(host, (notice,))
    # Its import takes longer than all the rest, and is of no use without a driver.
    from ronde.topology.probes.nvml import read_nvml

    nvml, notices = read_nvml()
    if nvml and nvml.gpus:
        gpus = {gpu.name: gpu for gpu in host.gpus}
        for gpu in nvml.gpus:
            own = gpus.get(gpu.name, gpu)
            title, uuid = own.title or gpu.title, own.uuid or gpu.uuid
            own = own._replace(sm=max(own.sm, gpu.sm), title=title, uuid=uuid)
            gpus[gpu.name] = own._replace(nvlinks=gpu.nvlinks)
        known = {device.bus_id for device in host.devices}
        hidden = (each for each in nvml.devices if each.bus_id not in known)
        host = host._replace(
            sources=host.sources + nvml.sources,
            gpus=tuple(gpus.values()),
            devices=(*host.devices, *hidden),
            links=host.links + nvml.links,
            relations=host.relations + nvml.relations,
            remarks=host.remarks + nvml.remarks,
        )
    return Detected(host, notices)
