"""Hosts that are added to an elastic job while it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from ronde.errors import Failure
from ronde.launch.environments import NodeFacts
from ronde.launch.host import Host, HostShare
from ronde.launch.hosts.node import AgentNode, HostLoss
from ronde.launch.job.connector import AgentConnector
from ronde.launch.job.plan import JobPlan, assign_resources, count_slots_of, network_of
from ronde.launch.network import choose_interface, interface_environment
from ronde.launch.wire import messages
from ronde.membership.view import Worker
from ronde.topology.machine import RankResources
from ronde.world import World


@dataclass(slots=True)
class _Pending:
    node: AgentNode
    share: HostShare | None = None  # once its route is known


class JobHosts:
    """Hosts of one attempt of an elastic job, connected or still connecting."""

    def __init__(
        self,
        plan: JobPlan,
        epoch: int,
        connector: AgentConnector,
        notice: Callable[[str], None],
    ) -> None:
        self._plan, self._epoch = plan, epoch
        self._connector = connector
        self._notice = notice
        self._pending: dict[str, _Pending] = {}
        self.known: dict[str, Host] = {host.name: host for host in plan.spec.hosts}
        # of hosts that are or were ready, in that order
        self.shares: dict[str, HostShare] = {s.host.name: s for s in plan.shares}
        self._planned: dict[Worker, tuple[NodeFacts, World]] = {}
        self.start = messages.Start(plan.address, 0)  # for new agents

    def connect(self, name: str) -> None:
        self._connector.add([self.known[name]])

    def plan_workers(self, most: int) -> None:
        slots = [
            (host, slot)
            for host, share in self.shares.items()
            for slot in range(len(share.resources))
        ]
        worlds = World.of_slots(slots[:most])
        hosts = list(dict.fromkeys(host for host, _ in slots[:most]))
        nodes = {n: NodeFacts(n, i, len(hosts)) for i, n in enumerate(hosts)}
        self._planned = {
            Worker(world.rank, *slot): (nodes[slot[0]], world)
            for slot, world in zip(slots, worlds, strict=False)
        }

    def spec(self, worker: Worker, members: tuple[Worker, ...]) -> messages.WorkerSpec:
        if worker in self._planned:
            node, world = self._planned[worker]
        else:
            others = (each[1:] for each in members or self._planned)
            slots = [*(each for each in others if each != worker[1:]), worker[1:]]
            hosts = list(dict.fromkeys(host for host, _ in slots))
            node = NodeFacts(worker.host, hosts.index(worker.host), len(hosts))
            world = World.of_slots(slots)[-1]
        share = self.shares[worker.host]
        spec = self._plan.rank(self._epoch, node, share, worker.slot, world)
        return spec._replace(worker=worker.id)

    def due_s(self) -> float:
        return 0.0 if self._connector.has_results() else self._connector.due_s()

    def advance(self) -> list[tuple[str, str]]:
        self._connector.advance()
        failed: list[tuple[str, str]] = []
        for host, result in self._connector.collect():
            if isinstance(result, Failure):
                failed.append((host.name, result.reason))
                continue
            self._pending[host.name] = _Pending(result)
            result.watch(is_watched=True)
            result.send(messages.Locate((self._plan.address,), 0))
        return failed

    def owns(self, node: AgentNode) -> bool:
        return self._connector.owns(node) or self._is_pending(node)

    def _is_pending(self, node: AgentNode) -> bool:
        pending = self._pending.get(node.name)
        return pending is not None and pending.node is node

    def on_message(self, node: AgentNode, message: messages.FromAgent) -> str | None:
        """Handle a message from a new host.

        Returns an empty text once the host is ready, a reason if the host cannot be
        used, and None while it is still connecting.
        """
        pending, problem = self._pending.get(node.name), None
        if pending is None:
            self._connector.on_message(node, message)
            return None
        match message:
            case messages.Located():
                share = pending.share = self._make_share(node, message.sources[0])
                node.send(self._plan.elastic_job(self._epoch, share))
            case messages.Ready() if pending.share is not None:
                del self._pending[node.name]
                self.shares[node.name] = pending.share
                node.send(self.start)
                problem = ""
            case messages.Refused():
                problem = message.reason.removesuffix(".")
            case messages.HostEnding():
                problem = "it is about to end"
            case _:
                problem = f"its agent sent {type(message).__name__} too early"
        return problem

    def widen(self, node: AgentNode) -> None:
        known, share = self.known.get(node.name), self.shares.get(node.name)
        if known is None or share is None or known.slots <= len(share.resources):
            return
        found = self._assign(node, known.slots)
        resources = (*share.resources, *found[len(share.resources) :])
        self.shares[node.name] = share._replace(resources=resources)

    def _assign(self, node: AgentNode, num_slots: int) -> tuple[RankResources, ...]:
        resources, notices = assign_resources(self._plan.spec, node, num_slots)
        for text in notices:
            self._notice(f"{node.name}: {text}")
        return resources

    def on_loss(self, node: AgentNode, loss: HostLoss) -> bool:
        if self._is_pending(node):
            del self._pending[node.name]
            return False
        self._connector.on_loss(node, loss)
        return True

    def forget(self, node: AgentNode) -> None:
        self._pending.pop(node.name, None)

    def _make_share(self, node: AgentNode, source: str) -> HostShare:
        spec, host = self._plan.spec, node.host
        if host.slots < 0:
            host = host._replace(slots=count_slots_of(node, 2))
        interface = choose_interface(network_of(node), source, spec.interfaces)
        env = interface_environment(interface, spec.env) if interface else {}
        return HostShare(host, range(host.slots), self._assign(node, host.slots), env)
