"""What looks wrong in NCCL's debug log, and the rules that find it."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ronde.topology.graph import UNKNOWN, Diagnostic, Level
from ronde.topology.nccl_log.log import (
    EdgesSeen,
    NcclCommunicator,
    NcclJob,
    NcclLog,
    Reported,
    TreeLink,
    name_some,
)
from ronde.topology.nccl_log.verdicts import VERDICTS, WARNINGS

_VIRTUAL = re.compile(
    r"docker\d|veth|lo\d?$|virbr|br-|cni|flannel|cali|tunl|vxlan|kube-|lxc|lxd|podman"
)
# Providers of libfabric's that drive no adapter.
_BY_TCP = re.compile(r"Libfabric ((?:tcp|sockets|udp|net)(?:;\S+)?) ")
_DIRECT_LINKS = {"NVL": "NVLink", "NVB": "NVLink", "XGMI": "xGMI"}
# From NCCL 2.30 on NVLinks and PCI links lead to a device, and that has its GPUs.
_GPUS = ("GPU/", "DEV/")
_FEW_CHANNELS = 2
# To the switches of V100's six links; a bridge between two cards may carry less.
_MUCH_NVLINK_GB_PER_S = 100.0
# Eighteen links of Hopper's kind; Ampere's twelve have no multicast.
_MULTICAST_GB_PER_S = 340.0
_TINY_PCI_GB_PER_S = 3.0
# What virtual machines report that pass nothing of the real link on.
_LEAST_REAL_GB_PER_S = 1.0
# PCIe 3 x16 is 12 by NCCL's count and 15.75 by the standard, and so with later ones.
_PCI_LIMIT_OF_NCCL_COUNT = 15.75 / 12
_SLOW_INIT_S = 30.0
_MAX_WARNING = 160
# Where these differ, it is often meant: hosts name their interfaces differently.
_OWN_PER_HOST = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID"}
# One rank alone reports these, of whatever all have.
_REPORTED_BY_ONE = {"NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_COMM_ID"}


def judge_nccl_log(log: NcclLog) -> tuple[Diagnostic, ...]:
    """Return what looks wrong in a log, the most severe first.

    What is not in the log is never taken for a fault.
    """
    found = [finding for job in log.jobs for rule in _RULES for finding in rule(job)]
    lost = log.num_lost
    if lost:
        # What is found by a missing line is in doubt.
        doubt = (
            f" {lost} {'line was' if lost == 1 else 'lines were'} lost where the log"
        )
        found = [
            each._replace(severity=Level.WARNING, what=f"{each.what}{doubt} broke.")
            if each.rule == "init-incomplete"
            else each
            for each in found
        ]
    if len(log.loose_versions) > 1:
        what = f"Several versions are named: {', '.join(log.loose_versions[:5])}."
        found.append(_verdict("several-versions", ["log"], what))
    if lost or log.num_left_out:
        what = (
            f"{lost} lines were broken and could not be put together; "
            f"{log.num_left_out} things were too many to keep."
        )
        found.append(_verdict("log-incomplete", ["log"], what))
    order = tuple(Level)
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _verdict(
    key: str,
    places: Sequence[str],
    what: str,
    *,
    level: str = "",
    do: str = "",
    **words: str,
) -> Diagnostic:
    """Return a verdict; words are put into its texts."""
    severity, consequence, remedy = VERDICTS[key]
    return Diagnostic(
        key.partition(".")[0],
        Level(level or severity),
        name_some(places),
        what,
        consequence.format(**words),
        do or remedy.format(**words),
    )


def _spans_nodes(job: NcclJob) -> bool:
    """Return whether data goes between nodes, as far as the log shows."""
    return any(edges.is_between_nodes for edges in job.edges) or any(
        comm.num_nodes > 1 or len(comm.hosts) > 1 for comm in job.communicators
    )


def _setting_of(job: NcclJob, *names: str) -> str:
    """Return the first of these settings that is there, ``NAME=value``, or nothing."""
    settings = {each.partition("=")[0]: each for each in _values(job.settings)[::-1]}
    return next((settings[name] for name in names if name in settings), "")


def _values(reported: Iterable[Reported]) -> list[str]:
    return [each.value for each in reported]


def _hosts(found: Iterable[Reported | EdgesSeen]) -> list[str]:
    return sorted({host for each in found for host in each.hosts})


def _by_host(reported: Iterable[Reported]) -> str:
    """Return values with their hosts: ``IB on a, b; Socket on c``."""
    return "; ".join(f"{each.value} on {name_some(each.hosts)}" for each in reported)


def _sockets_used(job: NcclJob) -> Iterator[Diagnostic]:
    """Find data that goes over TCP where an adapter with RDMA is, or may be."""
    chosen = [each for each in job.networks if each.value == "Socket"]
    edges = [each for each in job.edges if each.transport.startswith("NET/Socket")]
    hosts = _hosts([*chosen, *edges])
    if not hosts or not _spans_nodes(job):
        return
    searched = [value for value in _values(job.candidates) if value.startswith("IB")]
    adapters = [v.split(" ", 1)[1] for v in searched if not v.endswith(" none")]
    bans = ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket")
    ban = next((each for each in bans if each in _values(job.settings)), "")
    key, remedy = "sockets-between-nodes", ""
    if adapters:
        key = "sockets-despite-infiniband"
        seen = f"though NCCL found the adapters {name_some(adapters)}"
    elif ban:
        seen = f"and {ban} keeps NCCL from InfiniBand and RoCE"
    elif searched:
        seen = "and NCCL found no InfiniBand or RoCE"
    else:
        seen = "and it is unknown whether NCCL looked for InfiniBand or RoCE"
        remedy = "Set NCCL_DEBUG_SUBSYS=INIT,NET,ENV to see what is looked for."
    if ban:
        remedy = f"Unset {ban.partition('=')[0]}."
    elif not adapters and any("libibverbs" in each for each in _values(job.plugins)):
        remedy = "Install libibverbs (package rdma-core) where the ranks run."
    what = f"Data between nodes goes over TCP sockets, {seen}."
    yield _verdict(key, hosts, what, do=remedy)


def _libfabric_over_tcp(job: NcclJob) -> Iterator[Diagnostic]:
    for each in job.candidates:
        if (match := _BY_TCP.match(each.value)) and _spans_nodes(job):
            what = (
                f"libfabric carries the data with its provider {match[1]}, not with "
                "that of an adapter (efa, cxi, verbs, psm3, opx)."
            )
            yield _verdict("libfabric-over-tcp", each.hosts, what)


def _networks_differ(job: NcclJob) -> Iterator[Diagnostic]:
    if len(job.networks) > 1 and _spans_nodes(job):
        what = f"Ranks of one job chose different networks: {_by_host(job.networks)}."
        yield _verdict("networks-differ", _hosts(job.networks), what)


def _no_gpudirect(job: NcclJob) -> Iterator[Diagnostic]:
    """Find data that goes through the hosts' memory between GPU and adapter."""
    edges = [e for e in job.edges if e.transport.startswith("NET/")]
    fast = [e for e in edges if not e.transport.startswith("NET/Socket")]
    staged = [e for e in fast if "/GDRDMA" not in e.transport]
    networks = tuple(_values(job.networks)) or ("",)
    disabled = [
        value.removesuffix(" Disabled")
        for value in _values(job.gdr)
        if value.endswith(" Disabled")
        and not value.startswith("Socket")
        and value.startswith(networks)
    ]
    if not _spans_nodes(job) or (not staged and (fast or not disabled)):
        return
    which = "NCCL's"
    if staged:
        num_staged, num_all = (sum(e.num_edges for e in es) for es in (staged, fast))
        which = f"{num_staged} of {num_all}"
    what = f"{which} connections between nodes do without GPUDirect RDMA"
    key, remedy = "no-gpudirect-rdma", ""
    if disabled:
        what += f"; it is disabled for {name_some(disabled)}"
        key = "no-gpudirect-rdma.disabled"
    if choice := _setting_of(job, "NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE"):
        remedy = f"Look at {choice} in the environment, and unset it."
    # Instances with small GPUs have none, and their plugin knows it.
    for value in _values(job.plugins):
        if value.startswith("NET/OFI") and "disabling GDR" in value:
            what += f"; the plugin reports: {value.removeprefix('NET/OFI ')}"
            key, remedy = "no-gpudirect-rdma.plugin", ""
            break
    yield _verdict(key, _hosts(staged or job.gdr), f"{what}.", do=remedy)


