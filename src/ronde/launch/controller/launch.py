"""A job from the user's specification to its result."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import UsageError
from ronde.launch.agent_start.starter import AgentStarter
from ronde.launch.controller.controller import Controller, ResolvedJob, Restarts
from ronde.launch.controller.plan import JobPlan, JobRequest, make_facts
from ronde.launch.event_loop import StartProgress
from ronde.launch.failure import JobResult
from ronde.launch.hosts.host import (
    SLOTS_CORES,
    SLOTS_GPUS,
    Host,
    HostShare,
    allocate,
    hosts_to_ask,
    kept_out,
)
from ronde.launch.node import AgentNode
from ronde.launch.output.files import JobRecords
from ronde.launch.output.output_process import NoOutput, OutputProcess
from ronde.launch.output.sink import OutputSink
from ronde.launch.placement.place import RankResources, usable_cores
from ronde.launch.process_tree import adopt_orphans
from ronde.launch.program import absolute_path
from ronde.launch.signals import InterruptedStartError, interruption_code

if TYPE_CHECKING:
    from ronde.launch.placement.placement import PlacementRequest

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
        notices += (f"kept out by 0 slots: {drained}.",)
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
    from ronde.launch.placement.placement import UNPLACED, place_ranks

    placement = spec.placement or UNPLACED
    return place_ranks(machine, node.host, num_ranks, placement, spec.job.env)


def _meet(
    controller: Controller, spec: JobSpec, job_nodes: Sequence[AgentNode]
) -> tuple[str, tuple[dict[str, str], ...], Callable[[int, Sequence[AgentNode]], None]]:
    # Imported where they are needed: a job on one host has nobody to meet.
    from ronde.launch.placement.network import (
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

    Guarantees that when it returns or raises, no process of the job is left on this
    host, but those that the kernel does not let die, which were named; on other hosts
    none is left either, at the latest when their agents' lease is over.
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
