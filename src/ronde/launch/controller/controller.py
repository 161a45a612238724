"""The controller: runs one job through its agents."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ronde.errors import HostError, HostFailure, LaunchError
from ronde.launch.agent_start.starter import AgentConnector, AgentStarter
from ronde.launch.controller.plan import JobPlan
from ronde.launch.controller.running import Running
from ronde.launch.controller.starting import RemotePrograms, Starting
from ronde.launch.event_loop import EventLoop, StartProgress
from ronde.launch.failure import JobResult, LostHost, RankEnd
from ronde.launch.hosts.host import Host
from ronde.launch.messages import Leave, NodeJob
from ronde.launch.node import AgentNode
from ronde.launch.output.output_process import NoOutput, OutputProcess
from ronde.launch.output.sink import Generation
from ronde.launch.process_tree import children, sweep

_LEAVE_S = 10.0
_LAST_OUTPUT_S = 1.0


class ResolvedJob(NamedTuple):
    """A plan, and the agents that carry it out."""

    plan: JobPlan
    nodes: tuple[AgentNode, ...]  # in the order of the plan's shares
    # called with the port that is held for rank 0, and the nodes as they are now:
    # whether all reach it; None where all ranks are on one host
    check: Callable[[int, Sequence[AgentNode]], None] | None
    notices: tuple[str, ...] = ()  # what the user should know of it, each a sentence


class Restarts(NamedTuple):
    """When all ranks are started again."""

    limit: int = 0  # how often at most
    not_on: frozenset[int] = frozenset()  # exit codes of the job after which they stay


class Controller:
    """One job: its agents, from their start to their end.

    Guarantees that when ``close`` has returned, no process of the job is left on this
    host but those that the kernel does not let die, which were named, and that every
    other host was notified or will notice by itself. For the case that an agent here
    is killed this process should adopt orphans (``process_tree.adopt_orphans``).
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

    def connect(
        self, hosts: Sequence[Host], patience_s: float = 0.0
    ) -> list[AgentNode]:
        """Return a node for each host, in their order; for so long, try again.

        Raises:
            HostError: Some cannot take part; all of them are listed.
        """
        begun_s = time.monotonic()
        nodes = AgentConnector(self._loop, self._starter).run(hosts, patience_s)
        self._agents_s = time.monotonic() - begun_s
        return nodes

    def connect_ready(
        self, hosts: Sequence[Host]
    ) -> tuple[list[AgentNode], tuple[HostFailure, ...]]:
        """Return a node for each host that can take part, and why others cannot."""
        try:
            return self.connect(hosts), ()
        except HostError as error:
            ready = [node for node in self._loop.live_nodes if node.hello]
            return ready, error.failures

    def start_programs(self, nodes: Sequence[AgentNode], module: str) -> RemotePrograms:
        """Start a program on each host to ask; it ends with the agent."""
        return RemotePrograms(self._loop, nodes, module)

    def locate(
        self, nodes: Sequence[AgentNode], addresses: Sequence[str], port: int = 0
    ) -> list[tuple[str, ...]]:
        """Return each node's own addresses towards others: see ``messages.Locate``."""
        return Starting(self._loop).locate(nodes, addresses, port)

    def run(self, resolved: ResolvedJob, restarts: Restarts) -> JobResult:
        """Run all ranks to their end, and again where the user wants that.

        Raises:
            UsageError: The job cannot be started as it was asked for.
            LaunchError: An agent failed, or hosts cannot take part (HostError).
        """
        plan, nodes, epoch = resolved.plan, list(resolved.nodes), 0
        for notice in resolved.notices:
            self._output.notice(notice)
        jobs = plan.jobs(epoch)
        places = [
            (share.host.name, spec)
            for share, job in zip(plan.shares, jobs, strict=True)
            for spec in job.ranks
        ]
        self._output.planned(jobs[0].job_id, jobs[0].argv, places)
        while True:
            try:
                begun_s, jobs = time.monotonic(), plan.jobs(epoch)
                port = Starting(self._loop).prepare(nodes, jobs)
                if resolved.check is not None:
                    resolved.check(port, nodes)
                self._ready_s = time.monotonic() - begun_s
            except LaunchError:
                lost = [node.name for node in nodes if node.is_over]
                # Before the first generation has run, hosts are not known to be fit.
                if not lost or not 0 < epoch < restarts.limit:
                    raise
                why = f"{lost[0]} was lost"
            else:
                result = self._run_once(plan, nodes, jobs, port)
                self._output.finished(result)
                is_last = epoch >= restarts.limit
                if is_last or not result.is_worth_restart(restarts.not_on):
                    return result
                why = _describe_cause(result)
            epoch += 1
            self._output.notice(f"restart {epoch} of {restarts.limit}: {why}")
            nodes = self._replace_lost(nodes)

    def _run_once(
        self,
        plan: JobPlan,
        nodes: Sequence[AgentNode],
        jobs: Sequence[NodeJob],
        port: int,
    ) -> JobResult:
        self._output.begin(Generation(plan.facts.job_id, jobs[0].epoch, plan.hosts))
        Starting(self._loop).await_output()

        def report(ranks_s: float) -> None:
            timings = {"agents_s": self._agents_s, "ready_s": self._ready_s}
            self._output.began(timings | {"ranks_s": ranks_s})

        return Running(self._loop, nodes, jobs, report).run(plan.address, port)

    def _replace_lost(self, nodes: list[AgentNode]) -> list[AgentNode]:
        """Bring agents to the hosts that lost theirs.

        What a host does that was silent is unknown; its new agent waits until all of
        the old generation has ended there.
        """
        # While one comes back another may be lost.
        while lost := [node for node in nodes if node.is_over]:
            for node in lost:
                node.link.transport.wait(_LEAVE_S)
                self._loop.nodes.remove(node)
            names = ", ".join(node.name for node in lost)
            return_s = self._loop.timeouts.return_s
            self._output.notice(
                f"connecting to {names} again, for up to {return_s:g} s"
            )
            fresh = self.connect([node.host for node in lost], return_s)
            by_name = {node.name: node for node in fresh}
            nodes = [by_name.get(node.name, node) for node in nodes]
        return nodes

    def write_out(self, *, is_hurried: bool) -> int:
        """Have what is left to show written; see ``EventLoop.write_out``."""
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


def _describe_cause(result: JobResult) -> str:
    match result.cause:
        case RankEnd(rank=rank, host=host):
            return f"rank {rank} failed on {host}"
        case LostHost(host=host):
            return f"{host} was lost"
        case None:
            return "a rank failed"
