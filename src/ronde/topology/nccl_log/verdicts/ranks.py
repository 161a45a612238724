"""What looks wrong among the ranks of a job."""

from collections.abc import Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.graph import UNKNOWN
from ronde.topology.nccl_log.log import Job, RankSeen, Said
from ronde.topology.nccl_log.verdicts.evidence import (
    all_hosts,
    hosts_of,
    name_some,
    tell_apart,
    values,
)

_SLOW_INIT_S = 30.0
# Where these differ, it is often meant: hosts name their interfaces differently.
_OWN_PER_HOST = frozenset(
    {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID"}
)
# One rank alone says these, of whatever all have.
_SAID_BY_ONE = frozenset(
    {"NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_COMM_ID"}
)


def versions_differ(job: Job) -> Iterator[Finding]:
    """Find ranks of one job with different libraries."""
    for what, versions in (("NCCL", job.versions), ("the CUDA driver", job.drivers)):
        if len(versions) > 1:
            is_nccl = versions is job.versions
            yield Finding(
                rule="versions-differ",
                severity=Severity.ERROR if is_nccl else Severity.WARNING,
                element=name_some(all_hosts(versions)),
                what=f"Ranks have different versions of {what}: "
                f"{tell_apart(versions)}.",
                consequence="The start fails, or ranks choose differently and hang."
                if is_nccl
                else "What one driver supports and another does not is lost for all.",
                remedy="Use one image and one driver on all hosts; torch brings its "
                "own NCCL, which LD_LIBRARY_PATH may hide.",
            )


def settings_differ(job: Job) -> Iterator[Finding]:
    """Find settings that are not the same for all ranks."""
    by_name: dict[str, list[Said]] = {}
    for said in job.settings:
        by_name.setdefault(said.value.partition("=")[0], []).append(said)
    told = set(all_hosts(job.settings))
    for name, choices in by_name.items():
        absent = sorted(told - set(all_hosts(choices)))
        is_own = name in _OWN_PER_HOST
        if len(choices) > 1:
            yield Finding(
                rule="settings-differ",
                severity=Severity.NOTE if is_own else Severity.WARNING,
                element=name_some(all_hosts(choices)),
                what=f"{name} is not the same for all ranks: {tell_apart(choices)}.",
                consequence="Ranks may choose differently, which hangs or slows down.",
                remedy="Set it alike for all ranks, or for none.",
            )
        elif absent and name not in _SAID_BY_ONE:
            yield Finding(
                rule="settings-differ",
                severity=Severity.NOTE,
                element=name_some(absent),
                what=f"{choices[0].value} is said on other hosts and not here.",
                consequence="Ranks may choose differently, if it is not set here.",
                remedy="See that the launcher passes it to all hosts.",
            )


def nodes_unlike_hosts(job: Job) -> Iterator[Finding]:
    """Find communicators whose nodes NCCL counts differently from the log's hosts."""
    for comm in job.communicators:
        num_hosts = len(hosts_of(comm))
        is_whole = len(comm.ranks) == comm.num_ranks
        if comm.is_mnnvl or not is_whole or comm.num_nodes in (UNKNOWN, num_hosts):
            continue
        is_cloned = comm.num_nodes < num_hosts
        yield Finding(
            rule="nodes-unlike-hosts",
            severity=Severity.ERROR if is_cloned else Severity.WARNING,
            element=name_some(sorted(hosts_of(comm))),
            what=f"NCCL counts {comm.num_nodes} as the number of nodes of "
            f"{comm.num_ranks} ranks, and the log names {num_hosts} as hosts.",
            consequence="It takes ranks of different hosts for neighbours, and cannot "
            "connect them."
            if is_cloned
            else "It takes neighbours for strangers: data inside a host goes over the "
            "network.",
            remedy="Give every host a name of its own, or NCCL_HOSTID."
            if is_cloned
            else "Give the containers of a host one name and one boot id, or set "
            "NCCL_HOSTID to the host's name in all of them.",
        )
        return


def init_incomplete(job: Job) -> Iterator[Finding]:
    """Find ranks that began and are not said to have come to the end."""
    for comm in job.communicators:
        waiting = [rank for rank in comm.ranks if _waits(rank)]
        if not waiting:
            continue
        here = {rank.rank for rank in comm.ranks}
        silent = [
            rank for rank in range(min(comm.num_ranks, 1 << 20)) if rank not in here
        ]
        others = (
            f"; of {len(silent)}, such as rank {silent[0]}, the log says nothing"
            if silent
            else ""
        )
        yield Finding(
            rule="init-incomplete",
            severity=Severity.ERROR,
            element=name_some([f"rank {rank.rank} on {rank.host}" for rank in waiting]),
            what=f"{len(waiting)} of {comm.num_ranks} ranks began their start and "
            f"never said that it was complete{others}{_in_vain(job)}.",
            consequence="The job hangs or has ended in its start, unless the log was "
            "cut.",
            remedy="Look first at the ranks of which nothing is said, and at warnings; "
            "then whether the hosts reach each other on the bootstrap interface.",
        )
        return


def ranks_not_in_log(job: Job) -> Iterator[Finding]:
    """Find that the log speaks of a part of the ranks."""
    comm = max(job.communicators, key=lambda c: c.num_ranks, default=None)
    if comm is None or not comm.ranks or len(comm.ranks) >= comm.num_ranks:
        return
    yield Finding(
        rule="ranks-not-in-log",
        severity=Severity.NOTE,
        element=name_some(job.hosts),
        what=f"The log speaks of {len(comm.ranks)} of {comm.num_ranks} ranks.",
        consequence="What is said here holds for these alone.",
        remedy="Set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=nccl.%h.%p for all ranks, and "
        "give all files.",
    )


def slow_init(job: Job) -> Iterator[Finding]:
    """Find a start that took long."""
    slowest = max(
        ((rank, comm) for comm in job.communicators for rank in comm.ranks),
        key=lambda pair: pair[0].init_s,
        default=None,
    )
    if slowest is None or slowest[0].init_s <= _SLOW_INIT_S:
        return
    rank, comm = slowest
    phase, phase_s = rank.init_phases[0] if rank.init_phases else ("", 0.0)
    yield Finding(
        rule="slow-init",
        severity=Severity.NOTE,
        element=f"rank {rank.rank} on {rank.host}",
        what=f"The start of {comm.num_ranks} ranks took {rank.init_s:.1f} s"
        + (f", of which {phase} {phase_s:.1f} s." if phase else "."),
        consequence="Every start and restart of the job waits so long.",
        remedy=_PHASES.get(phase, "See which rank came last: the others wait for it."),
    )


_PHASES = {
    "bootstrap": "Some rank came late, or the bootstrap interface is slow: look at "
    "what ranks do before, and at NCCL_SOCKET_IFNAME.",
    "kernels": "The kernels are loaded from the disk: have the image on a local disk, "
    "and CUDA_MODULE_LOADING=LAZY.",
}


def _in_vain(job: Job) -> str:
    """Return whom ranks could not reach, for the end of a sentence."""
    if not job.retries:
        return ""
    hosts = name_some(all_hosts(job.retries))
    return f"; on {hosts} they try to connect: {name_some(values(job.retries))}"


def _waits(rank: RankSeen) -> bool:
    # How long the start took is said at its end.
    return rank.has_started and not rank.is_complete and not rank.init_s
