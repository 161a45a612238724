"""All probes and all checks."""

from importlib import import_module

from ronde.check.check import Check
from ronde.check.probing import ProbeEntry

PROBES = {
    "versions": ProbeEntry(("ronde.check.host.software",), 30.0, "versions."),
    "gpu": ProbeEntry(("ronde.check.gpu.presence",), 45.0, "gpu."),
    "host": ProbeEntry(
        (
            "ronde.check.host.kernel",
            "ronde.check.host.limits",
            "ronde.check.host.memory",
        ),
        5.0,
        "host.",
    ),
    "network": ProbeEntry(
        ("ronde.check.network.interfaces", "ronde.check.network.rdma"), 5.0, "network."
    ),
    "storage": ProbeEntry(("ronde.check.storage.folders",), 10.0, "storage."),
    "scheduler": ProbeEntry(("ronde.check.host.scheduler",), 5.0, "scheduler."),
}
"""By name; each runs in a process of its own."""

_SUBJECTS = (
    "cluster.hosts",
    "cluster.compute",
    "host.software",
    "gpu.presence",
    "gpu.software",
    "gpu.use",
    "gpu.health",
    "gpu.kernel_log",
    "gpu.links",
    "gpu.copies",
    "host.limits",
    "host.memory",
    "host.kernel",
    "host.scheduler",
    "network.interfaces",
    "network.reach",
    "network.rdma",
    "network.bandwidth",
    "network.pair_jobs",
    "storage.folders",
    "storage.sharing",
    "storage.speed",
)
"""Modules with checks."""


def all_checks() -> tuple[Check, ...]:
    """Return all checks, subject by subject."""
    found: list[Check] = []
    for name in _SUBJECTS:
        names = vars(import_module(f"ronde.check.{name}"))
        found += (each for each in names.values() if isinstance(each, Check))
    return tuple(found)
