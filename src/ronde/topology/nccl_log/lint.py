"""Find faults in NCCL's debug log; most functions implement one rule."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import UNKNOWN, Diagnostic, Level
from ronde.topology.nccl_log.failures import Outcome, RankFailure
from ronde.topology.nccl_log.log import (
    EdgesSeen,
    NcclJob,
    NcclLog,
    Reported,
    TreeLink,
    WarningSeen,
)
from ronde.topology.nccl_log.rules import RULES, rule_of_failure, rule_of_warning
from ronde.topology.nccl_log.watchdog import CollectiveTimeout, TimedOutWork
from ronde.units import counted, list_first

_named = partial(list_first, most=3)
_VIRTUAL = re.compile(
    r"docker\d|veth|lo\d?$|virbr|br-|cni|flannel|cali|tunl|vxlan|kube-|lxc|lxd|podman"
)
# libfabric's providers without an adapter.
_BY_TCP = re.compile(r"Libfabric ((?:tcp|sockets|udp|net)(?:;\S+)?) ")
_DIRECT_LINKS = {"NVL": "NVLink", "NVB": "NVLink", "XGMI": "xGMI"}
# Since NCCL 2.30 links end at a device that contains GPUs.
_GPUS = ("GPU/", "DEV/")
_FEW_CHANNELS = 2
# To the switches of V100's six links; a bridge between two cards may carry less.
_MUCH_NVLINK_GB_PER_S = 100.0
# Hopper's eighteen links; Ampere's twelve have no multicast.
_MULTICAST_GB_PER_S = 340.0
_TINY_PCI_GB_PER_S = 3.0
# Virtual machines that hide the real link report less.
_LEAST_REAL_GB_PER_S = 1.0
# PCIe 3 x16 is 12 by NCCL's count and 15.75 by the standard, and so with later ones.
_PCI_LIMIT_OF_NCCL_COUNT = 15.75 / 12
_SLOW_INIT_S = 30.0
_MAX_WARNING = 160
_RECORD = (
    "To compare all calls, run again with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and "
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE=fr_: at a time-out rank 0 writes fr_0, and so on; "
    "then: torchfrtrace . -p fr_"
)
_NO_DMABUF = re.compile("ibv_reg_dmabuf_mr.*not supported", re.IGNORECASE)
# Sizes or calls of these differ between the ranks of a correct program.
_UNEQUAL = re.compile("SEND|RECV|COALESCED|ALLTOALL|GATHER$|SCATTER$")
# These may differ on purpose: hosts name their interfaces differently.
_OWN_PER_HOST = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID"}
# One rank reports these for all.
_REPORTED_BY_ONE = {"NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_COMM_ID"}


def lint_nccl_log(log: NcclLog) -> tuple[Diagnostic, ...]:
    """Return the faults that a log shows, the most severe first.

    A fact that is missing from the log is never reported as a fault.
    """
    found = [finding for job in log.jobs for rule in _RULES for finding in rule(job)]
    found += [*_failures(log), *_timeouts(log)]
    found += [*_nvlink_fabric(log.jobs), *_warnings(log.jobs)]
    lost = log.num_lost
    lines = "1 line was" if lost == 1 else f"{lost} lines were"
    for index, each in enumerate(found):
        # A line that is missing may be one of those lost.
        if lost and each.rule == "init-incomplete":
            seen = f"{each.seen} {lines} lost where the log broke."
            found[index] = each._replace(severity=Level.WARNING, seen=seen)
    if lost or log.num_left_out:
        seen = (
            f"{lost} lines were broken and could not be put together; "
            f"{log.num_left_out} things were too many to keep."
        )
        found.append(_finding("log-incomplete", ["log"], seen))
    return tuple(sorted(found, key=lambda each: list(Level).index(each.severity)))


def _failures(log: NcclLog) -> Iterator[Diagnostic]:
    waited = " Others waited in vain." if log.watchdog.timeouts else ""
    for rule, failures in _causes(log).items():
        causes = list_first(list(dict.fromkeys(f.cause for f in failures)), 2, "; ")
        name = _failed(failures)
        seen = f"{name[0].upper()}{name[1:]} failed: {causes}.{waited}"
        yield _finding(rule, [name], seen)
    for outcome, key, words in (
        (Outcome.RESTARTED, "restarted", "failed, and the job was started again"),
        (Outcome.WENT_ON, "caught", "printed an exception and went on"),
    ):
        if failures := [each for each in log.failures if each.outcome is outcome]:
            name, cause = _failed(failures), failures[0].cause
            do = RULES[rule_of_failure(cause)][2] if key == "restarted" else ""
            seen = f"{name[0].upper()}{name[1:]} {words}: {cause}."
            yield _finding(f"rank-failed.{key}", [name], seen, do=do)


def _causes(log: NcclLog) -> dict[str, list[RankFailure]]:
    """Return failures by rule; secondary failures only if there are no primary ones."""
    found: defaultdict[str, list[RankFailure]] = defaultdict(list)
    for each in (each for each in log.failures if each.outcome is Outcome.FAILED):
        found[rule_of_failure(each.cause)].append(each)
    if log.watchdog.timeouts or len(found) > 1:
        found.pop("rank-failed.follows", None)
    if len(found) > 1:
        found.pop("rank-failed.code", None)
    return found


def _failed(failures: Iterable[RankFailure]) -> str:
    """Return ``rank 3 on node1``, or ``local rank 5`` if no rank is known."""
    hosts = {each.rank: each.host for each in failures if each.rank >= 0}
    names = [each.name + f" on {each.host}" * bool(each.host) for each in failures]
    return _on([*hosts], hosts) if hosts else _named(names)


def _on(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return a text such as ``ranks 2-3 on node1``; empty if there are none."""
    where = _named(sorted({hosts.get(rank, "") for rank in ranks} - {""}))
    return (_ranks(ranks) if ranks else "") + f" on {where}" * bool(where)


