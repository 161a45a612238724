"""Checks that the PCI links of network adapters are as fast as their ports."""

from pathlib import Path

from ronde.check.check import FAIL, WARN, Problem, Problems, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.links import read_is_virtual
from ronde.check.network.interfaces import VIRTUAL
from ronde.check.probing import FactReader
from ronde.topology.lint import lint_host
from ronde.topology.probes.sysfs import read_host

_LINKS = "network.pci_links"
# Slower ports, such as those for administration, are not checked.
_MIN_MBIT_PER_S = 25_000
_RULES = ("trained-down", "nic-faster-than-link")


def read(reader: FactReader) -> None:
    reader.store(_LINKS, lambda: read_links(reader.root))
    reader.store(VIRTUAL, lambda: read_is_virtual(reader.root))


def read_links(root: str) -> list[Value]:
    """Return the findings of ``ronde topo lint`` on the links of fast network ports."""
    host = read_host(Path(f"{root}/"))
    return [
        {
            "port": port.title,
            "mbit_per_s": port.mbit_per_s,
            "rule": found.rule,
            "message": found.seen,
            "link_gb_per_s": found.has_gb_per_s,
            "fix": found.remedy,
        }
        for found in lint_host(host)
        for port in host.ports
        if found.rule in _RULES and found.element == port.bus_id
        if port.is_up and port.mbit_per_s >= _MIN_MBIT_PER_S
    ]


@each_host(FAIL, _LINKS, VIRTUAL)
def adapter_pcie(values: Values, _: Fleet) -> Problems:
    """The PCI links of network adapters are as fast as their ports.

    reads: PCI links of adapters, and rates of ports that are up, in sysfs
    threshold: the rules trained-down and nic-faster-than-link of ronde topo lint, for
        ports of 25 Gbit/s and more. A failure if the link could carry more and carries
        less than the port, except in virtual machines; else a warning
    source: ronde topo lint; ronde's choice: 25 Gbit/s, since slower ports are seldom
        used for training
    fix: reseat the card or its riser; look at the slot's lanes in the BIOS
    why: The PCI link, and not the port, sets the pace of every reduction.
    """
    for found in values[_LINKS]:
        link, port = 8 * found["link_gb_per_s"], found["mbit_per_s"] / 1000
        message = f"{found['port']}: {found['message'].rstrip('.')}"
        is_slow = found["rule"] == _RULES[0] and link < port
        if is_slow:
            message += f". It carries {link:.0f} Gbit/s, and the port {port:g}"
        severity = FAIL if is_slow and not values[VIRTUAL] else WARN
        yield Problem(message, severity, fix=found["fix"])
