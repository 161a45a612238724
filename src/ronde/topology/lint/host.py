"""All rules, and a host against them."""

from typing import NamedTuple

from ronde.topology.findings import Diagnostic
from ronde.topology.graph import HostTopology
from ronde.topology.lint import network, numa, nvlink, pci
from ronde.topology.lint.fleet import FLEET_RULES
from ronde.topology.lint.view import view_of
from ronde.topology.search_graph import GRAPH_RULES

HOST_RULES = (*pci.RULES, *nvlink.RULES, *network.RULES, *numa.RULES)


class CatalogueEntry(NamedTuple):
    """A rule as people choose it."""

    subject: str  # What it looks at.
    name: str  # What findings and options call it.
    meaning: str  # What it looks for, one line.


CATALOGUE = (
    *(CatalogueEntry("a host", rule.name, rule.meaning) for rule in HOST_RULES),
    *(CatalogueEntry("several hosts", each.name, each.meaning) for each in FLEET_RULES),
    *(CatalogueEntry("an NCCL graph file", *each) for each in GRAPH_RULES.items()),
)
"""All rules, by what they look at."""


def lint_host(host: HostTopology) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a host, or looks so, in the order of the rules."""
    view = view_of(host)
    return tuple(finding for rule in HOST_RULES for finding in rule.find(view))