def _timeouts(log: NcclLog) -> Iterator[Diagnostic]:
    report = log.watchdog
    # With several jobs, torch's lines cannot be assigned.
    comms = [job.communicators[0] for job in log.jobs if job.communicators]
    hosts = {r.rank: r.host for r in comms[0].ranks} if len(comms) == 1 else {}
    failed = [each for failures in _causes(log).values() for each in failures]
    trace = "" if failed else f" {_RECORD}"
    if report.trace_folder:
        trace = f" Compare all calls: torchfrtrace {report.trace_folder}."
    for timeout in report.timeouts:
        of_group = f" of group {_named(timeout.groups)}" if timeout.groups else ""
        works = "; ".join(map(_describe_work, timeout.works))
        seen = f"Collectives{of_group} did not end in time: {works}."
        silent = sorted({*timeout.silent} - {each.rank for each in failed})
        kind, unlike, odd = _kind_of(timeout)
        for words, ranks in (
            ("Not joined by", timeout.late),
            ("No line from", silent),
            ("Completed by", timeout.ahead),
            (f"{unlike} the others:", odd),
        ):
            seen += f" {words} {_ranks(ranks)}." if ranks else ""
        seen += " There are several jobs in the log." if len(comms) > 1 else ""
        waiting = [rank for work in timeout.works for rank in work.ranks]
        late = list(timeout.late) or waiting * bool(timeout.ahead)
        suspects = _failed(failed) or _on(late or odd or silent, hosts)
        is_first = timeout.works[-1].seq == 1
        kind = kind or ("silent" if silent else "first" if is_first else "")
        kind = "ended" if failed else "late" if late else kind
        tries = _tries(log)
        more = f" Or {tries}" * (not kind and "EFA" in tries) + trace
        key, ranks = f"collective-timeout.{kind}".rstrip("."), waiting or late
        words = {"suspects": suspects, "tries": tries}
        finding = _finding(key, [_ranks(ranks)], seen, **words)
        yield finding._replace(remedy=finding.remedy + more)
    for key, ranks, seen in (
        ("watchdog-stuck", report.stuck, "The watchdog itself made no progress."),
        ("store-lost", report.store_lost, "The store of torch's job was closed."),
    ):
        if ranks:
            yield _finding(key, [_ranks(ranks)], seen)


