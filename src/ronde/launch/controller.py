"""The controller: a job from the user's specification to how it ended."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import HostError, HostFailure, LaunchError, UsageError
from ronde.launch.agent_start.starter import AgentConnector, AgentStarter
from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    default_environment,
    rank_environment,
)
from ronde.launch.event_loop import EventLoop, StartProgress
from ronde.launch.failure import JobResult, LostHost
from ronde.launch.hosts.host import (
    SLOTS_CORES,
    SLOTS_GPUS,
    Host,
    HostShare,
    RankResources,
    allocate,
    hosts_to_ask,
    kept_out,
    usable_cores,
)
from ronde.launch.messages import Leave, NodeJob, RankSpec
from ronde.launch.node import AgentNode
from ronde.launch.output.files import Generation, JobRecords, OutputSink
from ronde.launch.output.output_process import NoOutput, OutputProcess
from ronde.launch.process_tree import adopt_orphans, children, sweep
from ronde.launch.program import absolute_path
from ronde.launch.running import RemotePrograms, Running, Starting
from ronde.launch.signals import InterruptedStartError, interruption_code
from ronde.world import World

if TYPE_CHECKING:
    from ronde.launch.placement import PlacementRequest


class JobRequest(NamedTuple):
    """What the user asked for."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # for all ranks, on top of what is there on each host
    rank_env: Mapping[int, Mapping[str, str]]  # further variables of single ranks
    cwd: str = ""  # directory to start in; empty for the one each agent was started in
    grace_s: float = 15.0  # seconds between the stop signal and the sweep
    master_port: int = 0  # port to meet at, 0 for any
    is_mpi: bool = False  # the ranks are to be able to initialise MPI
    max_restarts: int = 0  # how often all ranks may be started again


class JobPlan(NamedTuple):
    """All of a job that does not change when it is started again."""

    request: JobRequest
    facts: JobFacts  # name and mark of the job
    shares: tuple[HostShare, ...]  # the ranks of each host
    places: tuple[tuple[RankResources, ...], ...]  # of each share's ranks
    address: str  # where the ranks meet
    host_env: tuple[Mapping[str, str], ...]  # variables of each share's ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(share.host.name for share in self.shares for _ in share.ranks)

    @property
    def size(self) -> int:
        return len(self.hosts)

    def jobs(self, epoch: int) -> tuple[NodeJob, ...]:
        facts, worlds = self.facts._replace(epoch=epoch), self._worlds()
        indices = range(len(self.shares))
        return tuple(self._job(facts, index, worlds) for index in indices)

    def _job(self, facts: JobFacts, index: int, worlds: Iterator[World]) -> NodeJob:
        request, share, places = self.request, self.shares[index], self.places[index]
        shared = dict(request.env)
        node = NodeFacts(share.host.name, index, len(self.shares))
        ranks: list[RankSpec] = []
        for rank, place, world in zip(share.ranks, places, worlds, strict=False):
            env = rank_environment(world, facts, node) | place.env
            if "OMP_NUM_THREADS" not in shared:
                env["OMP_NUM_THREADS"] = str(place.num_cores)
            env |= request.rank_env.get(rank, {})
            ranks.append(RankSpec(rank, env, place.cpus, place.memory_node))
        defaults = default_environment(min(place.num_cores for place in places))
        return NodeJob(
            job_id=facts.job_id,
            epoch=facts.epoch,
            job_marker=facts.job_marker,
            argv=request.argv,
            env=defaults | shared | dict(self.host_env[index]),
            ranks=tuple(ranks),
            cwd=request.cwd,
            grace_s=request.grace_s,
            address=self.address if index == 0 else "",
            master_port=request.master_port,
            is_mpi=request.is_mpi,
        )

    def _worlds(self) -> Iterator[World]:
        sizes = [len(share.ranks) for share in self.shares]
        hosts = tuple(share.host.name for share in self.shares)
        num_at = [sum(size > local for size in sizes) for local in range(max(sizes))]
        num_before = [0] * len(num_at)
        for share, size in zip(self.shares, sizes, strict=True):
            for local_rank, rank in enumerate(share.ranks):
                yield World(
                    rank=rank,
                    size=sum(sizes),
                    local_rank=local_rank,
                    local_size=size,
                    cross_rank=num_before[local_rank],
                    cross_size=num_at[local_rank],
                    hosts=hosts,
                )
                num_before[local_rank] += 1


