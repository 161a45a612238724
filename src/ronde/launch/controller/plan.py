"""The job of each agent, from the user's request and what the hosts have."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    default_environment,
    rank_environment,
)
from ronde.launch.hosts.allocation import HostShare
from ronde.launch.messages import NodeJob, RankSpec
from ronde.launch.placement.place import RankResources
from ronde.world.rank_info import World


class JobRequest(NamedTuple):
    """What the user asked for."""

    argv: tuple[str, ...]
    # variables for all ranks, on top of what is there on each host
    env: Mapping[str, str]
    # further variables of single ranks, by rank
    rank_env: Mapping[int, Mapping[str, str]]
    cwd: str = ""  # directory to start in; empty for the one each agent was started in
    grace_s: float = 15.0  # seconds between the stop signal and the sweep
    master_port: int = 0  # port to meet at, 0 for any
    is_mpi: bool = False  # the ranks are to be able to initialise MPI
    max_restarts: int = 0  # how often all ranks may be started again


class JobPlan(NamedTuple):
    """All of a job that does not change when it is started again."""

    request: JobRequest  # what was asked for
    facts: JobFacts  # name and mark of the job
    shares: tuple[HostShare, ...]  # the ranks of each host
    # what each host gives its ranks, in the order of ``shares``
    places: tuple[tuple[RankResources, ...], ...]
    address: str  # where the ranks meet
    # variables of each host's ranks, in the order of ``shares``
    host_env: tuple[Mapping[str, str], ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(share.host.name for share in self.shares for _ in share.ranks)

    def jobs(self, epoch: int) -> tuple[NodeJob, ...]:
        facts, worlds = self.facts._replace(epoch=epoch), self._worlds()
        return tuple(
            self._job(facts, index, worlds) for index in range(len(self.shares))
        )

    def _job(self, facts: JobFacts, index: int, worlds: Iterator[World]) -> NodeJob:
        request, share = self.request, self.shares[index]
        node = NodeFacts(share.host.name, index, len(self.shares))
        places = self.places[index]
        cores = min(place.num_cores for place in places)
        env = default_environment(cores) | dict(request.env)
        ranks = tuple(
            RankSpec(
                rank,
                rank_environment(world, facts, node)
                | self._own_env(rank, place, request.env),
                place.cpus,
                place.memory_node,
            )
            for rank, place, world in zip(share.ranks, places, worlds, strict=False)
        )
        return NodeJob(
            job_id=facts.job_id,
            epoch=facts.epoch,
            job_marker=facts.job_marker,
            argv=request.argv,
            env=env | dict(self.host_env[index]),
            ranks=ranks,
            cwd=request.cwd,
            grace_s=request.grace_s,
            address=self.address if index == 0 else "",
            master_port=request.master_port,
            is_mpi=request.is_mpi,
        )

    def _own_env(
        self, rank: int, place: RankResources, shared: Mapping[str, str]
    ) -> dict[str, str]:
        env = dict(place.env)
        if "OMP_NUM_THREADS" not in shared:
            env["OMP_NUM_THREADS"] = str(place.num_cores)
        return env | dict(self.request.rank_env.get(rank, {}))

    def _worlds(self) -> Iterator[World]:
        """Yield what each rank knows of all, by rank."""
        sizes = [len(share.ranks) for share in self.shares]
        num_ranks = sum(sizes)
        hosts = tuple(share.host.name for share in self.shares)
        num_at = [sum(size > local for size in sizes) for local in range(max(sizes))]
        num_before = [0] * len(num_at)
        for share, size in zip(self.shares, sizes, strict=True):
            for local_rank, rank in enumerate(share.ranks):
                yield World(
                    rank=rank,
                    size=num_ranks,
                    local_rank=local_rank,
                    local_size=size,
                    cross_rank=num_before[local_rank],
                    cross_size=num_at[local_rank],
                    hosts=hosts,
                )
                num_before[local_rank] += 1


def make_facts(name: str, max_restarts: int = 0) -> JobFacts:
    """Return what names a new job; a random end makes ``name`` unique."""
    return JobFacts(
        f"{name}-{os.urandom(3).hex()}", 0, os.urandom(16).hex(), max_restarts
    )


def unbound(num_cores: int, num_ranks: int) -> tuple[RankResources, ...]:
    """Return places that leave every rank all of its host."""
    return (RankResources(num_cores=max(1, num_cores // num_ranks)),) * num_ranks


def count_ranks(shares: Sequence[HostShare]) -> int:
    """Return how many ranks there are in all."""
    return sum(len(share.ranks) for share in shares)