def _kind_of(timeout: CollectiveTimeout) -> tuple[str, str, list[int]]:
    """Return the kind of a time-out, a word for the odd ranks, and these ranks."""
    compared = [w for w in timeout.works if not _UNEQUAL.match(w.operation)]
    # Unknown groups may be several, each with its own numbers.
    num_groups, num_seqs = len(timeout.groups), len({work.seq for work in compared})
    is_one = num_groups == 1 or num_seqs == 1 or (num_groups and not timeout.silent)
    if len(compared) < 2 or not is_one:
        return "", "", []
    most = max(compared, key=lambda work: len(work.ranks))
    others = [work for work in compared if work is not most]
    odd = [rank for work in others for rank in work.ranks]
    if len(odd) >= len(most.ranks):
        return "differ", "", []
    is_behind = all(work.seq < most.seq for work in others)
    return "odd", "Behind" if is_behind else "Unlike", odd


def _tries(log: NcclLog) -> str:
    """Return advice to run with settings that each disable one transport."""
    comms = [comm for job in log.jobs for comm in job.communicators[:1]]
    is_efa = any("Libfabric" in n.value for job in log.jobs for n in job.networks)
    tries = ["NCCL_P2P_DISABLE=1", "NCCL_NET=Socket" if is_efa else "NCCL_IB_DISABLE=1"]
    if comms and all(len(comm.hosts) == len(comm.ranks) for comm in comms):
        del tries[0]
    elif comms and not any(map(_spans_nodes, log.jobs)):
        del tries[1]
    more = " See EFA's security group." * is_efa
    return f"run once with {' and once with '.join(tries)}.{more}"


def _describe_work(work: TimedOutWork) -> str:
    """Describe a collective: ``ALLREDUCE (work 7, 1,024 elements) in 600 s``."""
    details = [f"work {work.seq}"] if work.seq >= 0 else []
    if work.num_elements >= 0:
        details.append(counted(work.num_elements, "element"))
    text = work.operation or "a collective"
    text += f" ({', '.join(details)})" if details else ""
    text += f" in {work.timeout_s:g} s" if work.timeout_s else ""
    return f"{text} on {_ranks(work.ranks)}" if work.ranks else text


