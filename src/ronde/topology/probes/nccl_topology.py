"""NCCL's topology file, and AMD's of the same form.

NCCL writes one for ``NCCL_TOPO_DUMP_FILE`` and reads one for ``NCCL_TOPO_FILE``. Files
of clouds hold processors and PCI devices alone: what is a GPU or a network adapter,
their PCI classes tell.
"""

from ronde.errors import UsageError
from ronde.topology.graph import HostTopology, Topology
from ronde.topology.probes.nccl_attributes import AttributeReader
from ronde.topology.probes.nccl_host import HostReader
from ronde.topology.probes.probe import Saved
from ronde.topology.xml_tree import Element, outermost_tag, parse_xml

_VERSIONS = ("1", "2")


class NcclTopologyProbe:
    """Reads NCCL's topology files."""

    @property
    def form(self) -> str:
        """The form, for people."""
        return "NCCL topology file"

    def recognises(self, saved: Saved) -> bool:
        """Return whether a file is of this form."""
        return outermost_tag(saved.data) == "system"

    def read(self, saved: Saved) -> Topology:
        """Return what a file says; processors of several hosts are so many hosts.

        Raises:
            UsageError: It is no such XML, or lists no processor.
        """
        root = parse_xml(saved.data, saved.name)
        if root.tag != "system":
            raise UsageError(
                f"{saved.name} must begin with the element system, got {root.tag} at "
                f"line {root.line}. Is it a {self.form}?"
            )
        hosts = _by_host(root)
        if not hosts:
            raise UsageError(
                f"{saved.name} must list at least one cpu, got none. Write it with "
                "NCCL_TOPO_DUMP_FILE."
            )
        values = AttributeReader()
        _check_root(root, values)
        source = f"{self.form} {saved.name}"
        return Topology(
            hosts=tuple(
                # Where there is one, the file does not name it.
                _read_host(cpus, name if len(hosts) > 1 else "", source, values)
                for name, cpus in hosts.items()
            )
        )


def _by_host(root: Element) -> dict[str, list[Element]]:
    """Return the processors by the hash of their host, in the order of the file."""
    hosts: dict[str, list[Element]] = {}
    for cpu in root.named("cpu"):
        hosts.setdefault(cpu.attributes.get("host_hash", "").lower(), []).append(cpu)
    return hosts


def _check_root(root: Element, values: AttributeReader) -> None:
    version = values.text(root, "version")
    if version and version not in _VERSIONS:
        values.remark(root, f"has version {version[:20]!r}, and is read like version 1")
    for child in root.children:
        if child.tag != "cpu":
            values.remark(child, "has no place there and is left out")


def _read_host(
    cpus: list[Element], name: str, source: str, values: AttributeReader
) -> HostTopology:
    reader = HostReader(values)
    for cpu in cpus:
        reader.take_cpu(cpu)
    host = reader.host()._replace(
        name=name, sources=(source,), remarks=tuple(values.remarks)
    )
    values.remarks.clear()
    return host
