"""From what the user asked for and what the hosts have to the job of each agent."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    default_environment,
    rank_environment,
)
from ronde.launch.hosts.allocation import Share
from ronde.launch.job import Job, RankPlan
from ronde.launch.placement.place import Place
from ronde.world.value import World


class JobRequest(NamedTuple):
    """What the user asked for.

    Attributes:
        argv: Program and arguments.
        env: Variables for all ranks, on top of what is there on each host.
        rank_env: Further variables of single ranks, by rank.
        cwd: Directory to start in; empty for the one each agent was started in.
        grace_s: Seconds between the stop signal and the sweep.
        master_port: Port to meet at, 0 for any.
        is_mpi: The ranks are to be able to initialise MPI.
        max_restarts: How often all ranks may be started again.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    rank_env: Mapping[int, Mapping[str, str]]
    cwd: str = ""
    grace_s: float = 15.0
    master_port: int = 0
    is_mpi: bool = False
    max_restarts: int = 0


class Plan(NamedTuple):
    """All of a job that does not change when it is started again.

    Attributes:
        request: What was asked for.
        facts: Name and mark of the job.
        shares: The ranks of each host.
        places: What each host gives its ranks, in the order of ``shares``.
        address: Where the ranks meet.
        host_env: Variables of each host's ranks, in the order of ``shares``.
    """

    request: JobRequest
    facts: JobFacts
    shares: tuple[Share, ...]
    places: tuple[tuple[Place, ...], ...]
    address: str
    host_env: tuple[Mapping[str, str], ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host."""
        return tuple(share.host.name for share in self.shares for _ in share.ranks)

    def jobs(self, epoch: int) -> tuple[Job, ...]:
        """Return the job of each host's agent for one generation."""
        facts, worlds = self.facts._replace(epoch=epoch), self._worlds()
        return tuple(
            self._job(facts, index, worlds) for index in range(len(self.shares))
        )

    def _job(self, facts: JobFacts, index: int, worlds: Iterator[World]) -> Job:
        request, share = self.request, self.shares[index]
        node = NodeFacts(share.host.name, index, len(self.shares))
        places = self.places[index]
        cores = min(place.num_cores for place in places)
        env = default_environment(cores) | dict(request.env)
        ranks = tuple(
            RankPlan(
                rank,
                rank_environment(world, facts, node)
                | self._own_env(rank, place, request.env),
                place.cpus,
                place.memory_node,
            )
            for rank, place, world in zip(share.ranks, places, worlds, strict=False)
        )
        return Job(
            job_id=facts.job_id,
            epoch=facts.epoch,
            cookie=facts.cookie,
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
        self, rank: int, place: Place, shared: Mapping[str, str]
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


def unbound(num_cores: int, num_ranks: int) -> tuple[Place, ...]:
    """Return places that leave every rank all of its host."""
    return (Place(num_cores=max(1, num_cores // num_ranks)),) * num_ranks


def count_ranks(shares: Sequence[Share]) -> int:
    """Return how many ranks there are in all."""
    return sum(len(share.ranks) for share in shares)