def _ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers: ``rank 3``, or ``ranks 0-3, 5``."""
    runs = format_list(sorted(ranks)).split(",")
    return f"rank{'s'[: len(ranks) > 1]} {list_first(runs, 6)}"


def _finding(
    key: str,
    elements: Sequence[str],
    seen: str,
    *,
    level: str = "",
    do: str = "",
    **words: str,
) -> Diagnostic:
    severity, consequence, remedy = RULES[key]
    rule, severity = key.partition(".")[0], Level(level or severity)
    texts = seen, consequence.format(**words), do or remedy.format(**words)
    return Diagnostic(rule, severity, _named(elements), *texts)


def _spans_nodes(job: NcclJob) -> bool:
    return any(edges.is_between_nodes for edges in job.edges) or any(
        comm.num_nodes > 1 or len(comm.hosts) > 1 for comm in job.communicators
    )


def _setting_of(job: NcclJob, *names: str) -> str:
    """Return the first of these settings in the log as ``NAME=value``, or ""."""
    settings = _values(job.settings)
    return next((s for n in names for s in settings if s.startswith(f"{n}=")), "")


def _unset(job: NcclJob, why: str, *names: str) -> str:
    """Return the advice to unset the first of these settings in the log, or ""."""
    choice = _setting_of(job, *names)
    return f"Unset {choice.partition('=')[0]}, which {why}: {choice}." if choice else ""


def _values(reported: Iterable[Reported]) -> list[str]:
    return [each.value for each in reported]


def _hosts(found: Iterable[Reported | EdgesSeen | WarningSeen]) -> list[str]:
    return sorted({host for each in found for host in each.hosts})


def _by_host(reported: Iterable[Reported]) -> str:
    """Format values with their hosts: ``IB on a, b; Socket on c``."""
    return "; ".join(f"{each.value} on {_named(each.hosts)}" for each in reported)


def _sockets_used(job: NcclJob) -> Iterator[Diagnostic]:
    """Find data that goes over TCP, although an RDMA adapter exists or may exist."""
    used = [each for each in job.networks if each.value == "Socket"]
    used += [e for e in job.edges if e.transport.startswith("NET/Socket")]
    if not used or not _spans_nodes(job):
        return
    searched = [value for value in _values(job.candidates) if value.startswith("IB")]
    adapters = [v.split(" ", 1)[1] for v in searched if not v.endswith(" none")]
    bans = ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket")
    ban = next((each for each in bans if each in _values(job.settings)), "")
    key, remedy = "sockets-between-nodes", ""
    if adapters:
        key = "sockets-despite-infiniband"
        reason = f"though NCCL found the adapters {_named(adapters)}"
    elif ban:
        reason = f"and {ban} keeps NCCL from InfiniBand and RoCE"
    elif searched:
        reason = "and NCCL found no InfiniBand or RoCE"
    else:
        reason = "and it is unknown whether NCCL looked for InfiniBand or RoCE"
        remedy = "Set NCCL_DEBUG_SUBSYS=INIT,NET,ENV to see what is looked for."
    if ban:
        remedy = f"Unset {ban.partition('=')[0]}."
    elif not adapters and any("libibverbs" in each for each in _values(job.plugins)):
        remedy = "Install libibverbs (package rdma-core) where the ranks run."
    seen = f"Data between nodes goes over TCP sockets, {reason}."
    yield _finding(key, _hosts(used), seen, do=remedy)


def _libfabric_over_tcp(job: NcclJob) -> Iterator[Diagnostic]:
    for each in job.candidates:
        if (match := _BY_TCP.match(each.value)) and _spans_nodes(job):
            seen = f"libfabric uses its provider {match[1]}, not that of an adapter."
            yield _finding("libfabric-over-tcp", each.hosts, seen)


def _ranks_differ(job: NcclJob) -> Iterator[Diagnostic]:
    networks = job.networks if _spans_nodes(job) else ()
    for key, seen, found in (
        ("networks-differ", "Ranks of one job chose different networks", networks),
        ("versions-differ", "Ranks have different versions of NCCL", job.versions),
        ("versions-differ.driver", "Ranks have different CUDA drivers", job.drivers),
    ):
        if len(found) > 1:
            yield _finding(key, _hosts(found), f"{seen}: {_by_host(found)}.")


def _settings_differ(job: NcclJob) -> Iterator[Diagnostic]:
    by_name: defaultdict[str, list[Reported]] = defaultdict(list)
    for each in job.settings:
        by_name[each.value.partition("=")[0]].append(each)
    for name, choices in by_name.items():
        absent = sorted({*_hosts(job.settings)} - {*_hosts(choices)})
        if len(choices) > 1:
            seen = f"{name} is not the same for all ranks: {_by_host(choices)}."
            level = "note" if name in _OWN_PER_HOST else ""
            yield _finding("settings-differ", _hosts(choices), seen, level=level)
        elif absent and name not in _REPORTED_BY_ONE:
            seen = f"{choices[0].value} is reported on other hosts and not here."
            yield _finding("settings-differ.absent", absent, seen)


def _adapters_mixed(job: NcclJob) -> Iterator[Diagnostic]:
    """Find jobs with both InfiniBand and RoCE, which cannot connect to each other."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in _values(job.candidates):
        found[name.rpartition("/")[2]].append(name.partition(" ")[2])
    is_used = not job.networks or any(v.startswith("IB") for v in _values(job.networks))
    is_used = is_used and (not job.communicators or _spans_nodes(job))
    if found["IB"] and found["RoCE"] and is_used:
        seen = f"NCCL found InfiniBand ({_named(found['IB'])}) and RoCE "
        seen += f"({_named(found['RoCE'])})."
        ports = ",".join(name.rpartition("/")[0] for name in found["IB"])
        # Each GPU may be near adapters of one kind only.
        is_well = not any("completion" in each.text for each in job.warnings) and all(
            rank.is_complete for comm in job.communicators for rank in comm.ranks
        )
        level = "note" if is_well and job.communicators else ""
        hosts = _hosts(job.candidates)
        yield _finding("adapters-mixed", hosts, seen, level=level, ports=ports)


