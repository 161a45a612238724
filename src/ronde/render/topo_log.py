"""The findings of lint, and the analysis of NCCL's debug log, as text."""

from collections.abc import Iterable, Sequence

from ronde.render.text import WIDTH, list_some, wrap
from ronde.topology.graph import UNKNOWN, Diagnostic, Level
from ronde.topology.nccl_log import NcclJob, NcclLog
from ronde.topology.nccl_log.log import Reported
from ronde.units import counted, format_size, grouped, list_first

_LABEL = 16
_MAX_NAMES = 4
_MAX_TUNINGS = 6
_MAX_JOBS = 8
_SUBSYSTEMS = "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"


def draw_log_findings(findings: Sequence[Diagnostic], width: int = WIDTH) -> str:
    """Format findings, the most severe first. Equal findings are shown once."""
    groups = grouped((each._replace(element=""), each.element) for each in findings)

    def order(finding: Diagnostic) -> tuple[int, float]:
        has, should = finding.has_gb_per_s, finding.should_gb_per_s
        return list(Level).index(finding.severity), has / should if should else 1.0

    return "\n".join(
        wrap(f"{each.severity.upper()} {each.rule}: ", list_some(groups[each]), width)
        + wrap("  seen ", each.seen, width)
        + wrap("  so   ", each.consequence, width)
        + wrap("  do   ", each.remedy, width)
        for each in sorted(groups, key=order)
    )


def count_findings(findings: Sequence[Diagnostic]) -> str:
    """Count findings by severity: ``1 error, 4 warnings``."""
    counts = [(s, sum(f.severity is s for f in findings)) for s in Level]
    return ", ".join(counted(n, s) for s, n in counts if n) or "nothing found"


def draw_log(log: NcclLog, findings: Sequence[Diagnostic], width: int = WIDTH) -> str:
    # Hosts with nothing but warnings are shown as one.
    bare, jobs, hosts = NcclJob(), list[NcclJob](), list[str]()
    for job in log.jobs:
        if job._replace(hosts=(), num_processes=0, warnings=()) == bare:
            hosts += job.hosts
        else:
            jobs.append(job)
    jobs += [NcclJob(tuple(hosts))] if hosts else []
    parts = [_job(job, width) for job in jobs[:_MAX_JOBS]]
    left = len(jobs) - _MAX_JOBS
    parts += [f"and {left} smaller jobs\n"] if left > 0 else []
    read = f"Read {counted(log.num_messages, 'message')} of NCCL"
    if log.watchdog.num_lines:
        read += f" and {counted(log.watchdog.num_lines, 'line')} of torch's watchdog"
    read += f" in {counted(log.num_lines, 'line')}"
    if log.num_mended:
        read += f", {log.num_mended:,} put together from broken lines"
    found = count_findings(findings) if findings else "nothing that looks wrong"
    parts.append(wrap("", f"{read}.", width, indent=0) + f"Found: {found}.\n")
    return "\n".join([*parts, *([draw_log_findings(findings, width)] * bool(findings))])


def _job(job: NcclJob, width: int) -> str:
    states = {each.value.split(" on dev")[0].split(":")[0] for each in job.nvls}
    lost = "found and given up" if "lost" in states else ""
    counts = job.communicators[0].channels if job.communicators else ()
    lines = {
        "bootstrap": _names(job.bootstrap),
        "between nodes": _between(job),
        "inside nodes": _inside(job),
        "NVLS": lost or " on some GPUs, ".join(sorted(states, reverse=True)),
        "channels": "; ".join(
            f"{each.coll} for collectives, {each.nvls} for NVLS, {each.p2p} for sends"
            for each in counts[:3]
        ),
        "algorithms": _tunings(job),
        "settings": _names(job.settings, 12),
        "start": _start(job),
        "missing": _missing(job),
    }
    text = wrap("", _head(job), width, indent=2)
    for label, value in lines.items():
        if value:
            text += wrap(f"  {label:<{_LABEL - 2}}", value, width, indent=_LABEL)
    return text