def _virtual_interfaces(job: NcclJob) -> Iterator[Diagnostic]:
    """Find interfaces of containers and of the host itself that carry traffic."""
    used = [("ranks meet on", each.value, each) for each in job.bootstrap]
    if "Socket" in _values(job.networks):
        used += [
            ("data goes over", each.value.removeprefix("Socket "), each)
            for each in job.candidates
            if each.value.startswith("Socket ")
        ]
    choice = _setting_of(job, "NCCL_SOCKET_IFNAME")
    change = f"Change {choice}" if choice else "Set NCCL_SOCKET_IFNAME"
    for use, name, each in used:
        if len(job.hosts) > 1 and _VIRTUAL.match(name):
            what = (
                f"Of a job on {len(job.hosts)} hosts, {use} {name}, an interface "
                "inside one host."
            )
            yield _verdict("virtual-interface", each.hosts, what, choice=change)


def _shared_memory_used(job: NcclJob) -> Iterator[Diagnostic]:
    """Find GPUs that pass data through the host's memory and need not."""
    staged = [edges for edges in job.edges if edges.transport.startswith("SHM/")]
    has_direct = any(edges.transport.startswith("P2P/") for edges in job.edges)
    between = {
        path.kind
        for path in job.paths
        if path.source.startswith("GPU/") and path.target.startswith("GPU/")
    }
    kinds = {e.kind for e in job.trees if e.target.startswith((*_GPUS, "NVS/"))}
    links = next((_DIRECT_LINKS[k] for k in _DIRECT_LINKS if k in kinds | between), "")
    reason = "other GPUs reach each other's memory" if has_direct else ""
    if links:
        reason = f"NCCL found {links}"
    elif between & {"PIX", "PXB"}:
        reason = "NCCL found GPUs below one PCI switch"
    if not staged or not reason:
        return
    has_nvswitch = any(link.target.startswith("NVS/") for link in job.trees)
    # Of GPUs at different processors it is right, and some others do without.
    is_usual = has_direct and (not between or between & {"PHB", "SYS"})
    severity = "note" if is_usual else "warning"
    if links and (has_nvswitch or not has_direct):
        severity = "error"
    num_edges = sum(edges.num_edges for edges in staged)
    first, second = staged[0].example
    what = (
        f"{num_edges} connections inside nodes, such as rank {first} to rank {second}, "
        f"go through the host's memory, though {reason}."
    )
    choice = _setting_of(job, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    do = f"Unset {choice.partition('=')[0]}, which forbids it: {choice}."
    key = "shm-where-p2p-was-possible"
    yield _verdict(key, _hosts(staged), what, level=severity, do=do if choice else "")


def _peers_refused(job: NcclJob) -> Iterator[Diagnostic]:
    if job.p2p:
        what = f"The driver refuses GPUs each other's memory: {job.p2p[0].value}."
        yield _verdict("p2p-refused", _hosts(job.p2p), what)


def _has_neighbours(comm: NcclCommunicator) -> bool | None:
    """Return whether a node has several ranks of a communicator; none if unknown."""
    counts = Counter(rank.host for rank in comm.ranks)
    if comm.num_nodes > 0 and comm.num_ranks > 0:
        return comm.num_ranks > comm.num_nodes
    if max(counts.values(), default=0) > 1:
        return True
    return False if counts.total() == comm.num_ranks else None


def _has_nvlink(job: NcclJob, targets: tuple[str, ...], gb_per_s: float) -> bool:
    return any(
        link.kind == "NVL"
        and link.target.startswith(targets)
        and link.gb_per_s >= gb_per_s
        for link in job.trees
    )


def _few_channels(job: NcclJob) -> Iterator[Diagnostic]:
    """Find communicators that NCCL found next to no ways for.

    Where each node has one rank, two channels are what there is to one adapter.
    """
    poor = [
        comm
        for comm in job.communicators
        if comm.channels
        and comm.num_ranks != 1
        and max(each.coll for each in comm.channels) <= _FEW_CHANNELS
        and _has_neighbours(comm) is not False
    ]
    if not poor:
        return
    worst = next((comm for comm in poor if _has_neighbours(comm)), poor[0])
    count = max(each.coll for each in worst.channels)
    # Multicast is in switches alone, and these have links enough.
    has_much = _has_nvlink(job, (*_GPUS, "NVS/"), _MUCH_NVLINK_GB_PER_S) or any(
        value.startswith("available") for value in _values(job.nvls)
    )
    is_fast = bool(_has_neighbours(worst)) and has_much
    what = (
        f"A communicator of {worst.num_ranks or 'some'} ranks has {count} "
        f"channel{'' if count == 1 else 's'}"
        f"{', though the GPUs have NVLink' if is_fast else ''}."
    )
    limit = _setting_of(job, "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")
    do = f"Unset {limit.partition('=')[0]}, which limits them: {limit}."
    key = "few-channels" if is_fast else "few-channels.usual"
    yield _verdict(key, worst.hosts or job.hosts, what, do=do if limit else "")


def _nvls_lost(job: NcclJob) -> Iterator[Diagnostic]:
    """Find reductions in the NVLink switches that were there and are not used."""
    lost = [each for each in job.nvls if each.value.startswith("lost: ")]
    absent = [each for each in job.nvls if each.value.startswith("not available")]
    if lost:
        error = lost[0].value.removeprefix("lost: ")
        what = f"Reduction in the NVLink switches (NVLS) was given up: {error}."
    elif absent and len(absent) < len(job.nvls):
        devices = [each.rpartition(" ")[2] for each in _values(absent)]
        what = (
            "Reduction in the NVLink switches (NVLS) is there on some GPUs and not on "
            f"device {name_some(devices)}."
        )
    elif absent and _has_nvlink(job, ("NVS/",), _MULTICAST_GB_PER_S):
        what = "The GPUs' NVLinks lead to switches, but these do not reduce (no NVLS)."
    else:
        return
    choice = _setting_of(job, "NCCL_NVLS_ENABLE")
    level, do = ("note", f"Unset {choice}.") if choice.endswith("=0") else ("", "")
    yield _verdict("nvls-lost", _hosts(lost or absent), what, level=level, do=do)


def _fabric_not_ready(job: NcclJob) -> Iterator[Diagnostic]:
    words = {"state 1": "not started", "state 2": "still starting"}
    waiting = [each for each in job.mnnvl if each.value[:7] in words]
    if waiting:
        state = words[waiting[0].value[:7]]
        what = f"The NVLink fabric of some GPUs is {state}."
        yield _verdict("fabric-not-ready", _hosts(waiting), what)


def _slow_pci(job: NcclJob) -> Iterator[Diagnostic]:
    """Find GPUs and adapters behind a PCI link that is narrower than it should be."""
    links: defaultdict[str, list[TreeLink]] = defaultdict(list)
    for link in job.trees:
        for host in link.hosts:
            links[host].append(link)
    # What is so on many hosts is reported once.
    hosts: defaultdict[tuple[str, str, float, float], list[str]] = defaultdict(list)
    for host in sorted(links):
        for narrow in _narrow_ones(links[host]):
            hosts[narrow].append(host)
    for (name, below, has, should), where in hosts.items():
        instead = f" instead of {should:.1f}" if should else ""
        key = "slow-pci.virtual" if has < _LEAST_REAL_GB_PER_S else "slow-pci"
        level = "error" if has <= _TINY_PCI_GB_PER_S else "warning"
        what = (
            f"The PCI link above {below} carries {has:.1f} GB/s{instead} by NCCL's "
            "count."
        )
        place = f"{name} on {name_some(where)}"
        verdict = _verdict(key, [place], what, level=level, name=name, below=below)
        yield verdict._replace(has_gb_per_s=has, should_gb_per_s=should)


def _narrow_ones(links: Sequence[TreeLink]) -> Iterator[tuple[str, str, float, float]]:
    """Yield what is behind too narrow a link on one host.

    That is its name, the address below the link, the link's GB/s by NCCL's count, and
    what it should have; 0 if unknown.
    """
    above = {link.target: link for link in links if link.kind == "PCI"}
    # A GPU in one package with its processor leaves the bus aside.
    packaged = {link.source for link in links if link.kind == "C2C"}
    gpus = {
        name: _narrowest(above, name)
        for name in above
        if name.startswith(_GPUS) and name not in packaged
    }
    best = max((link.gb_per_s for link in gpus.values()), default=0.0)
    for name, link in gpus.items():
        if link.gb_per_s < best or link.gb_per_s <= _TINY_PCI_GB_PER_S:
            should = best if best > link.gb_per_s else 0.0
            gpu, below = f"GPU {_bus_address(name)}", _bus_address(link.target)
            yield gpu, below, link.gb_per_s, should
    for port in links:
        nic = _narrowest(above, port.source) if port.source in above else None
        should = port.port_gb_per_s
        is_narrow = nic and nic.gb_per_s * _PCI_LIMIT_OF_NCCL_COUNT < should
        if nic and is_narrow and port.kind == "NET":
            adapter = f"adapter {_bus_address(port.source)}"
            yield adapter, _bus_address(nic.target), nic.gb_per_s, should


def _narrowest(above: Mapping[str, TreeLink], name: str) -> TreeLink:
    """Return the slowest PCI link between an element and its CPU."""
    chain = {name: above[name]}
    while (upper := above.get(above[name].source)) and upper.target not in chain:
        name = upper.target
        chain[name] = upper
    return min(chain.values(), key=lambda link: link.gb_per_s)


def _bus_address(name: str) -> str:
    """Return 0000:1b:00.0 for NCCL's ``GPU/0-1b000``, as sysfs and lspci write it."""
    digits = name.rpartition("/")[2].rpartition("-")[2].lower().zfill(9)
    return f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}"


