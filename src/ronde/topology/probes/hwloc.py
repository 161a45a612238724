"""The XML that hwloc's ``lstopo`` writes, of versions 1 to 3."""

import math
from collections.abc import Callable, Iterable, Sequence

from ronde.errors import UsageError
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    Topology,
)
from ronde.topology.probes.hwloc_devices import (
    read_devices,
    read_gpus,
    read_localities,
    read_ports,
)
from ronde.topology.probes.hwloc_links import keep_lower_ends
from ronde.topology.probes.hwloc_matrices import (
    Bandwidth,
    read_bandwidths,
    read_distances,
)
from ronde.topology.probes.hwloc_nodes import Nodes
from ronde.topology.probes.hwloc_objects import (
    HwlocObject,
    decimal_of,
    infos_of,
    walk,
)
from ronde.topology.probes.pci_kinds import plain_address
from ronde.topology.probes.probe import Saved
from ronde.topology.probes.refusals import bad_value
from ronde.topology.xml_tree import Element, outermost_tag, parse_xml

_ROOT = "topology"
_FIRST_NVLINK_SM, _FIRST_NVLINK_GB_PER_S, _NVLINK_GB_PER_S = 60, 20.0, 25.0


class HwlocProbe:
    """Reads hwloc's XML.

    What hwloc tells of a PCI device's link is what it carries, not its speed.
    """

    form = "hwloc XML"

    def recognises(self, saved: Saved) -> bool:
        """Return whether the outermost element is hwloc's."""
        return outermost_tag(saved.data) == _ROOT

    def read(self, saved: Saved) -> Topology:
        """Return the machine.

        Raises:
            UsageError: It is no well-formed XML, no hwloc's, or a value in it cannot be
                read.
        """
        root = parse_xml(saved.data, saved.name)
        machines = root.named("object")
        if root.tag != _ROOT or not machines:
            raise UsageError(
                f"{saved.name} must be a machine as hwloc writes it, got {root.tag} "
                f"with {len(machines)} objects. Write it with: lstopo file.xml"
            )
        host = _host(root, machines[0], saved.name)
        return Topology(hosts=(host._replace(sources=(f"{self.form} {saved.name}",)),))


def _host(root: Element, machine: Element, origin: str) -> HostTopology:
    # What is told of the whole machine stands in it before version 3, then beside it.
    infos = {**infos_of(root), **infos_of(machine)}
    objects = list(walk(machine, origin))
    nodes = Nodes(objects, infos)
    localities = read_localities(root, origin)
    devices = read_devices(objects, nodes.near, localities)
    gpus = read_gpus(objects, devices)
    names = _names(objects, nodes.near)
    ports = read_ports(objects, nodes.near, _version(root, origin))
    ends = [each.bus_id for each in (*gpus, *ports) if each.bus_id]
    bandwidths = read_bandwidths(root, origin)
    return HostTopology(
        name=infos.get("HostName", ""),
        numa_nodes=nodes.with_distances(read_distances(root, objects, origin)),
        devices=keep_lower_ends(devices, ends),
        gpus=gpus,
        ports=ports,
        links=tuple(_links(bandwidths, names, gpus)),
    )


def _version(root: Element, origin: str) -> float:
    version = decimal_of(root.attributes.get("version", "1"))
    if math.isnan(version):
        raise bad_value(
            origin, root.line, "version must be a number", root.attributes["version"]
        )
    return version


def _names(
    objects: Iterable[HwlocObject], near: Callable[[int], int]
) -> dict[str, str]:
    """Return the names of what links can lead to by hwloc's numbers of objects.

    What stands for a processor is its NUMA node.
    """
    found: dict[str, str] = {}
    for each in objects:
        address = plain_address(each.text("pci_busid"))
        name = address or (each.bus_id if each.kind == "OSDev" else "")
        if not name and (node := near(each.cpus)) != UNKNOWN:
            name = f"numa/{node}"
        if name and each.text("gp_index"):
            found[each.text("gp_index")] = name
    return found


def _links(
    bandwidths: Iterable[Bandwidth], names: dict[str, str], gpus: Sequence[GpuDevice]
) -> Iterable[Link]:
    """Yield the links whose ends are known, each direction by itself."""
    capabilities = {gpu.name: gpu.sm for gpu in gpus}
    for kind, source, target, gb_per_s in bandwidths:
        ends = names.get(source, ""), names.get(target, "")
        if all(ends):
            sm = max(capabilities.get(end, UNKNOWN) for end in ends)
            yield Link(kind, *ends, _num_links(kind, gb_per_s, sm), gb_per_s)


def _num_links(kind: LinkKind, gb_per_s: float, sm: int) -> int:
    """Return how many links carry a bandwidth that hwloc tells for all together.

    It counts 20 GB/s a link for the first NVLink and 25 for all later ones.

    Source: hwloc's ``hwloc/topology-nvml.c``.
    """
    if kind is not LinkKind.NVLINK:
        return 1
    is_first = sm == _FIRST_NVLINK_SM
    each = _FIRST_NVLINK_GB_PER_S if is_first else _NVLINK_GB_PER_S
    return max(1, round(gb_per_s / each))
