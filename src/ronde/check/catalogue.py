"""All probes, steps and checks, and which of them some checks need."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from ronde.check.check import Check
from ronde.check.facts import Value
from ronde.check.hosts import ProbeStep
from ronde.check.probing import FAILED, ProbeEntry

_NETWORK = ("ronde.check.network.interfaces", "ronde.check.network.rdma")
PROBES = {
    "versions": ProbeEntry(("ronde.check.host.software",), 30.0, "versions."),
    "gpu": ProbeEntry(("ronde.check.gpu.presence",), 45.0, "gpu."),
    "host": ProbeEntry(("ronde.check.host.limits",), 5.0, "host."),
    "network": ProbeEntry(_NETWORK, 5.0, "network."),
    "storage": ProbeEntry(("ronde.check.storage.folders",), 10.0, "storage."),
    "scheduler": ProbeEntry(("ronde.check.host.scheduler",), 5.0, "scheduler."),
}
"""By name; each runs in a process of its own."""

_SUBJECTS = (
    *("cluster.hosts", "cluster.compute", "host.software"),
    *("gpu.presence", "gpu.health"),
    *("gpu.links", "gpu.copies"),
    *("host.limits", "host.scheduler"),
    *("network.interfaces", "network.reach", "network.rdma"),
    *("network.bandwidth", "network.pair_jobs"),
    *("storage.folders", "storage.sharing", "storage.speed"),
)
"""Modules with checks."""

_STEPS = (
    *("cluster.hosts.STEP", "network.reach.STEP"),
    *("storage.sharing.STEP", "storage.speed.STEP"),
    *("cluster.compute.PACE_STEP", "cluster.compute.BURN_STEP"),
    *("network.bandwidth.STEP", "network.rdma.STEP"),
)
"""In their order, behind the probes."""


def all_checks() -> tuple[Check, ...]:
    """Return all checks, subject by subject."""
    found: list[Check] = []
    for name in _SUBJECTS:
        names = vars(import_module(f"ronde.check.{name}"))
        found += (each for each in names.values() if isinstance(each, Check))
    return tuple(found)


def all_steps() -> tuple[ProbeStep, ...]:
    found: list[ProbeStep] = []
    for path in _STEPS:
        module, _, name = path.rpartition(".")
        found.append(getattr(import_module(f"ronde.check.{module}"), name))
    return tuple(found)


class CollectPlan(NamedTuple):
    """What is done; nothing else starts or writes on any host."""

    # Names of those that run, side by side.
    probes: tuple[str, ...]
    # Those after that, in their order.
    steps: tuple[ProbeStep, ...]


def plan_for(checks: Sequence[Check], settings: Mapping[str, Value]) -> CollectPlan:
    """Return what gives the facts that some checks judge by.

    Whether probes run to their end is judged of those that run for another check; of
    all where there is none.
    """
    wanted = {fact for check in checks for fact in (*check.facts, *check.besides)}
    steps: list[ProbeStep] = []
    known = all_steps()
    for step in reversed(known):
        is_asked = not step.setting or bool(settings.get(step.setting))
        if is_asked and not wanted.isdisjoint(step.facts):
            steps.insert(0, step)
            wanted.update(step.reads)
    of_probes = wanted.difference(*(step.facts for step in known))
    probes = tuple(
        name
        for name, entry in PROBES.items()
        if any(fact.startswith(entry.facts) for fact in of_probes)
    )
    if not probes and FAILED in wanted:
        probes = tuple(PROBES)
    return CollectPlan(probes, tuple(steps))
