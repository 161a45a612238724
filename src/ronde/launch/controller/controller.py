"""The controller: runs one job through its agents."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import HostError, HostFailure, LaunchError
from ronde.launch.agent_start.starter import AgentConnector, AgentStarter
from ronde.launch.controller.plan import JobPlan
from ronde.launch.controller.running import Running
from ronde.launch.controller.starting import Starting
from ronde.launch.event_loop import EventLoop, StartProgress
from ronde.launch.failure import JobResult, LostHost, RankEnd
from ronde.launch.hosts.host import Host
from ronde.launch.messages import Leave, NodeJob
from ronde.launch.node import AgentNode
from ronde.launch.output.output_process import OutputProcess
from ronde.launch.output.sink import Generation, NoOutput
from ronde.launch.process_tree import children, sweep

if TYPE_CHECKING:
    from ronde.launch.controller.remote_programs import RemotePrograms

_LEAVE_S = 10.0
_LAST_OUTPUT_S = 1.0


class ResolvedJob(NamedTuple):
    """A plan, and who keeps it."""

    plan: JobPlan
    nodes: tuple[AgentNode, ...]  # the hosts' agents, in the order of the plan's shares
    # called with the port that is held for rank 0, and the nodes as they are now:
    # whether all reach it
    check: Callable[[int, Sequence[AgentNode]], None]
    notices: tuple[str, ...] = ()  # what the user should know of it, each a sentence


class Restarts(NamedTuple):
    """When all ranks are started again."""

    limit: int = 0  # how often at most
    # exit codes of the job after which they are not
    not_on: frozenset[int] = frozenset()

    def follows_loss(self, epoch: int) -> bool:
        """Say whether another generation follows one that a host was lost before.

        None does before the first one has run: hosts are not known to be fit yet.
        """
        return 0 < epoch < self.limit

    def wants(self, result: JobResult, epoch: int) -> bool:
        return epoch < self.limit and result.is_worth_restart(self.not_on)


class Controller:
    """One job: its agents, from their start to their end.

    Guarantees that when ``close`` has returned, no process of the job is left on this
    host but those that the kernel does not let die, which were named, and that every
    other host was told or will find out by itself. For the case that an agent here is
    killed this process should adopt orphans (``process_tree.adopt_orphans``).
    """

    def __init__(
        self,
        output: OutputProcess | NoOutput,
        signal_fd: int,
        starter: AgentStarter,
        progress: StartProgress | None = None,
    ) -> None:
        self._output = output
        progress = progress or StartProgress(output.notice)
        self._loop = EventLoop(output, signal_fd, progress, starter.timeouts)
        self._starter = starter
        self._others = children()
        self._is_clean = True
        self._agents_s = self._ready_s = 0.0

    def gather(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[AgentNode]:
        """Return a node for each host, in their order, all of which have said hello."""
        begun_s, starter = time.monotonic(), self._starter
        known = starter.look_up(hosts, self._loop.signal_fd)

        def start(host: Host) -> AgentNode:
            node, took_s = starter.start(host), starter.looked_up_s
            self._loop.progress.took(f"{host.name} was looked up", took_s)
            return node

        nodes = AgentConnector(self._loop, start, starter.explain, known).run(
            hosts, patience_s
        )
        self._agents_s = time.monotonic() - begun_s
        return nodes

    def gather_ready(
        self, hosts: Sequence[Host]
    ) -> tuple[list[AgentNode], tuple[HostFailure, ...]]:
        """Return a node for each host that can take part, and why others cannot."""
        try:
            return self.gather(hosts), ()
        except HostError as error:
            ready = [node for node in self._loop.live_nodes if node.hello]
            return ready, error.failures

    def start_programs(
        self, nodes: Sequence[AgentNode], module: str
    ) -> "RemotePrograms":
        """Start a program on each host to speak with; it ends with the agent."""
        # Imported where it is needed: no job needs it.
        from ronde.launch.controller.remote_programs import RemotePrograms

        return RemotePrograms(self._loop, nodes, module)

    def locate(
        self, nodes: Sequence[AgentNode], addresses: Sequence[str], port: int = 0
    ) -> list[tuple[str, ...]]:
        """Return each node's own addresses towards others: see ``messages.Locate``."""
        return Starting(self._loop).locate(nodes, addresses, port)

    def run(self, resolved: ResolvedJob, restarts: Restarts) -> JobResult:
        """Run all ranks to their end, and again where that is asked for."""
        job_nodes, epoch = list(resolved.nodes), 0
        for notice in resolved.notices:
            self._output.notice(notice)
        jobs = resolved.plan.jobs(epoch)
        places = [
            (share.host.name, plan)
            for share, job in zip(resolved.plan.shares, jobs, strict=True)
            for plan in job.ranks
        ]
        self._output.planned(jobs[0].job_id, jobs[0].argv, places)
        while True:
            try:
                jobs, port = self._prepare(resolved, job_nodes, epoch)
            except LaunchError:
                lost = [node.name for node in job_nodes if node.is_over]
                if not lost or not restarts.follows_loss(epoch):
                    raise
                why = f"{lost[0]} was lost"
            else:
                result = self._run_once(resolved.plan, job_nodes, jobs, port)
                self._output.finished(result)
                if not restarts.wants(result, epoch):
                    return result
                why = _why(result)
            epoch += 1
            self._output.notice(f"restart {epoch} of {restarts.limit}: {why}")
            job_nodes = self._replace_lost(job_nodes)

    def _prepare(
        self, resolved: ResolvedJob, job_nodes: Sequence[AgentNode], epoch: int
    ) -> tuple[tuple[NodeJob, ...], int]:
        begun_s, jobs = time.monotonic(), resolved.plan.jobs(epoch)
        port = Starting(self._loop).prepare(job_nodes, jobs)
        resolved.check(port, job_nodes)
        self._ready_s = time.monotonic() - begun_s
        return jobs, port

    def _run_once(
        self,
        plan: JobPlan,
        job_nodes: Sequence[AgentNode],
        jobs: Sequence[NodeJob],
        port: int,
    ) -> JobResult:
        self._output.begin(Generation(plan.facts.job_id, jobs[0].epoch, plan.hosts))
        Starting(self._loop).await_output()

        def tell(ranks_s: float) -> None:
            timings = {"agents_s": self._agents_s, "ready_s": self._ready_s}
            self._output.began(timings | {"ranks_s": ranks_s})

        return Running(self._loop, job_nodes, jobs, tell).run(plan.address, port)

    def _replace_lost(self, job_nodes: Sequence[AgentNode]) -> list[AgentNode]:
        """Bring agents to the hosts that lost theirs; nothing of the old may be left."""
        job_nodes = list(job_nodes)
        # While one comes back another may be lost.
        while lost := [node for node in job_nodes if node.is_over]:
            for node in lost:
                node.link.transport.wait(_LEAVE_S)
                self._loop.nodes.remove(node)
            names = ", ".join(node.name for node in lost)
            return_s = self._loop.timeouts.return_s
            self._output.notice(
                f"connecting to {names} again, for up to {return_s:g} s"
            )
            fresh = self.gather([node.host for node in lost], return_s)
            by_name = {node.name: node for node in fresh}
            job_nodes = [by_name.get(node.name, node) for node in job_nodes]
        return job_nodes

    def write_out(self, *, is_hurried: bool) -> int:
        return self._loop.write_out(_LAST_OUTPUT_S if is_hurried else None)

    def close(self) -> None:
        """End all agents and wait for their ends."""
        for node in self._loop.live_nodes:
            if node.hello is None:
                # Whatever leads there need not end because nobody writes to it.
                node.link.transport.kill()
            node.link.send(Leave())
            node.close()
        due_s = time.monotonic() + _LEAVE_S
        for node in self._loop.nodes:
            code = node.link.transport.wait(max(0.0, due_s - time.monotonic()))
            self._is_clean = self._is_clean and code == 0
        if not self._is_clean:
            sweep(spared=self._others)


def _why(result: JobResult) -> str:
    match result.cause:
        case RankEnd(rank=rank, host=host):
            return f"rank {rank} failed on {host}"
        case LostHost(host=host):
            return f"{host} was lost"
        case None:
            return "a rank failed"