def _head(job: NcclJob) -> str:
    num_ranks = job.communicators[0].num_ranks if job.communicators else 0
    ranks = counted(num_ranks, "rank") if num_ranks else "number of ranks unknown"
    versions = [each.value for each in job.versions]
    hosts = list_first(job.hosts, _MAX_NAMES)
    text = f"{ranks} on {counted(len(job.hosts), 'host')} ({hosts})"
    text += f", NCCL {' and '.join(versions) or 'of unknown version'}"
    for each in job.drivers[:2]:
        # CUDA counts 12.9 as 12090.
        major, minor = divmod(int(each.value), 1000)
        text += f", CUDA driver {major}.{minor // 10}"
    if len(job.communicators) > 1:
        text += f", {len(job.communicators)} communicators"
    return text


def _between(job: NcclJob) -> str:
    networks, devices = _names(job.networks), list[str]()
    for each in job.candidates:
        kind, device = each.value.split(" ", 1)
        is_used = any(n.value.endswith(kind) for n in job.networks)
        if device != "none" and (is_used or not job.networks):
            devices.append(device)
    parts = [networks] if networks else []
    if devices:
        parts = [f"{networks or 'found'} over {list_first(devices, _MAX_NAMES)}"]
    if gdr := sorted({each.value.rpartition(" ")[2].lower() for each in job.gdr}):
        parts.append(f"GPUDirect RDMA {' and '.join(gdr)}")
    edges = _edges(job, is_between=True)
    nodes = max((comm.num_nodes for comm in job.communicators), default=UNKNOWN)
    if nodes == 1 and parts and not edges:
        edges = ["one node: not used"]
    return "; ".join(parts + edges)


def _inside(job: NcclJob) -> str:
    parts = _edges(job, is_between=False)
    for kind, name in (("NVL", "NVLink"), ("XGMI", "xGMI")):
        links = [link.gb_per_s for link in job.trees if link.kind == kind]
        if links:
            parts.append(f"{name} up to {max(links):.1f} GB/s from a GPU")
    return "; ".join(parts)


def _edges(job: NcclJob, *, is_between: bool) -> list[str]:
    return [
        f"{counted(each.num_edges, 'connection')} by {each.transport}"
        for each in job.edges
        if each.is_between_nodes is is_between
    ]


def _tunings(job: NcclJob) -> str:
    tunings: list[str] = []
    for collective, *how, least, most in job.tunings:
        ends = dict.fromkeys(map(format_size, (least, most)))
        tunings.append(" ".join([collective, " to ".join(ends), *how]))
    return list_first(tunings, _MAX_TUNINGS, "; ")


def _start(job: NcclJob) -> str:
    ranks = [rank for comm in job.communicators for rank in comm.ranks]
    slowest = max(ranks, key=lambda rank: rank.init_s, default=None)
    parts: list[str] = []
    if slowest and slowest.init_s:
        phases = [f"{name} {seconds:.2f}" for name, seconds in slowest.init_phases[:3]]
        words = f" ({', '.join(phases)})" if phases else ""
        parts.append(f"{slowest.init_s:.2f} s at most, rank {slowest.rank}{words}")
    for comm in job.communicators[:1]:
        if any(rank.has_started or rank.is_complete for rank in comm.ranks):
            num_complete = sum(rank.is_complete for rank in comm.ranks)
            parts.append(f"{num_complete} of {comm.num_ranks} ranks completed it")
    return "; ".join(parts)


def _missing(job: NcclJob) -> str:
    parts = {
        "network": job.networks,
        "connections": job.edges,
        "topology": job.trees,
        "start of ranks": [rank for comm in job.communicators for rank in comm.ranks],
    }
    absent = [name for name, values in parts.items() if not values]
    return f"{', '.join(absent)}; {_SUBSYSTEMS} adds it" if absent else ""


def _names(values: Iterable[Reported], most: int = _MAX_NAMES) -> str:
    return list_first([each.value for each in values], most)
