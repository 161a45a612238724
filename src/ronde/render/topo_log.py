"""What NCCL's debug log says -> words."""

from collections.abc import Iterable, Sequence

from ronde.render.topo_findings import count_findings, tell_findings
from ronde.render.wrapping import WIDTH, wrap
from ronde.topology.graph import UNKNOWN, Diagnostic
from ronde.topology.nccl_log import NcclJob, NcclLog
from ronde.topology.nccl_log.log import EdgesSeen, NcclCommunicator, RankSeen, Reported
from ronde.units import format_size

_LABEL = 16
_MAX_NAMES = 4
_MAX_TUNINGS = 6
_MAX_JOBS = 8
_PATTERNS = {1: "trees", 2: "trees", 3: "trees", 4: "rings", 5: "NVLS"}
_SUBSYSTEMS = "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"


def tell_log(log: NcclLog, findings: Sequence[Diagnostic], width: int = WIDTH) -> str:
    """Return a log in words: what NCCL chose, then what looks wrong.

    Args:
        log: What was read.
        findings: What looks wrong in it.
        width: Columns to keep to.
    """
    parts = [_job(job, log, width) for job in log.jobs[:_MAX_JOBS]]
    if left := len(log.jobs) - _MAX_JOBS:
        parts += [f"and {left} smaller jobs\n"] if left > 0 else []
    parts.append(_reading(log, width) + f"Found: {_found(findings)}.\n")
    if findings:
        parts.append(tell_findings(findings, width))
    return "\n".join(parts)


def _job(job: NcclJob, log: NcclLog, width: int) -> str:
    lines = (
        ("ranks meet on", _names(job.bootstrap)),
        ("between nodes", _between(job)),
        ("inside nodes", _inside(job)),
        ("graphs", _graphs(job)),
        ("NVLS", _nvls(job)),
        ("channels", _channels(job)),
        ("algorithms", _tunings(job)),
        ("settings", _some([said.value for said in job.settings], 12)),
        ("start", _start(job)),
        ("end", _end(job)),
        ("missing", _not_said(job)),
    )
    text = wrap("", _head(job, log), width, indent=2)
    for label, said in lines:
        if said:
            text += wrap(f"  {label:<{_LABEL - 2}}", said, width, indent=_LABEL)
    return text


def _head(job: NcclJob, log: NcclLog) -> str:
    largest = job.communicators[0] if job.communicators else None
    num_ranks = largest.num_ranks if largest else 0
    ranks = _count(num_ranks, "rank") if num_ranks else "number of ranks unknown"
    versions = [said.value for said in job.versions]
    if not versions and len(log.jobs) == 1:
        versions = list(log.loose_versions)
    parts = [
        f"{ranks} on {_count(len(job.hosts), 'host')} ({_some(job.hosts)})",
        f"NCCL {' and '.join(versions) or 'of unknown version'}",
        *(f"CUDA driver {_driver(said.value)}" for said in job.drivers[:2]),
    ]
    if len(job.communicators) > 1:
        parts.append(f"{len(job.communicators)} communicators")
    return ", ".join(parts)


def _driver(number: str) -> str:
    """Return ``12.9`` for 12090, as CUDA counts."""
    major, minor = divmod(int(number), 1000)
    return f"{major}.{minor // 10}"


def _between(job: NcclJob) -> str:
    nodes = max((comm.num_nodes for comm in job.communicators), default=UNKNOWN)
    parts = [_names(job.networks)] if job.networks else []
    found = [
        said.value.split(" ", 1)
        for said in job.candidates
        if not job.networks
        or any(each.value.endswith(said.value.split(" ")[0]) for each in job.networks)
    ]
    devices = [device for _, device in found if device != "none"]
    if devices:
        parts[-1:] = [f"{parts[-1] if parts else 'found'} over {_some(devices)}"]
    gdr = sorted({said.value.rpartition(" ")[2].lower() for said in job.gdr})
    if gdr:
        parts.append(f"GPUDirect RDMA {' and '.join(gdr)}")
    edges = _edges(each for each in job.edges if each.is_between_nodes)
    parts += edges
    if nodes == 1 and parts and not edges:
        parts.append("one node: not used")
    return "; ".join(parts)


def _inside(job: NcclJob) -> str:
    parts = _edges(edges for edges in job.edges if not edges.is_between_nodes)
    for kind, name in (("NVL", "NVLink"), ("XGMI", "xGMI")):
        links = [link.gb_per_s for link in job.trees if link.kind == kind]
        if links:
            parts.append(f"{name} up to {max(links):.1f} GB/s from a GPU")
    return "; ".join(parts)