def _nvlink_fabric(jobs: Sequence[NcclJob]) -> Iterator[Diagnostic]:
    """Find GPUs that are in another NVLink fabric than others, or have bad links."""
    # Hosts without a communicator may be of one job.
    lone = [each for job in jobs if not job.communicators for each in job.fabric]
    for gpus in (lone, *(job.fabric for job in jobs if job.communicators)):
        # With a fabric and a clique in it.
        uuids = {gpu.value.split()[1] for gpu in gpus}
        cliques = {tuple(gpu.value.split()[1:3]) for gpu in gpus}
        facts: defaultdict[str, list[str]] = defaultdict(list)
        for gpu in gpus:
            bus_id, uuid, clique, state, mask = gpu.value.split()
            num_cliques = sum(uuid == each[0] for each in cliques)
            # Two bits for each kind of fault: 1 is yes, 2 is no.
            is_degraded = any(int(mask, 16) >> bit & 3 == 1 for bit in (0, 2, 4, 6))
            for is_so, fact in (
                (uuid == "0.0" and len(uuids) > 1, "have no fabric UUID"),
                (state != "3", "have not joined the fabric"),
                (num_cliques > 1, f"are in clique {clique} of the fabric"),
                (is_degraded, f"report a bad link or route (healthMask 0x{mask})"),
            ):
                if is_so:
                    name = f"{_bus_address(bus_id)} on {_named(gpu.hosts)}"
                    facts[fact].append(name)
        if facts:
            seen = (f"GPUs {fact}: {_named(names)}." for fact, names in facts.items())
            yield _finding("nvlink-fabric", _hosts(gpus), " ".join(seen))


def _no_gpudirect(job: NcclJob) -> Iterator[Diagnostic]:
    """Find data that passes through host memory between GPU and adapter."""
    fast = [e for e in job.edges if re.match("NET/(?!Socket)", e.transport)]
    staged = [e for e in fast if "/GDRDMA" not in e.transport]
    networks = tuple(_values(job.networks)) or ("",)
    disabled = [
        match[1]
        for value in _values(job.gdr)
        if value.startswith(networks)
        and (match := re.fullmatch("(?!Socket)(.+) Disabled", value))
    ]
    if not _spans_nodes(job) or not (staged if fast else disabled):
        return
    nums = [str(sum(e.num_edges for e in edges)) for edges in (staged, fast)]
    which = " of ".join(nums) if staged else "NCCL's"
    seen = f"{which} connections between nodes do without GPUDirect RDMA"
    key = "no-gpudirect-rdma" + ".some" * (0 < len(staged) < len(fast))
    remedy = _unset(job, "may forbid it", "NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE")
    if disabled:
        seen += f"; it is disabled for {_named(disabled)}"
        key = "no-gpudirect-rdma"
    # On instances with small GPUs the plugin reports that there is none.
    known = [v for v in _values(job.plugins) if "disabling GDR" in v]
    if known:
        seen += f"; the plugin reports: {known[0].removeprefix('NET/OFI ')}"
        key, remedy = "no-gpudirect-rdma.plugin", ""
    yield _finding(key, _hosts(staged or job.gdr), f"{seen}.", do=remedy)


