"""Collect facts of hosts through agents, which start ``ronde.check.node`` there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ronde.addresses import is_loopback
from ronde.check.catalogue import PROBES, CollectPlan
from ronde.check.check import IN_POD
from ronde.check.fleet import HostFacts, Value
from ronde.check.hosts import HostSet
from ronde.check.probing import FAILED, MOST_WAIT_S
from ronde.errors import HostError, HostFailure
from ronde.launch.host import Host
from ronde.launch.hosts.node import AgentNode, AgentStarter
from ronde.launch.job.controller import Controller
from ronde.launch.job.output import NoOutput
from ronde.processes import adopting_orphans

_SLACK_S = 5.0


class Collected(NamedTuple):
    """The facts of the hosts that answered, and the failures of the other hosts."""

    hosts: tuple[HostFacts, ...]
    failures: tuple[HostFailure, ...]


@adopting_orphans()
def collect(
    hosts: Sequence[Host],
    starter: AgentStarter,
    signal_fd: int,
    settings: dict[str, Value],
    plan: CollectPlan,
    report: Callable[[str], None],
) -> Collected:
    """Start agents, collect facts, and end all processes, also after an exception."""
    controller = Controller(NoOutput(), signal_fd, starter)
    try:
        report("connecting")
        nodes, failures = controller.connect_ready(hosts)
        order = [host.name for host in hosts]
        nodes = sorted(nodes, key=lambda node: order.index(node.name))
        found = collect_from(controller, nodes, settings, plan, report)
        return Collected(found.hosts, (*failures, *found.failures))
    finally:
        controller.close()


def collect_from(
    controller: Controller,
    nodes: Sequence[AgentNode],
    settings: dict[str, Value],
    plan: CollectPlan,
    report: Callable[[str], None],
) -> Collected:
    """Collect facts through connected agents, and leave the agents connected."""
    nodes, addresses, lost = _locate(controller, nodes)
    programs = controller.start_programs(nodes, "ronde.check.node")
    host_set = HostSet(programs, addresses, settings)
    if plan.probes:
        report("probing")
        _run_probes(host_set, plan.probes)
    for step in plan.steps:
        report(step.name)
        step.run(host_set)
    host_set.end()
    return Collected(tuple(host_set.facts.values()), lost)


def _run_probes(hosts: HostSet, names: Sequence[str]) -> None:
    question = {"do": "probe", "names": list(names), "settings": hosts.settings}
    longest_s = MOST_WAIT_S + max(PROBES[name].deadline_s for name in names)
    for host, reply in hosts.ask_all(question, longest_s + _SLACK_S).items():
        failed: dict[str, str] = {}
        for name in names:
            outcome = reply.values.get(name, {"failure": reply.failure})
            if outcome["failure"]:
                failed[name] = outcome["failure"]
                hosts.note_unread(host, PROBES[name].facts, outcome["failure"])
                continue
            facts = hosts.facts[host]
            facts.values.update(outcome["values"])
            facts.unreadable.update(outcome["unreadable"])
            facts.seconds[name] = outcome["seconds"]
        hosts.note(host, FAILED, failed)
        if reply.values.get(IN_POD):
            hosts.note(host, IN_POD, True)  # noqa: FBT003 - the value of a fact


def _locate(
    controller: Controller, nodes: Sequence[AgentNode]
) -> tuple[list[AgentNode], Mapping[str, str], tuple[HostFailure, ...]]:
    """Return the hosts that answer, their addresses, and the other hosts' failures."""
    left, lost = list(nodes), ()
    while True:
        try:
            return left, _find_addresses(controller, left), lost
        except HostError as error:
            names = {failure.host for failure in error.failures}
            if not names:
                raise
            lost += error.failures
            left = [node for node in left if node.name not in names]


def _find_addresses(
    controller: Controller, nodes: Sequence[AgentNode]
) -> Mapping[str, str]:
    if len(nodes) < 2:
        return {node.name: "" for node in nodes}
    own = {node.name: _own_addresses(node) for node in nodes}
    asked = list(dict.fromkeys(a for each in own.values() for a in each))
    routes = controller.locate(nodes, asked)
    routed = {
        node.name: {a for a, source in zip(asked, sources, strict=True) if source}
        for node, sources in zip(nodes, routes, strict=True)
    }
    return choose_addresses(own, routed)


def _own_addresses(node: AgentNode) -> list[str]:
    if node.host.address:
        return [node.host.address]
    interfaces = node.hello.interfaces if node.hello else ()
    return [i.address for i in interfaces if not is_loopback(i.address)]


def choose_addresses(
    own: Mapping[str, Sequence[str]], routed: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Choose for each host the address to which most other hosts have a route.

    An address that two hosts share, such as that of a container bridge, does not count
    between these two, since each of them would reach itself. ``own`` has the addresses
    of each host, the best one first.
    """

    def count_routes(address: str) -> int:
        return sum(
            address in routed[other] and address not in theirs
            for other, theirs in own.items()
        )

    return {name: max(own[name], key=count_routes, default="") for name in own}
