"""The job of each agent, from the user's request and what the hosts have."""

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    default_environment,
    rank_environment,
)
from ronde.launch.hosts.host import HostShare
from ronde.launch.messages import NodeJob, RankSpec
from ronde.launch.placement.place import RankResources
from ronde.world.rank_info import World


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
