"""What people have of a machine's topology, in any form: files and saved trees."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.graph import HostTopology, Topology
from ronde.topology.probes.probe import Probe, Saved
from ronde.topology.xml_tree import MAX_BYTES


class JsonProbe:
    """Reads what ``ronde topo --json`` wrote."""

    form = "ronde topology"

    def recognises(self, saved: Saved) -> bool:
        """Return whether a file is of this form."""
        return saved.data.lstrip()[:1] == b"{"

    def read(self, saved: Saved) -> Topology:
        """Return what a file says."""
        from ronde.topology.graph_json import read_topology

        return read_topology(saved.data, saved.name)


def find_probes() -> tuple[Probe, ...]:
    """Return the readers of files; the first that recognises a file is to read it."""
    # Whoever looks at this machine alone does not wait for them.
    from ronde.topology.probes.hwloc import HwlocProbe
    from ronde.topology.probes.lspci import LspciProbe
    from ronde.topology.probes.nccl_topology import NcclTopologyProbe
    from ronde.topology.probes.nvidia_smi import NvidiaSmiProbe
    from ronde.topology.probes.slurm_topology import SlurmTopologyProbe

    return (
        JsonProbe(),
        NcclTopologyProbe(),
        HwlocProbe(),
        NvidiaSmiProbe(),
        LspciProbe(),
        SlurmTopologyProbe(),
    )


class Part(NamedTuple):
    """What one source says.

    Attributes:
        name: The source's, for messages.
        form: What kind of source it is.
        topology: What it says.
    """

    name: str
    form: str
    topology: Topology


def read_saved(name: str) -> Saved:
    """Return a file with its bytes; ``-`` is what comes in on standard input.

    Raises:
        UsageError: It cannot be read, or is too large for a topology.
    """
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"source must be a file that can be read, got {name}: {error.strerror}."
        ) from None
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"source must be at most {MAX_BYTES >> 20} MiB, got more in {name}. Is it "
            "a topology?"
        )
    return Saved("standard input" if name == "-" else name, data)


def read_part(saved: Saved) -> Part:
    """Return what a file says.

    Raises:
        UsageError: It is of no known form, or damaged.
    """
    probes = find_probes()
    for probe in probes:
        if probe.recognises(saved):
            return Part(saved.name, probe.form, probe.read(saved))
    from ronde.topology.search_graph import recognises_search_graph

    if recognises_search_graph(saved):
        raise UsageError(
            f"{saved.name} must tell of a machine, got a graph of NCCL's search. Give "
            "it to ronde topo by itself, or to ronde topo lint."
        )
    forms = ", ".join((*(probe.form for probe in probes), "NCCL graph (alone)"))
    raise UsageError(f"{saved.name} must be one of these: {forms}; got none of them.")


def read_tree(root: Path, environ: Mapping[str, str]) -> tuple[Part, tuple[str, ...]]:
    """Return what the kernel and the drivers say, and notices about what they do not.

    Args:
        root: Where ``sys`` and ``proc`` are, ``/`` for this machine.
        environ: Says which GPUs a program would see.

    Raises:
        UsageError: There is no such tree.
    """
    if not (root / "sys").is_dir():
        raise UsageError(
            f"root must be a directory that holds sys, got {root}. Give the directory "
            "above it."
        )
    from ronde.topology.detection import detect_host

    host, notices = detect_host(root, environ)
    return Part(str(root), "tree", Topology((host,))), notices


def join_parts(parts: Sequence[Part]) -> Topology:
    """Return what all sources say together.

    Sources of different forms tell of one host, and are merged; those of one form tell
    of a host each. What lies between hosts is added to either.

    Raises:
        UsageError: It cannot be told which sources are of one host.
    """
    switches = tuple(s for part in parts for s in part.topology.switches)
    telling = [part for part in parts if part.topology.hosts]
    forms = {part.form for part in telling}
    if len(forms) <= 1:
        hosts = tuple(_named(part) for part in telling)
        return Topology(tuple(h for each in hosts for h in each), switches)
    if len(forms) < len(telling):
        raise UsageError(
            "sources must be of one host, each of another form, or of several hosts, "
            f"all of one form, got {len(telling)} sources of {len(forms)} forms: "
            f"{', '.join(f'{part.name} ({part.form})' for part in telling)}. Give one "
            "host's at a time."
        )
    several = [part for part in telling if len(part.topology.hosts) > 1]
    if several:
        raise UsageError(
            f"source must tell of one host to be merged with others, got "
            f"{several[0].name}, which tells of {len(several[0].topology.hosts)}. Give "
            "it alone."
        )
    from ronde.topology.merging import merge_hosts

    merged = merge_hosts([part.topology.hosts[0] for part in telling])
    return Topology((merged,), switches)


def _named(part: Part) -> tuple[HostTopology, ...]:
    """Return a part's hosts; one without a name goes by that of its source."""
    hosts = part.topology.hosts
    name = Path(part.name).stem
    names = [name if len(hosts) == 1 else f"{name}:{n}" for n in range(len(hosts))]
    return tuple(
        host if host.name else host._replace(name=own)
        for host, own in zip(hosts, names, strict=True)
    )
