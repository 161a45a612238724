"""What is to be done on the hosts, by the facts that are wanted of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.check.catalogue import PROBES
from ronde.check.check import Check
from ronde.check.cluster import compute, hosts
from ronde.check.cluster.hosts import FAILED
from ronde.check.facts import Value
from ronde.check.hosts import Step
from ronde.check.network import bandwidth, rdma, reach
from ronde.check.storage import sharing, speed

STEPS = (
    hosts.STEP,
    reach.STEP,
    sharing.STEP,
    speed.STEP,
    compute.PACE_STEP,
    compute.BURN_STEP,
    bandwidth.STEP,
    rdma.STEP,
)
"""In their order, behind the probes."""


class Plan(NamedTuple):
    """What is done; nothing else starts or writes on any host.

    Attributes:
        probes: Names of those that run, side by side.
        steps: Those after that, in their order.
    """

    probes: tuple[str, ...]
    steps: tuple[Step, ...]


def plan_for(checks: Sequence[Check], settings: Mapping[str, Value]) -> Plan:
    """Return what gives the facts that some checks judge by.

    Whether probes run to their end is judged of those that run for another check; of
    all where there is none.

    Args:
        checks: Those that are to be made.
        settings: What the user asked for; see ``Reading``.
    """
    wanted = {fact for check in checks for fact in (*check.facts, *check.besides)}
    steps: list[Step] = []
    for step in reversed(STEPS):
        is_asked = not step.setting or bool(settings.get(step.setting))
        if is_asked and not wanted.isdisjoint(step.facts):
            steps.insert(0, step)
            wanted.update(step.reads)
    of_probes = wanted.difference(*(step.facts for step in STEPS))
    probes = tuple(
        name
        for name, entry in PROBES.items()
        if any(fact.startswith(entry.facts) for fact in of_probes)
    )
    if not probes and FAILED in wanted:
        probes = tuple(PROBES)
    return Plan(probes, tuple(steps))