def _edges(edges: Iterable[EdgesSeen]) -> list[str]:
    return [
        f"{_count(each.num_edges, 'connection')} by {each.transport}" for each in edges
    ]


def _graphs(job: NcclJob) -> str:
    told: dict[str, None] = {}
    for graph in job.graphs:
        if graph.num_channels:
            name = _PATTERNS.get(graph.pattern, f"pattern {graph.pattern}")
            inside = f"{graph.intra_gb_per_s:.1f} GB/s inside ({graph.intra_type})"
            between = f"{graph.inter_gb_per_s:.1f} between ({graph.inter_type})"
            told[f"{name}: {graph.num_channels} x {inside}, {between}"] = None
    return _some(list(told), sign="; ")


def _nvls(job: NcclJob) -> str:
    states = {said.value.split(" on dev")[0].split(":")[0] for said in job.nvls}
    if "lost" in states:
        return "found and given up"
    return " on some GPUs, ".join(sorted(states, reverse=True))


def _channels(job: NcclJob) -> str:
    counts = job.communicators[0].channels if job.communicators else ()
    return "; ".join(
        f"{each.coll} for collectives, {each.nvls} for NVLS, {each.p2p} for sends"
        for each in counts[:3]
    )


def _tunings(job: NcclJob) -> str:
    told = [
        f"{each.collective or 'collectives'} {_sizes(each.min_bytes, each.max_bytes)} "
        f"{each.algorithm} {each.protocol}"
        for each in job.tunings
    ]
    return _some(told, _MAX_TUNINGS, "; ")


def _sizes(least: int, most: int) -> str:
    if least == most:
        return format_size(least)
    return f"{format_size(least)} to {format_size(most)}"


def _start(job: NcclJob) -> str:
    ranks = [(rank, comm) for comm in job.communicators for rank in comm.ranks]
    slowest = max(ranks, key=lambda pair: pair[0].init_s, default=None)
    if slowest is None or not slowest[0].init_s:
        return _complete(job)
    rank = slowest[0]
    longest = [f"{name} {seconds:.2f}" for name, seconds in rank.init_phases[:3]]
    phases = f" ({', '.join(longest)})" if longest else ""
    return f"{rank.init_s:.2f} s at most, rank {rank.rank}{phases}; {_complete(job)}"


def _complete(job: NcclJob) -> str:
    largest = job.communicators[0] if job.communicators else None
    if largest is None or not any(_has_ended(rank) for rank in largest.ranks):
        return ""
    num_complete = sum(rank.is_complete for rank in largest.ranks)
    return f"{num_complete} of {largest.num_ranks} ranks completed it"


def _has_ended(rank: RankSeen) -> bool:
    return rank.has_started or rank.is_complete


def _end(job: NcclJob) -> str:
    if not job.aborts:
        return ""
    count = _count(sum(said.num_processes for said in job.aborts), "rank")
    return f"{count} gave up a communicator (torch does so at its end, too)"


def _not_said(job: NcclJob) -> str:
    """Return what the log leaves out, and how to have it said."""
    absent = [
        name
        for name, said in (
            ("network", job.networks),
            ("connections", job.edges),
            ("topology", job.trees),
            ("graphs", job.graphs),
            ("start of ranks", _ranks(job.communicators)),
        )
        if not said
    ]
    return f"{', '.join(absent)}; {_SUBSYSTEMS} adds it" if absent else ""


def _ranks(communicators: Iterable[NcclCommunicator]) -> tuple[RankSeen, ...]:
    return tuple(rank for comm in communicators for rank in comm.ranks)


def _found(findings: Sequence[Diagnostic]) -> str:
    return count_findings(findings) if findings else "nothing that looks wrong"


def _reading(log: NcclLog, width: int) -> str:
    text = (
        f"Read {_count(log.num_messages, 'message')} of NCCL in "
        f"{_count(log.num_lines, 'line')}"
    )
    if log.num_mended:
        text += f", {log.num_mended:,} put together from broken lines"
    return wrap("", f"{text}.", width, indent=0)


def _names(said: Iterable[Reported]) -> str:
    return _some([each.value for each in said])


def _some(names: Sequence[str], most: int = _MAX_NAMES, sign: str = ", ") -> str:
    left = len(names) - most
    return sign.join(names[:most]) + (f" and {left:,} more" if left > 0 else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