def _virtual_interfaces(job: NcclJob) -> Iterator[Diagnostic]:
    used = [("NCCL's bootstrap uses", each) for each in job.bootstrap]
    if "Socket" in _values(job.networks):
        used += [("Data goes over", each) for each in job.candidates]
    choice = _setting_of(job, "NCCL_SOCKET_IFNAME")
    change = f"Change {choice}" if choice else "Set NCCL_SOCKET_IFNAME"
    for use, each in used:
        name = each.value.removeprefix("Socket ")
        if len(job.hosts) > 1 and _VIRTUAL.match(name):
            seen = f"{use} {name}, an interface inside one of {len(job.hosts)} hosts."
            yield _finding("virtual-interface", each.hosts, seen, choice=change)


def _shared_memory_used(job: NcclJob) -> Iterator[Diagnostic]:
    """Find GPUs that exchange data through host memory despite a direct path."""
    staged = [edges for edges in job.edges if edges.transport.startswith("SHM/")]
    has_direct = any(edges.transport.startswith("P2P/") for edges in job.edges)
    between = {*_values(job.gpu_paths)}
    kinds = {e.kind for e in job.trees if e.target.startswith((*_GPUS, "NVS/"))}
    links = next((_DIRECT_LINKS[k] for k in _DIRECT_LINKS if k in kinds | between), "")
    if links:
        reason = f"NCCL found {links}"
    elif between & {"PIX", "PXB"}:
        reason = "NCCL found GPUs below one PCI switch"
    else:
        reason = "other GPUs reach each other's memory" if has_direct else ""
    if not staged or not reason:
        return
    has_nvswitch = any(link.target.startswith("NVS/") for link in job.trees)
    # It is normal between processors.
    is_usual = has_direct and (not between or between & {"PHB", "SYS"})
    severity = "note" if is_usual else "warning"
    if links and (has_nvswitch or not has_direct):
        severity = "error"
    num_edges = sum(edges.num_edges for edges in staged)
    example = "rank {} to rank {}".format(*staged[0].example)
    seen = f"{num_edges} connections inside nodes, such as {example}, go through the "
    seen += f"host's memory, though {reason}."
    do = _unset(job, "forbids it", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    key = "shm-where-p2p-was-possible"
    yield _finding(key, _hosts(staged), seen, level=severity, do=do)


def _peers_refused(job: NcclJob) -> Iterator[Diagnostic]:
    if job.p2p:
        seen = f"The driver refuses GPUs each other's memory: {job.p2p[0].value}."
        yield _finding("p2p-refused", _hosts(job.p2p), seen)


def _has_nvlink(job: NcclJob, targets: tuple[str, ...], gb_per_s: float) -> bool:
    links = [link for link in job.trees if link.target.startswith(targets)]
    return any(link.kind == "NVL" and link.gb_per_s >= gb_per_s for link in links)


def _few_channels(job: NcclJob) -> Iterator[Diagnostic]:
    """Find communicators with few channels, though their GPUs have NVLink."""
    # Multicast needs switches, and these have links enough.
    has_much = _has_nvlink(job, (*_GPUS, "NVS/"), _MUCH_NVLINK_GB_PER_S) or any(
        value.startswith("available") for value in _values(job.nvls)
    )
    limits = "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS"
    do = _unset(job, "limits them", *limits)
    for comm in job.communicators if has_much else ():
        num_nodes = comm.num_nodes if comm.num_nodes > 0 else len(comm.hosts)
        count = max((each.coll for each in comm.channels), default=_FEW_CHANNELS + 1)
        if count <= _FEW_CHANNELS and max(comm.num_ranks, len(comm.ranks)) > num_nodes:
            has = f"{comm.num_ranks} ranks have {counted(count, 'channel')}"
            seen = f"{has}, though their GPUs have NVLink."
            yield _finding("few-channels", comm.hosts, seen, do=do)
            return


def _nvls_lost(job: NcclJob) -> Iterator[Diagnostic]:
    lost = [each for each in job.nvls if each.value.startswith("lost: ")]
    absent = [each for each in job.nvls if each.value.startswith("not available")]
    seen = "Reduction in the NVLink switches (NVLS) "
    if lost:
        seen += f"was given up: {lost[0].value.removeprefix('lost: ')}."
    elif absent and len(absent) < len(job.nvls):
        devices = [each.rpartition(" ")[2] for each in _values(absent)]
        seen += f"lacks device {_named(devices)}."
    elif absent and _has_nvlink(job, ("NVS/",), _MULTICAST_GB_PER_S):
        seen = "The GPUs' NVLinks lead to switches, but these do not reduce (no NVLS)."
    else:
        return
    choice = _setting_of(job, "NCCL_NVLS_ENABLE")
    level, do = ("note", f"Unset {choice}.") if choice.endswith("=0") else ("", "")
    yield _finding("nvls-lost", _hosts(lost or absent), seen, level=level, do=do)


def _slow_pci(job: NcclJob) -> Iterator[Diagnostic]:
    links: defaultdict[str, list[TreeLink]] = defaultdict(list)
    for link in job.trees:
        for host in link.hosts:
            links[host].append(link)
    # The same link on many hosts is reported once.
    hosts: defaultdict[tuple[str, TreeLink, float], list[str]] = defaultdict(list)
    for host in sorted(links):
        for narrow in _narrow_ones(links[host]):
            hosts[narrow].append(host)
    for (name, link, should), where in hosts.items():
        has, below = link.gb_per_s, _bus_address(link.target)
        rates = f"{has:.1f} GB/s" + (f" instead of {should:.1f}" if should else "")
        seen = f"The PCI link above {below} carries {rates} by NCCL's count."
        key = "slow-pci.virtual" if has < _LEAST_REAL_GB_PER_S else "slow-pci"
        level = "error" if has <= _TINY_PCI_GB_PER_S else "warning"
        elements = [f"{name} on {_named(where)}"]
        found = _finding(key, elements, seen, level=level, name=name, below=below)
        yield found._replace(has_gb_per_s=has, should_gb_per_s=should)


def _narrow_ones(links: Sequence[TreeLink]) -> Iterator[tuple[str, TreeLink, float]]:
    """Yield GPUs and adapters below a slow link: name, link, expected GB/s (or 0)."""
    above = {link.target: link for link in links if link.kind == "PCI"}

    def narrowest(name: str) -> TreeLink:
        chain = {name: above[name]}
        while (upper := above.get(above[name].source)) and upper.target not in chain:
            name = upper.target
            chain[name] = upper
        return min(chain.values(), key=lambda link: link.gb_per_s)

    # A GPU in one package with its processor does not use the bus.
    packaged = {link.source for link in links if link.kind == "C2C"}
    names = [name for name in above if name.startswith(_GPUS) and name not in packaged]
    gpus = {name: narrowest(name) for name in names}
    best = max((link.gb_per_s for link in gpus.values()), default=0.0)
    for name, link in gpus.items():
        if link.gb_per_s < best or link.gb_per_s <= _TINY_PCI_GB_PER_S:
            should = best if best > link.gb_per_s else 0.0
            yield f"GPU {_bus_address(name)}", link, should
    for port in links:
        if port.kind == "NET" and port.source in above:
            link, should = narrowest(port.source), port.port_gb_per_s
            if link.gb_per_s * _PCI_LIMIT_OF_NCCL_COUNT < should:
                yield f"adapter {_bus_address(port.source)}", link, should


def _bus_address(name: str) -> str:
    """Convert NCCL's ``GPU/0-1b000`` to the address ``0000:1b:00.0``."""
    digits = name.rpartition("/")[2].rpartition("-")[2].lower().zfill(9)
    return f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}"


