"""Lists of all probes, steps, operations and checks, and the selection for a run."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import resolve_name
from typing import NamedTuple

from ronde.check.check import Check
from ronde.check.fleet import Value
from ronde.check.hosts import ProbeStep
from ronde.check.probing import FAILED, ProbeEntry

_NETWORK = tuple(f"ronde.check.network.{n}" for n in ("interfaces", "rdma", "pci"))
PROBES = {
    "versions": ProbeEntry(("ronde.check.software",), 30.0, "versions."),
    "torch": ProbeEntry(("ronde.check.torch_import",), 60.0, "torch."),
    "gpu": ProbeEntry(("ronde.check.gpu.presence",), 45.0, "gpu."),
    "host": ProbeEntry(("ronde.check.limits",), 5.0, "host."),
    "network": ProbeEntry(_NETWORK, 5.0, "network."),
    "storage": ProbeEntry(("ronde.check.storage",), 10.0, "storage."),
}
"""Probes by name. Each runs in its own process."""

_SUBJECTS = (
    *("cluster", "expected", "software"),
    *("gpu.presence", "gpu.health", "gpu.xids", "gpu.links"),
    *("burn", "limits", "network.interfaces", "network.reach", "network.rdma"),
    *("network.pci", "network.bandwidth", "storage", "reading"),
)
"""Modules with checks."""

_STEPS = (
    *("cluster.STEP", "network.reach.STEP", "storage.STEP", "storage.FILES_STEP"),
    *("cluster.PACE_STEP", "burn.BURN_STEP"),
    *("burn.PAIRS_STEP", "network.bandwidth.STEP"),
)
"""Steps that follow the probes, in this order."""

OPERATIONS = {
    "burn": ("burn_host", "copy_pairs"),
    "cluster": ("clock", "spin"),
    "network.bandwidth": ("bench", "hold_rendezvous"),
    "network.reach": ("listen", "reach", "stream"),
    "storage": ("digest_files", "try_path"),
}
"""Functions that ``ronde.check.node`` runs on a host, by module."""


def all_checks() -> tuple[Check, ...]:
    found: list[Check] = []
    for name in _SUBJECTS:
        names = vars(import_module(f"ronde.check.{name}"))
        found += (each for each in names.values() if isinstance(each, Check))
    return tuple(found)


def all_steps() -> tuple[ProbeStep, ...]:
    return tuple(resolve_name(f"ronde.check.{path}") for path in _STEPS)


class CollectPlan(NamedTuple):
    """The probes and steps that a run starts on the hosts."""

    probes: tuple[str, ...]  # names; they run concurrently
    steps: tuple[ProbeStep, ...]  # they run after the probes, in order


def plan_for(checks: Sequence[Check], settings: Mapping[str, Value]) -> CollectPlan:
    """Return the probes and steps that collect the facts of these checks.

    The check ``probe-hung`` reads the outcome of the probes that other checks need. If
    it is the only check, all probes run.
    """
    wanted = {fact for check in checks for fact in (*check.facts, *check.optional)}
    steps: list[ProbeStep] = []
    known = all_steps()
    for step in reversed(known):
        is_asked = not step.setting or bool(settings.get(step.setting))
        if is_asked and not wanted.isdisjoint(step.facts):
            steps.insert(0, step)
            wanted.update(step.reads)
    of_probes = wanted.difference(*(step.facts for step in known))
    topics = {f"{fact.partition('.')[0]}." for fact in of_probes}
    probes = tuple(name for name, entry in PROBES.items() if entry.facts in topics)
    if not probes and FAILED in wanted:
        probes = tuple(PROBES)
    return CollectPlan(probes, tuple(steps))
