"""A job: its specification and its plan."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import UsageError
from ronde.launch.elastic_options import ElasticOptions
from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    default_environment,
    rank_environment,
)
from ronde.launch.host import SLOTS_CORES, SLOTS_GPUS, Host, HostShare
from ronde.launch.hosts.node import AgentNode
from ronde.launch.wire import messages
from ronde.topology.machine import RankResources, usable_cores
from ronde.world import World

if TYPE_CHECKING:
    from ronde.launch.network import HostNetwork
    from ronde.topology.placement.binding import PlacementRequest


class JobSpec(NamedTuple):
    """The user's specification of a job."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # for all ranks, added to each host's own
    rank_env: Mapping[int, Mapping[str, str]] = MappingProxyType({})  # of single ranks
    cwd: str = ""  # directory of the ranks; empty for the agent's own
    grace_s: float = 15.0  # from the stop signal to the sweep
    master_port: int = 0  # of the rendezvous; 0 for any
    hosts: tuple[Host, ...] = ()  # in the order of the ranks; empty for this machine
    patience_s: float = 0.0  # for hosts that are not up yet
    num_ranks: int | None = None  # None for one per slot
    min_ranks: int | None = None  # enough if there are fewer slots
    interfaces: tuple[str, ...] = ()  # for the ranks; empty for any
    placement: "PlacementRequest | None" = None  # None leaves it to the scheduler
    max_restarts: int = 0
    no_restart_codes: frozenset[int] = frozenset()  # exit codes without a restart
    is_verbose: bool = False  # report the time of each step of the start
    hang_timeout_s: float = float("inf")  # of one collective
    has_live_view: bool = False  # shown below the output
    elastic: ElasticOptions | None = None  # None for a plain job


class JobPlan(NamedTuple):
    """The parts of a job that a restart does not change."""

    spec: JobSpec
    facts: JobFacts
    shares: tuple[HostShare, ...]  # of each host, in the order of the ranks
    address: str  # of the rendezvous
    nodes: tuple[AgentNode, ...] = ()  # in the order of the shares
    # raises if one of the nodes does not reach rank 0's port; None for one host
    check: Callable[[int, Sequence[AgentNode]], None] | None = None
    notices: tuple[str, ...] = ()  # for the user, each a sentence

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(share.host.name for share in self.shares for _ in share.ranks)

    def jobs(self, epoch: int) -> list[messages.NodeJob]:
        if self.spec.elastic is not None:
            first, *others = (self.elastic_job(epoch, share) for share in self.shares)
            return [first._replace(address=self.address), *others]
        slots = [(s.host.name, n) for s in self.shares for n in range(len(s.ranks))]
        worlds = iter(World.of_slots(slots))
        jobs: list[messages.NodeJob] = []
        for index, share in enumerate(self.shares):
            node = NodeFacts(share.host.name, index, len(self.shares))
            ranks = tuple(
                self.rank(epoch, node, share, local, next(worlds))
                for local in range(len(share.ranks))
            )
            job = self._job(epoch, share)
            address = self.address if index == 0 else ""
            jobs.append(job._replace(workers=ranks, address=address))
        return jobs

    def elastic_job(self, epoch: int, share: HostShare) -> messages.NodeJob:
        """Return one host's part of an elastic job, without workers yet."""
        job = self._job(epoch, share)
        # A marker for each host: a host may join again while others run.
        marker = f"{job.job_marker}.{share.host.name}"
        options = self.spec.elastic
        polled = [n for n in options.notice if n != "signal"] if options else ()
        return job._replace(
            job_marker=marker, max_ranks=len(share.resources), notice=tuple(polled)
        )

    def rank(
        self, epoch: int, node: NodeFacts, share: HostShare, local: int, world: World
    ) -> messages.WorkerSpec:
        facts, own = self.facts._replace(epoch=epoch), share.resources[local]
        env = rank_environment(world, facts, node) | dict(own.env)
        if "OMP_NUM_THREADS" not in self.spec.env:
            env["OMP_NUM_THREADS"] = str(own.num_cores)
        env |= self.spec.rank_env.get(world.rank, {})
        return messages.WorkerSpec(world.rank, env, own.cpus)

    def _job(self, epoch: int, share: HostShare) -> messages.NodeJob:
        spec = self.spec
        num_cores = min(each.num_cores for each in share.resources)
        is_elastic = spec.elastic is not None
        defaults = default_environment(num_cores, is_elastic=is_elastic)
        return messages.NodeJob(
            epoch=epoch,
            job_marker=self.facts.job_marker,
            argv=spec.argv,
            env={**defaults, **spec.env, **share.env},
            workers=(),
            cwd=spec.cwd,
            grace_s=spec.grace_s,
            address="",
            master_port=spec.master_port,
        )


def make_facts(max_restarts: int = 0) -> JobFacts:
    job_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    return JobFacts(job_id, 0, os.urandom(16).hex(), max_restarts)


def count_slots_of(node: AgentNode, num_hosts: int) -> int:
    machine = node.known_hello.machine
    if node.host.slots == SLOTS_CORES:
        return usable_cores(machine)
    if node.host.slots == SLOTS_GPUS and not machine.gpus:
        raise UsageError(
            f"--nproc-per-node gpu needs a GPU on each host, but {node.name} has none. "
            "Type a number, or --nproc-per-node cpu."
        )
    return len(machine.gpus) or (usable_cores(machine) if num_hosts == 1 else 1)


def assign_resources(
    spec: JobSpec, node: AgentNode, num_ranks: int
) -> tuple[tuple[RankResources, ...], tuple[str, ...]]:
    machine = node.known_hello.machine
    if spec.placement is None and not node.host.gpus:
        num_cores = max(1, usable_cores(machine) // num_ranks)
        return (RankResources(num_cores=num_cores),) * num_ranks, ()
    # Imported late: a job without binding starts faster.
    from ronde.topology.placement.binding import UNPLACED, place_ranks

    host, request = node.host, spec.placement or UNPLACED
    request = request._replace(gpus=host.gpus, named_at=host.named_at)
    return place_ranks(machine, host.name, num_ranks, request, spec.env)


def network_of(node: AgentNode) -> "HostNetwork":
    # Imported late: a job on one host needs no rendezvous.
    from ronde.launch.network import HostNetwork

    machine, interfaces = node.known_hello.machine, node.known_hello.interfaces
    return HostNetwork(node.name, interfaces, node.host.address, machine.mbit_per_s)