def _versions_differ(job: NcclJob) -> Iterator[Diagnostic]:
    for key, name, versions in (
        ("versions-differ", "NCCL", job.versions),
        ("versions-differ.driver", "the CUDA driver", job.drivers),
    ):
        if len(versions) > 1:
            what = f"Ranks have different versions of {name}: {_by_host(versions)}."
            yield _verdict(key, _hosts(versions), what)


def _settings_differ(job: NcclJob) -> Iterator[Diagnostic]:
    by_name: defaultdict[str, list[Reported]] = defaultdict(list)
    for each in job.settings:
        by_name[each.value.partition("=")[0]].append(each)
    for name, choices in by_name.items():
        absent = sorted({*_hosts(job.settings)} - {*_hosts(choices)})
        if len(choices) > 1:
            what = f"{name} is not the same for all ranks: {_by_host(choices)}."
            level = "note" if name in _OWN_PER_HOST else ""
            yield _verdict("settings-differ", _hosts(choices), what, level=level)
        elif absent and name not in _REPORTED_BY_ONE:
            what = f"{choices[0].value} is reported on other hosts and not here."
            yield _verdict("settings-differ.absent", absent, what)


def _nodes_unlike_hosts(job: NcclJob) -> Iterator[Diagnostic]:
    """Find a communicator whose nodes NCCL counts differently from the log's hosts."""
    for comm in job.communicators:
        num_hosts = len(comm.hosts)
        is_whole = len(comm.ranks) == comm.num_ranks
        if comm.is_mnnvl or not is_whole or comm.num_nodes in (UNKNOWN, num_hosts):
            continue
        key = "nodes-unlike-hosts"
        what = (
            f"NCCL counts {comm.num_nodes} as the number of nodes of {comm.num_ranks} "
            f"ranks, and the log names {num_hosts} as hosts."
        )
        yield _verdict(key + ".many" * (comm.num_nodes > num_hosts), comm.hosts, what)
        return