def _nodes_unlike_hosts(job: NcclJob) -> Iterator[Diagnostic]:
    """Find communicators in which NCCL counts more or fewer nodes than hosts."""
    for comm in job.communicators:
        num_hosts = len(comm.hosts)
        is_whole = len(comm.ranks) == comm.num_ranks
        if comm.is_mnnvl or not is_whole or comm.num_nodes in (UNKNOWN, num_hosts):
            continue
        nodes, hosts = counted(comm.num_nodes, "node"), counted(num_hosts, "host")
        seen = f"NCCL counts {nodes} of {comm.num_ranks} ranks; the log names {hosts}."
        key = "nodes-unlike-hosts" + ".many" * (comm.num_nodes > num_hosts)
        yield _finding(key, comm.hosts, seen)
        return


def _init_incomplete(job: NcclJob) -> Iterator[Diagnostic]:
    for comm in job.communicators:
        # How long the start took is reported at its end.
        waiting = {
            rank.rank: rank.host
            for rank in comm.ranks
            if rank.has_started and not rank.is_complete and not rank.init_s
        }
        if not waiting:
            continue
        here = {rank.rank for rank in comm.ranks}
        silent = [r for r in range(min(comm.num_ranks, 1 << 20)) if r not in here]
        num = f"{len(waiting)} of {comm.num_ranks}"
        seen = f"The start of {num} ranks began and is not complete"
        if silent:
            seen += f"; {len(silent)}, such as rank {silent[0]}, are not in the log"
        if job.retries:
            where, peers = _hosts(job.retries), _values(job.retries)
            seen += f"; on {_named(where)} they try to connect: {_named(peers)}"
        key = "init-incomplete" + ".absent" * bool(silent)
        yield _finding(key, [_on([*waiting], waiting)], f"{seen}.")
        return


