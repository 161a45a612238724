"""What nvidia-smi prints of a machine's topology, as text that people save and send.

A file may hold several outputs one after another, and what a shell printed between.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from ronde.errors import UsageError
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    NetPort,
    PciDevice,
    Relation,
    Topology,
)
from ronde.topology.probes.nvidia_models import compute_capability
from ronde.topology.probes.nvidia_smi_gpus import SmiGpu, is_of_gpu, read_gpus
from ronde.topology.probes.nvidia_smi_links import find_addresses, find_links
from ronde.topology.probes.nvidia_smi_matrices import (
    GPU_NAME,
    Matrix,
    is_header,
    read_legend,
    read_matrices,
)
from ronde.topology.probes.nvidia_smi_nodes import (
    Placed,
    find_port_nodes,
    place,
    read_affinity,
)
from ronde.topology.probes.nvidia_smi_pairs import read_pairs
from ronde.topology.probes.probe import Saved
from ronde.topology.probes.tags import first_lines, lines_of_one

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOOKED_AT = 1 << 18
_MAX_REMARKS = 50


class NvidiaSmiProbe:
    """Reads ``nvidia-smi topo -m``, ``-mp`` and ``-p2p``, ``nvlink -s`` and ``-R``.

    From ``nvidia-smi`` itself and its ``-L`` it takes names and addresses.
    """

    form = "nvidia-smi topo -m"

    def recognises(self, saved: Saved) -> bool:
        """Return whether an output begins near the beginning."""
        lines = first_lines(_plain(saved.text[:_LOOKED_AT]))
        return any(is_header(line) or is_of_gpu(line) for line in lines)

    def read(self, saved: Saved) -> Topology:
        """Return the machine, with relations for what nothing more is known of.

        Raises:
            UsageError: There is no output, or one that does not hold together, or
                there are those of several hosts.
        """
        lines = lines_of_one(_plain(saved.text).splitlines(), saved.name)
        matrices = list(read_matrices(lines, saved.name))
        gpus = read_gpus(lines, saved.name)
        if not matrices and not gpus:
            raise UsageError(
                f"{saved.name} must be what nvidia-smi topo -m prints, got nothing of "
                "it. Where there are no GPUs or no NVLinks it prints nothing."
            )
        host = _host(matrices, gpus, read_legend(lines), saved.name)
        source = f"{self.form} {saved.name}"
        return Topology(hosts=(host._replace(sources=(source,)),))


def _plain(text: str) -> str:
    """Return text without what is for terminals, and without blanks at lines' ends."""
    plain = _ESCAPE.sub("", text.removeprefix("\ufeff"))
    return "\n".join(line.rstrip() for line in plain.splitlines())


def _host(
    matrices: Sequence[Matrix],
    told: Mapping[int, SmiGpu],
    legend: Mapping[str, str],
    origin: str,
) -> HostTopology:
    columns = list(dict.fromkeys(name for each in matrices for name in each.columns))
    matches = filter(None, map(GPU_NAME.fullmatch, columns))
    numbers = sorted({*told, *(int(match[1]) for match in matches)})
    gpus = {number: told.get(number, SmiGpu()) for number in numbers}
    placed = _place(matrices, origin)
    homes = {number: placed.homes.get(f"GPU{number}", UNKNOWN) for number in numbers}
    addresses = find_addresses(gpus)
    devices = tuple(
        _device(n, gpu, addresses.get(n, ""), homes[n]) for n, gpu in gpus.items()
    )
    names = {f"GPU{gpu.number}": gpu.name for gpu in devices}
    pairs = read_pairs(matrices)
    nodes = find_port_nodes(pairs.words, {f"GPU{n}": home for n, home in homes.items()})
    ports = {
        name: NetPort(legend.get(name, name), node=nodes.get(name, UNKNOWN))
        for name in columns
        if name not in names
    }
    names |= {name: port.name for name, port in ports.items()}
    links = find_links(gpus, {gpu.number: gpu.name for gpu in devices}, pairs.bonds())
    remarks = [*placed.remarks, *pairs.remarks, *links.remarks]
    return HostTopology(
        numa_nodes=placed.numa_nodes,
        devices=tuple(PciDevice(addresses[n], node=homes[n]) for n in addresses),
        gpus=devices,
        ports=tuple(ports.values()),
        links=links.links,
        relations=tuple(
            Relation(names[source], names[target], path, peer)
            for (source, target), (path, peer) in pairs.words.items()
        ),
        remarks=tuple(remarks[:_MAX_REMARKS]),
    )


def _place(matrices: Iterable[Matrix], origin: str) -> Placed:
    """Return where GPUs are, as the matrix says that tells affinities."""
    rows = {
        name: row
        for matrix in matrices
        for name, row in matrix.rows.items()
        if GPU_NAME.fullmatch(name) and (row.cpus or row.nodes or row.memory_node)
    }
    return place({name: read_affinity(row, origin) for name, row in rows.items()})


def _device(number: int, gpu: SmiGpu, bus_id: str, node: int) -> GpuDevice:
    return GpuDevice(
        bus_id=bus_id,
        number=number,
        sm=compute_capability(gpu.title),
        title=gpu.title,
        uuid=gpu.uuid,
        node=UNKNOWN if bus_id else node,
    )