def _init_incomplete(job: NcclJob) -> Iterator[Diagnostic]:
    """Find ranks whose start began and is not reported as complete."""
    for comm in job.communicators:
        # How long the start took is reported at its end.
        waiting = [
            rank
            for rank in comm.ranks
            if rank.has_started and not rank.is_complete and not rank.init_s
        ]
        if not waiting:
            continue
        here = {rank.rank for rank in comm.ranks}
        silent = [r for r in range(min(comm.num_ranks, 1 << 20)) if r not in here]
        what = (
            f"{len(waiting)} of {comm.num_ranks} ranks began their start and did not "
            "complete it"
        )
        if silent:
            what += f"; {len(silent)}, such as rank {silent[0]}, are not in the log"
        if job.retries:
            what += (
                f"; on {name_some(_hosts(job.retries))} they try to connect: "
                f"{name_some(_values(job.retries))}"
            )
        ranks = [f"rank {rank.rank} on {rank.host}" for rank in waiting]
        yield _verdict("init-incomplete", ranks, f"{what}.")
        return


def _ranks_not_in_log(job: NcclJob) -> Iterator[Diagnostic]:
    comm = max(job.communicators, key=lambda c: c.num_ranks, default=None)
    if comm and 0 < len(comm.ranks) < comm.num_ranks:
        what = f"{len(comm.ranks)} of {comm.num_ranks} ranks are in the log."
        yield _verdict("ranks-not-in-log", job.hosts, what)