def make_facts(name: str, max_restarts: int = 0) -> JobFacts:
    """Return what names a new job; a random end makes ``name`` unique."""
    job_id = f"{name}-{os.urandom(3).hex()}"
    return JobFacts(job_id, 0, os.urandom(16).hex(), max_restarts)


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

    When ``close`` has returned, no process of the job is left on this host but those
    that the kernel does not let die, which were named, and every other host was
    notified or will notice by itself; given that this process adopts orphans.
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
        """Return a node for each host, in their order; for so long, try again."""
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
        """Run all ranks to their end, and again where the user wants that."""
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
                why = "a rank failed"
                if isinstance(result.cause, LostHost):
                    why = f"{result.cause.host} was lost"
                elif result.cause is not None:
                    why = f"rank {result.cause.rank} failed on {result.cause.host}"
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
        """Bring agents to the hosts that lost theirs."""
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
        return self._loop.write_out(_LAST_OUTPUT_S if is_hurried else None)

    def close(self) -> None:
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


_LOOPBACK = "127.0.0.1"

Preflight = Callable[[Controller, Sequence[AgentNode]], tuple[str, ...]]
"""Checks hosts that have agents; returns warnings, raises HostError for faults."""


class JobSpec(NamedTuple):
    """What the user wants of hosts and ranks."""

    job: JobRequest
    hosts: tuple[Host, ...] = ()  # in the order of the ranks; empty for this machine
    num_ranks: int | None = None  # None for one a slot
    min_ranks: int | None = None  # that suffice where there are fewer slots
    interfaces: tuple[str, ...] = ()  # that the ranks may use, none for any
    # how ranks get cores and GPUs; None leaves that to the scheduler
    placement: "PlacementRequest | None" = None
    preflight: Preflight | None = None


def resolve(controller: Controller, spec: JobSpec, name: str) -> ResolvedJob:
    """Bring agents to the hosts and plan the job with what they report."""
    hosts = spec.hosts or (Host(os.uname().nodename),)
    asked = hosts_to_ask(hosts, spec.num_ranks, spec.min_ranks)
    nodes = controller.connect(asked)
    _require_different(nodes)
    notices = spec.preflight(controller, nodes) if spec.preflight else ()
    by_name = {node.name: node for node in nodes}
    shares = allocate(
        hosts,
        spec.num_ranks,
        lambda host: _slots(by_name[host.name], len(asked)),
        spec.min_ranks,
    )
    job_nodes = tuple(by_name[share.host.name] for share in shares)
    job, address, check = spec.job, _LOOPBACK, None
    host_env: tuple[dict[str, str], ...] = tuple(dict[str, str]() for _ in job_nodes)
    if len(job_nodes) > 1:
        if job.is_mpi:
            raise UsageError(
                f"--engine mpi must run on one host here, got {len(job_nodes)}. Let "
                "mpirun start the ranks: mpirun -n 4 -H a:2,b:2 python train.py"
            )
        address, host_env, check = _meet(controller, spec, job_nodes)
    if job.cwd or not all(node.is_here for node in job_nodes):
        # On other hosts the directory of the same name. In full here as well: an agent
        # that starts ranks again is in it already.
        job = job._replace(cwd=str(absolute_path(job.cwd)))
    placed = [
        _place(spec, node, share) for node, share in zip(job_nodes, shares, strict=True)
    ]
    plan = JobPlan(
        request=job,
        facts=make_facts(name, job.max_restarts),
        shares=shares,
        places=tuple(places for places, _ in placed),
        address=address,
        host_env=host_env,
    )
    notices += tuple(text for _, texts in placed for text in texts)
    if drained := kept_out(hosts):
        notices += (f"not used, with 0 slots: {drained}.",)
    if spec.num_ranks is not None and plan.size < spec.num_ranks:
        text = f"{plan.size} ranks start, not {spec.num_ranks}: there are {plan.size} "
        notices += (f"{text}slots, and --min-np is {spec.min_ranks}.",)
    return ResolvedJob(plan, job_nodes, check, notices)


def _require_different(nodes: Sequence[AgentNode]) -> None:
    by_identity: dict[str, str] = {}
    for node in nodes:
        other = by_identity.setdefault(node.met.identity, node.name)
        if other != node.name:
            raise UsageError(
                f"hosts must be different machines, got {other} and {node.name}, which "
                f"are one ({node.met.host}). Name it once, with all its slots."
            )


