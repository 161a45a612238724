"""All rules, and a host against them."""

from ronde.topology.findings import Finding
from ronde.topology.graph import HostTopology
from ronde.topology.lint import identity, nearness, nics, numa, nvlink, pci
from ronde.topology.lint.host_view import view_of

HOST_RULES = (
    *pci.RULES,
    *nvlink.RULES,
    *nics.RULES,
    *nearness.RULES,
    *numa.RULES,
    *identity.RULES,
)


def lint_host(host: HostTopology) -> tuple[Finding, ...]:
    """Return what is wrong with a host, or looks so, in the order of the rules."""
    view = view_of(host)
    return tuple(finding for rule in HOST_RULES for finding in rule.find(view))
