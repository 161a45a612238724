"""All probes and all checks."""

from importlib import import_module

from ronde.check.check import Check
from ronde.check.probing import ProbeEntry

PROBES = {
    "versions": ProbeEntry("ronde.check.probes.versions", 30.0, "versions."),
    "gpu": ProbeEntry("ronde.check.probes.gpu", 45.0, "gpu."),
    "host": ProbeEntry("ronde.check.probes.host", 5.0, "host."),
    "network": ProbeEntry("ronde.check.probes.network", 5.0, "network."),
    "storage": ProbeEntry("ronde.check.probes.storage", 10.0, "storage."),
    "scheduler": ProbeEntry("ronde.check.probes.scheduler", 5.0, "scheduler."),
}
"""By name; each runs in a process of its own."""

_FAMILIES = (
    "taking_part",
    "versions",
    "gpu",
    "host",
    "scheduler",
    "network",
    "bandwidth",
    "link_errors",
    "storage",
    "cluster",
)


def all_checks() -> tuple[Check, ...]:
    """Return all checks, family by family."""
    modules = (import_module(f"ronde.check.families.{name}") for name in _FAMILIES)
    return tuple(check for module in modules for check in module.CHECKS)