def _slots(node: AgentNode, num_hosts: int) -> int:
    machine = node.met.machine
    if node.host.slots == SLOTS_CORES:
        return usable_cores(machine)
    if node.host.slots == SLOTS_GPUS and not machine.gpus:
        raise UsageError(
            f"--nproc-per-node gpu must find a GPU on each host, got none on "
            f"{node.name}. Type a number, or --nproc-per-node cpu."
        )
    return len(machine.gpus) or (usable_cores(machine) if num_hosts == 1 else 1)


def _place(
    spec: JobSpec, node: AgentNode, share: HostShare
) -> tuple[tuple[RankResources, ...], tuple[str, ...]]:
    machine, num_ranks = node.met.machine, len(share.ranks)
    if spec.placement is None and not node.host.gpus:
        num_cores = max(1, usable_cores(machine) // num_ranks)
        return (RankResources(num_cores=num_cores),) * num_ranks, ()
    # Imported where they are needed: a job that is not bound must start at once.
    from ronde.launch.placement import UNPLACED, place_ranks

    placement = spec.placement or UNPLACED
    return place_ranks(machine, node.host, num_ranks, placement, spec.job.env)


def _meet(
    controller: Controller, spec: JobSpec, job_nodes: Sequence[AgentNode]
) -> tuple[str, tuple[dict[str, str], ...], Callable[[int, Sequence[AgentNode]], None]]:
    # Imported where they are needed: a job on one host has nobody to meet.
    from ronde.launch.network import (
        HostNetwork,
        choose_meeting_point,
        find_candidates,
        require_answers,
    )

    networks = [
        HostNetwork(
            node.name,
            node.met.interfaces,
            node.host.address,
            {nic.name: nic.mbit_per_s for nic in node.met.machine.nics},
        )
        for node in job_nodes
    ]
    candidates = find_candidates(networks, spec.interfaces)
    addresses = [candidate.address for candidate in candidates]
    sources = controller.locate(job_nodes[1:], addresses)
    point = choose_meeting_point(networks, candidates, sources, spec.interfaces)

    def check(port: int, job_nodes: Sequence[AgentNode]) -> None:
        found = controller.locate(job_nodes[1:], [point.address], port)
        require_answers(networks, point, port, [own[0] for own in found])

    env = tuple(point.environment(i, spec.job.env) for i in range(len(job_nodes)))
    return point.address, env, check


class JobOptions(NamedTuple):
    """How a job is run."""

    name: str
    restarts: Restarts  # when all ranks are started again
    records: JobRecords  # of what happens
    is_verbose: bool = False  # say how long each step of the start takes


def launch(
    spec: JobSpec,
    sink: OutputSink,
    starter: AgentStarter,
    signal_fd: int,
    job: JobOptions,
) -> JobResult:
    """Run a job on all its hosts to its end, whatever that is.

    When it returns or raises, no process of the job is left on this host; on others
    none is left at the latest when their agents' lease is over.
    """
    adopt_orphans()
    output = OutputProcess(sink, job.records)
    progress = StartProgress(output.notice, is_verbose=job.is_verbose)
    controller = Controller(output, signal_fd, starter, progress)
    try:
        try:
            resolved = resolve(controller, spec, job.name)
            result = controller.run(resolved, job.restarts)
        except InterruptedStartError as error:
            result = JobResult(
                interruption_code(error.number), None, (), (), error.number
            )
            output.finished(result)
        finally:
            controller.close()
    except BaseException:
        # What came before stands before the error.
        controller.write_out(is_hurried=True)
        raise
    unread = controller.write_out(is_hurried=result.interrupted_by is not None)
    if result.exit_code == 0 and unread:
        return replace(result, exit_code=128 + unread)
    return result


def dry_run(
    spec: JobSpec,
    starter: AgentStarter,
    signal_fd: int,
    *,
    name: str,
    progress: StartProgress,
) -> ResolvedJob:
    """Return what ``launch`` would run where; start agents, but no rank."""
    adopt_orphans()
    controller = Controller(NoOutput(), signal_fd, starter, progress)
    try:
        return resolve(controller, spec, name)
    finally:
        controller.close()