def _slow_init(job: NcclJob) -> Iterator[Diagnostic]:
    ranks = ((rank, comm) for comm in job.communicators for rank in comm.ranks)
    rank, comm = max(ranks, key=lambda pair: pair[0].init_s, default=(None, None))
    if rank and comm and rank.init_s > _SLOW_INIT_S:
        what, key = f"The start of {comm.num_ranks} ranks took {rank.init_s:.1f} s", ""
        for phase, phase_s in rank.init_phases[:1]:
            what += f", of which {phase} {phase_s:.1f} s"
            key = f"slow-init.{phase}"
        key = key if key in VERDICTS else "slow-init"
        yield _verdict(key, [f"rank {rank.rank} on {rank.host}"], f"{what}.")


def _warnings(job: NcclJob) -> Iterator[Diagnostic]:
    """Yield NCCL's own warnings, with what is known of them."""
    for text, place, num_times, hosts in job.warnings:
        # That is reported with what else shows it.
        if not text.startswith("Failed to bind NVLink SHARP"):
            rule = next(rule for pattern, rule in WARNINGS if pattern.search(text))
            shown = text
            if len(text) > _MAX_WARNING:
                shown = f"{text[: _MAX_WARNING - 3]}..."
            times = "once" if num_times == 1 else f"{num_times} times"
            where = f" ({place})" if place else ""
            yield _verdict(rule, hosts, f"NCCL reports {times}: {shown}{where}")


_RULES = (
    _sockets_used,
    _libfabric_over_tcp,
    _networks_differ,
    _no_gpudirect,
    _virtual_interfaces,
    _shared_memory_used,
    _peers_refused,
    _few_channels,
    _nvls_lost,
    _fabric_not_ready,
    _slow_pci,
    _versions_differ,
    _settings_differ,
    _nodes_unlike_hosts,
    _init_incomplete,
    _ranks_not_in_log,
    _slow_init,
    _warnings,
)