def _ranks_not_in_log(job: NcclJob) -> Iterator[Diagnostic]:
    for comm in job.communicators[:1]:
        if 0 < len(comm.ranks) < comm.num_ranks:
            seen = f"{len(comm.ranks)} of {comm.num_ranks} ranks are in the log."
            yield _finding("ranks-not-in-log", job.hosts, seen)


def _slow_init(job: NcclJob) -> Iterator[Diagnostic]:
    ranks = [(rank, comm) for comm in job.communicators for rank in comm.ranks]
    for rank, comm in sorted(ranks, key=lambda pair: -pair[0].init_s)[:1]:
        if rank.init_s > _SLOW_INIT_S:
            seen = f"The start of {comm.num_ranks} ranks took {rank.init_s:.1f} s"
            for phase, phase_s in rank.init_phases[:1]:
                seen += f", of which {phase} {phase_s:.1f} s"
            where = [f"rank {rank.rank} on {rank.host}"]
            yield _finding("slow-init", where, f"{seen}.")


def _warnings(jobs: Sequence[NcclJob]) -> Iterator[Diagnostic]:
    by_cause: defaultdict[tuple[str, str], list[WarningSeen]] = defaultdict(list)
    has_gdr = any("/GDRDMA" in e.transport for job in jobs for e in job.edges)
    for each in (warning for job in jobs for warning in job.warnings):
        # ``_nvls_lost`` reports it.
        if not each.text.startswith("Failed to bind NVLink SHARP"):
            rule = rule_of_warning(f"{each.text} ({each.location})")
            if has_gdr and _NO_DMABUF.search(each.text):
                rule = "warned-adapter-memory.peermem"
            # Warnings of unknown cause are not grouped.
            cause = each.text if rule == "warned" else ""
            by_cause[rule, cause].append(each)
    for (rule, _), warnings in by_cause.items():
        text, location, *_ = max(warnings, key=lambda each: each.num_times)
        num_times = sum(each.num_times for each in warnings)
        times = "once" if num_times == 1 else f"{num_times} times"
        seen = f"NCCL reports {times}: {text[:_MAX_WARNING]}"
        seen += "..." * (len(text) > _MAX_WARNING) + (
            f" ({location})" if location else ""
        )
        if others := len({each.text for each in warnings}) - 1:
            seen += f"; and {counted(others, 'similar line')}"
        yield _finding(rule, _hosts(warnings), seen)


_RULES = (
    _sockets_used,
    _libfabric_over_tcp,
    _ranks_differ,
    _settings_differ,
    _adapters_mixed,
    _no_gpudirect,
    _virtual_interfaces,
    _shared_memory_used,
    _peers_refused,
    _few_channels,
    _nvls_lost,
    _slow_pci,
    _nodes_unlike_hosts,
    _init_incomplete,
    _ranks_not_in_log,
    _slow_init,
)
