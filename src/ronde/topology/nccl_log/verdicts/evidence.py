"""What a job's log shows, as the rules ask for it."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ronde.topology.nccl_log.log import Communicator, Job, Said

_MAX_NAMES = 3
_DIRECT_LINKS = {"NVL": "NVLink", "NVB": "NVLink", "XGMI": "xGMI"}
# From NCCL 2.30 on NVLinks and PCI links lead to a device, and that has its GPUs.
_GPUS = ("GPU/", "DEV/")
_NEAR_PATHS = frozenset({"PIX", "PXB"})
_FAR_PATHS = frozenset({"PHB", "SYS"})
# To the switches of V100's six links; a bridge between two cards may carry less.
_MUCH_NVLINK_GB_PER_S = 100.0


def spans_nodes(job: Job) -> bool:
    """Return whether data goes between nodes, as far as the log shows."""
    return any(edges.is_between_nodes for edges in job.edges) or any(
        comm.num_nodes > 1 or len(hosts_of(comm)) > 1 for comm in job.communicators
    )


def hosts_of(comm: Communicator) -> frozenset[str]:
    """Return the hosts of the ranks that the log speaks of."""
    return frozenset(rank.host for rank in comm.ranks)


def setting_of(job: Job, *names: str) -> str:
    """Return the first of these settings that is there, ``NAME=value``, or nothing."""
    for name in names:
        for said in job.settings:
            if said.value.partition("=")[0] == name:
                return said.value
    return ""


def direct_links(job: Job) -> str:
    """Return what NCCL found to join GPUs directly: NVLink, xGMI; empty for nothing."""
    kinds = {
        link.kind for link in job.trees if link.target.startswith((*_GPUS, "NVS/"))
    }
    kinds |= _paths_between_gpus(job)
    return next((name for kind, name in _DIRECT_LINKS.items() if kind in kinds), "")


def has_much_nvlink(job: Job) -> bool:
    """Return whether NVLinks carry too much for two channels."""
    # Multicast is in switches alone, and these have links enough.
    has_multicast = any(value.startswith("available") for value in values(job.nvls))
    return has_multicast or _nvlink_gb_per_s(job) >= _MUCH_NVLINK_GB_PER_S


def has_neighbours(comm: Communicator) -> bool | None:
    """Return whether a node has several ranks of a communicator; none if not said."""
    counts = Counter(rank.host for rank in comm.ranks)
    if comm.num_nodes > 0 and comm.num_ranks > 0:
        return comm.num_ranks > comm.num_nodes
    if max(counts.values(), default=0) > 1:
        return True
    return False if counts.total() == comm.num_ranks else None


def has_near_gpus(job: Job) -> bool:
    """Return whether NCCL found GPUs below one PCI switch."""
    return bool(_paths_between_gpus(job) & _NEAR_PATHS)


def has_nvswitch(job: Job) -> bool:
    """Return whether NCCL found NVLink switches, which join all GPUs."""
    return any(link.target.startswith("NVS/") for link in job.trees)


def may_have_far_gpus(job: Job) -> bool:
    """Return whether some GPUs are apart by their processors, or nobody says so."""
    found = _paths_between_gpus(job)
    return not found or bool(found & _FAR_PATHS)


def values(said: Iterable[Said]) -> tuple[str, ...]:
    """Return what was said, without who did."""
    return tuple(each.value for each in said)


def all_hosts(said: Iterable[Said]) -> tuple[str, ...]:
    """Return all hosts that said one of these."""
    return tuple(sorted({host for each in said for host in each.hosts}))


def name_some(names: Sequence[str]) -> str:
    """Return names in a row, the end of a long one counted only."""
    shown = ", ".join(names[:_MAX_NAMES])
    left = len(names) - _MAX_NAMES
    return f"{shown} and {left} more" if left > 0 else shown


def tell_apart(said: Iterable[Said]) -> str:
    """Return who said what: ``IB on a, b; Socket on c``."""
    return "; ".join(f"{each.value} on {name_some(each.hosts)}" for each in said)


def is_gpu(name: str) -> bool:
    """Return whether an element of the topology is a GPU."""
    return name.startswith(_GPUS)


def bus_address(name: str) -> str:
    """Return 0000:1b:00.0 for NCCL's ``GPU/0-1b000``, as sysfs and lspci write it."""
    digits = name.rpartition("/")[2].rpartition("-")[2].lower().zfill(9)
    return f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}"


def _nvlink_gb_per_s(job: Job) -> float:
    """Return the most that NVLinks carry from a GPU to one other end."""
    return max(
        (
            link.gb_per_s
            for link in job.trees
            if link.kind == "NVL" and link.target.startswith((*_GPUS, "NVS/"))
        ),
        default=0.0,
    )


def _paths_between_gpus(job: Job) -> frozenset[str]:
    return frozenset(
        path.kind
        for path in job.paths
        if path.source.startswith("GPU/") and path.target.startswith("GPU/")
    )
