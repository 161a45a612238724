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
from ronde.topology.nccl_log.warnings import marked_warnings

_VIRTUAL = re.compile(
    r"docker\d|veth|lo\d?$|virbr|br-|cni|flannel|cali|tunl|vxlan|kube-|lxc|lxd|podman"
)
# Providers of libfabric's that drive no adapter.
_BY_TCP = re.compile(r"Libfabric ((?:tcp|sockets|udp|net)(?:;\S+)?) ")
_LOST = "most of its bandwidth is lost, and each message waits longer."
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
# Where these differ, it is often meant: hosts name their interfaces differently.
_OWN_PER_HOST = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID"}
# One rank alone reports these, of whatever all have.
_REPORTED_BY_ONE = {"NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_COMM_ID"}
_PHASES = {
    "bootstrap": "Some rank came late, or the bootstrap interface is slow: look at "
    "what ranks do before, and at NCCL_SOCKET_IFNAME.",
    "kernels": "The kernels are loaded from the disk: have the image on a local disk, "
    "and CUDA_MODULE_LOADING=LAZY.",
}


def judge_nccl_log(log: NcclLog) -> tuple[Diagnostic, ...]:
    """Return what looks wrong in a log, the most severe first.

    What is not in the log is never taken for a fault.
    """
    found = [finding for job in log.jobs for rule in _RULES for finding in rule(job)]
    if log.num_lost:
        found = [_doubt(finding, log.num_lost) for finding in found]
    if len(log.loose_versions) > 1:
        found.append(
            Diagnostic(
                "several-versions",
                Level.NOTE,
                "log",
                f"Several versions are named: {', '.join(log.loose_versions[:5])}.",
                "If they are of one job, its ranks do not fit together.",
                "Give the log of one job at a time.",
            )
        )
    if log.num_lost or log.num_left_out:
        found.append(
            Diagnostic(
                "log-incomplete",
                Level.NOTE,
                "log",
                f"{log.num_lost} lines were broken and could not be put together; "
                f"{log.num_left_out} things were too many to keep.",
                "Their content is missing here.",
                "Let every rank write a file of its own: NCCL_DEBUG_FILE=nccl.%h.%p.",
            )
        )
    order = tuple(Level)
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _doubt(finding: Diagnostic, num_lost: int) -> Diagnostic:
    """Return what is found by a missing line, where lines were lost."""
    if finding.rule != "init-incomplete":
        return finding
    lines = "line was" if num_lost == 1 else "lines were"
    what = f"{finding.what} {num_lost} {lines} lost where the log broke."
    return finding._replace(severity=Level.WARNING, what=what)


def _spans_nodes(job: NcclJob) -> bool:
    """Return whether data goes between nodes, as far as the log shows."""
    return any(edges.is_between_nodes for edges in job.edges) or any(
        comm.num_nodes > 1 or len(_hosts_of(comm)) > 1 for comm in job.communicators
    )


def _hosts_of(comm: NcclCommunicator) -> list[str]:
    return sorted({rank.host for rank in comm.ranks})


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
    if adapters:
        seen = f"though NCCL found the adapters {name_some(adapters)}"
        remedy = "Set NCCL_NET=IB: NCCL then reports why it cannot use them."
    elif ban:
        seen, remedy = f"and {ban} keeps NCCL from InfiniBand and RoCE", ""
    elif searched:
        seen = "and NCCL found no InfiniBand or RoCE"
        remedy = (
            "Run ibv_devinfo where the ranks run: a container needs /dev/infiniband, "
            "and a cloud's own adapter its plugin for NCCL."
        )
    else:
        seen = "and it is unknown whether NCCL looked for InfiniBand or RoCE"
        remedy = "Set NCCL_DEBUG_SUBSYS=INIT,NET,ENV to see what is looked for."
    if not adapters and any("libibverbs" in each for each in _values(job.plugins)):
        remedy = "Install libibverbs (package rdma-core) where the ranks run."
    yield Diagnostic(
        "sockets-despite-infiniband" if adapters else "sockets-between-nodes",
        Level.ERROR if adapters else Level.WARNING,
        name_some(hosts),
        f"Data between nodes goes over TCP sockets, {seen}.",
        f"Of {'each adapter' if adapters else 'an adapter that is there'} {_LOST}",
        f"Unset {ban.partition('=')[0]}." if ban else remedy,
    )


def _libfabric_over_tcp(job: NcclJob) -> Iterator[Diagnostic]:
    for each in job.candidates:
        if (match := _BY_TCP.match(each.value)) and _spans_nodes(job):
            yield Diagnostic(
                "libfabric-over-tcp",
                Level.WARNING,
                name_some(each.hosts),
                f"libfabric carries the data with its provider {match[1]}, not with "
                "that of an adapter (efa, cxi, verbs, psm3, opx).",
                f"Of an adapter that is there {_LOST}",
                "Look with fi_info where the ranks run which providers there are; a "
                "container needs the adapter's devices and its libfabric.",
            )


def _networks_differ(job: NcclJob) -> Iterator[Diagnostic]:
    if len(job.networks) > 1 and _spans_nodes(job):
        yield Diagnostic(
            "networks-differ",
            Level.ERROR,
            name_some(_hosts(job.networks)),
            f"Ranks of one job chose different networks: {_by_host(job.networks)}.",
            "They cannot connect to each other: the job hangs or ends.",
            "Make adapters, drivers and the image alike on all hosts, or set NCCL_NET "
            "for all ranks.",
        )


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
    seen = "NCCL's connections between nodes"
    if staged:
        num_staged, num_all = (sum(e.num_edges for e in es) for es in (staged, fast))
        seen = f"{num_staged} of {num_all} connections between nodes"
    why = f"; it is disabled for {name_some(disabled)}" if disabled else ""
    # Instances with small GPUs have none, and their plugin knows it.
    refusals = [
        value.removeprefix("NET/OFI ")
        for value in _values(job.plugins)
        if value.startswith("NET/OFI") and "disabling GDR" in value
    ]
    plugin = f"; the plugin reports: {refusals[0]}" if refusals else ""
    choice = _setting_of(job, "NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE")
    if plugin:
        remedy = (
            "Nothing, where the GPU's kind does without; else renew driver, CUDA and "
            "plugin, for these do not fit together."
        )
    elif choice:
        remedy = f"Look at {choice} in the environment, and unset it."
    elif disabled:
        remedy = (
            "Load the kernel's module: modprobe nvidia-peermem; or use a driver and a "
            "kernel that have DMA-BUF."
        )
    else:
        remedy = (
            "See with ronde topo --matrix how far GPUs and adapters are apart: farther "
            "than PXB it is off, and NCCL_NET_GDR_LEVEL=SYS forces it."
        )
    yield Diagnostic(
        "no-gpudirect-rdma",
        Level.NOTE if plugin else Level.WARNING,
        name_some(_hosts(staged or job.gdr)),
        f"{seen} do without GPUDirect RDMA{why}{plugin}.",
        "Data between GPU and adapter goes through the host's memory, which costs "
        "bandwidth and time.",
        remedy,
    )


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
            yield Diagnostic(
                "virtual-interface",
                Level.ERROR,
                name_some(each.hosts),
                f"Of a job on {len(job.hosts)} hosts, {use} {name}, an interface "
                "inside one host.",
                "Other hosts do not reach its address: the start hangs, or goes a slow "
                "way round.",
                f"{change} to the interface between the hosts, which ip route get "
                "ADDRESS names.",
            )


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
    severity = Level.NOTE if is_usual else Level.WARNING
    if links and (has_nvswitch or not has_direct):
        severity = Level.ERROR
    num_edges = sum(edges.num_edges for edges in staged)
    first, second = staged[0].example
    choice = _setting_of(job, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    yield Diagnostic(
        "shm-where-p2p-was-possible",
        severity,
        name_some(_hosts(staged)),
        f"{num_edges} connections inside nodes, such as rank {first} to rank {second}, "
        f"go through the host's memory, though {reason}.",
        "They reach a part of the bandwidth that the GPUs have among themselves.",
        f"Unset {choice.partition('=')[0]}, which forbids it: {choice}."
        if choice
        else "Let every rank see all GPUs of its host, and give containers of one host "
        "the same IPC namespace (--ipc=host); on bare metal turn off ACS and the "
        "IOMMU.",
    )


def _peers_refused(job: NcclJob) -> Iterator[Diagnostic]:
    if job.p2p:
        yield Diagnostic(
            "p2p-refused",
            Level.WARNING,
            name_some(_hosts(job.p2p)),
            f"The driver refuses GPUs each other's memory: {job.p2p[0].value}.",
            "Data between them goes through the host's memory.",
            "Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; "
            "nvidia-smi topo -p2p n shows the pairs.",
        )


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
    limit = _setting_of(job, "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")
    yield Diagnostic(
        "few-channels",
        Level.ERROR if is_fast else Level.NOTE,
        name_some(_hosts_of(worst) or job.hosts),
        f"A communicator of {worst.num_ranks or 'some'} ranks has {count} "
        f"channel{'' if count == 1 else 's'}"
        f"{', though the GPUs have NVLink' if is_fast else ''}.",
        "Bandwidth is that of one path: tens instead of hundreds of GB/s."
        if is_fast
        else "Right for GPUs that PCI alone connects; far too little for others.",
        f"Unset {limit.partition('=')[0]}, which limits them: {limit}."
        if limit
        else "Compare the NVLinks of the GPUs: nvidia-smi nvlink -s; with "
        "NCCL_TOPO_DUMP_FILE=topo.xml set, ronde topo lint topo.xml shows more.",
    )


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
    is_off = choice.endswith("=0")
    yield Diagnostic(
        "nvls-lost",
        Level.NOTE if is_off else Level.WARNING,
        name_some(_hosts(lost or absent)),
        what,
        "AllReduce inside a node is limited to what rings reach; on eight GPUs NVLS "
        "reaches up to 1.56 times that.",
        f"Unset {choice}."
        if is_off
        else "Look at the fabric manager (systemctl status nvidia-fabricmanager, "
        "nvidia-smi -q), and give a VM or container all GPUs of the switch.",
    )


def _fabric_not_ready(job: NcclJob) -> Iterator[Diagnostic]:
    words = {"state 1": "not started", "state 2": "still starting"}
    waiting = [each for each in job.mnnvl if each.value[:7] in words]
    if waiting:
        yield Diagnostic(
            "fabric-not-ready",
            Level.WARNING,
            name_some(_hosts(waiting)),
            f"The NVLink fabric of some GPUs is {words[waiting[0].value[:7]]}.",
            "NVLink between them is not used, or fails.",
            "Wait for or restart nvidia-fabricmanager; nvidia-smi -q shows the "
            "fabric's state.",
        )


def _slow_pci(job: NcclJob) -> Iterator[Diagnostic]:
    """Find GPUs and adapters behind a PCI link that is narrower than it should be."""
    links: defaultdict[str, list[TreeLink]] = defaultdict(list)
    for link in job.trees:
        for host in link.hosts:
            links[host].append(link)
    # What is so on many hosts is reported once.
    hosts: dict[tuple[str, str, float, float], list[str]] = {}
    for host in sorted(links):
        for narrow in _narrow_ones(links[host]):
            hosts.setdefault(narrow, []).append(host)
    for (name, below, has, should), where in hosts.items():
        instead = f" instead of {should:.1f}" if should else ""
        yield Diagnostic(
            "slow-pci",
            Level.ERROR if has <= _TINY_PCI_GB_PER_S else Level.WARNING,
            f"{name} on {name_some(where)}",
            f"The PCI link above {below} carries {has:.1f} GB/s{instead} by NCCL's "
            "count.",
            f"All that {name} moves over PCI is limited to {has:.1f} GB/s.",
            "In a virtual machine name a file with the host's real speeds in "
            "NCCL_TOPO_FILE, or give the virtual root port x-speed and x-width; on "
            f"bare metal reseat the card: see lspci -vv -s {below}."
            if has < _LEAST_REAL_GB_PER_S
            else f"Compare with lspci -vv -s {below} there: LnkSta must be as wide and "
            "as fast as LnkCap; reseat the card or the riser, or set the slot's speed "
            "in the BIOS.",
            has,
            should,
        )


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
    narrowest = above[name]
    seen = {name}
    while (upper := above.get(above[name].source)) and upper.target not in seen:
        name = upper.target
        seen.add(name)
        if upper.gb_per_s < narrowest.gb_per_s:
            narrowest = upper
    return narrowest


def _bus_address(name: str) -> str:
    """Return 0000:1b:00.0 for NCCL's ``GPU/0-1b000``, as sysfs and lspci write it."""
    digits = name.rpartition("/")[2].rpartition("-")[2].lower().zfill(9)
    return f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}"


def _versions_differ(job: NcclJob) -> Iterator[Diagnostic]:
    for what, versions in (("NCCL", job.versions), ("the CUDA driver", job.drivers)):
        if len(versions) > 1:
            is_nccl = what == "NCCL"
            yield Diagnostic(
                "versions-differ",
                Level.ERROR if is_nccl else Level.WARNING,
                name_some(_hosts(versions)),
                f"Ranks have different versions of {what}: {_by_host(versions)}.",
                "The start fails, or ranks choose differently and hang."
                if is_nccl
                else "What one driver supports and another does not is lost for all.",
                "Use one image and one driver on all hosts; torch brings its own NCCL, "
                "which LD_LIBRARY_PATH may hide.",
            )


def _settings_differ(job: NcclJob) -> Iterator[Diagnostic]:
    by_name: dict[str, list[Reported]] = {}
    for each in job.settings:
        by_name.setdefault(each.value.partition("=")[0], []).append(each)
    for name, choices in by_name.items():
        absent = sorted({*_hosts(job.settings)} - {*_hosts(choices)})
        if len(choices) > 1:
            yield Diagnostic(
                "settings-differ",
                Level.NOTE if name in _OWN_PER_HOST else Level.WARNING,
                name_some(_hosts(choices)),
                f"{name} is not the same for all ranks: {_by_host(choices)}.",
                "Ranks may choose differently, which hangs or slows down.",
                "Set it alike for all ranks, or for none.",
            )
        elif absent and name not in _REPORTED_BY_ONE:
            yield Diagnostic(
                "settings-differ",
                Level.NOTE,
                name_some(absent),
                f"{choices[0].value} is reported on other hosts and not here.",
                "Ranks may choose differently, if it is not set here.",
                "See that the launcher passes it to all hosts.",
            )


def _nodes_unlike_hosts(job: NcclJob) -> Iterator[Diagnostic]:
    """Find a communicator whose nodes NCCL counts differently from the log's hosts."""
    for comm in job.communicators:
        hosts = _hosts_of(comm)
        is_whole = len(comm.ranks) == comm.num_ranks
        if comm.is_mnnvl or not is_whole or comm.num_nodes in (UNKNOWN, len(hosts)):
            continue
        is_cloned = comm.num_nodes < len(hosts)
        yield Diagnostic(
            "nodes-unlike-hosts",
            Level.ERROR if is_cloned else Level.WARNING,
            name_some(hosts),
            f"NCCL counts {comm.num_nodes} as the number of nodes of {comm.num_ranks} "
            f"ranks, and the log names {len(hosts)} as hosts.",
            "It takes ranks of different hosts for neighbours, and cannot connect them."
            if is_cloned
            else "It takes neighbours for strangers: data inside a host goes over the "
            "network.",
            "Give every host a name of its own, or NCCL_HOSTID."
            if is_cloned
            else "Give the containers of a host one name and one boot id, or set "
            "NCCL_HOSTID to the host's name in all of them.",
        )
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
        others = retries = ""
        if silent:
            others = f"; {len(silent)}, such as rank {silent[0]}, are not in the log"
        if job.retries:
            retries = (
                f"; on {name_some(_hosts(job.retries))} they try to connect: "
                f"{name_some(_values(job.retries))}"
            )
        yield Diagnostic(
            "init-incomplete",
            Level.ERROR,
            name_some([f"rank {rank.rank} on {rank.host}" for rank in waiting]),
            f"{len(waiting)} of {comm.num_ranks} ranks began their start and did not "
            f"complete it{others}{retries}.",
            "The job hangs or has ended in its start, unless the log was cut.",
            "Look first at the ranks that are not in the log, and at warnings; then "
            "whether the hosts reach each other on the bootstrap interface.",
        )
        return


def _ranks_not_in_log(job: NcclJob) -> Iterator[Diagnostic]:
    comm = max(job.communicators, key=lambda c: c.num_ranks, default=None)
    if comm and 0 < len(comm.ranks) < comm.num_ranks:
        yield Diagnostic(
            "ranks-not-in-log",
            Level.NOTE,
            name_some(job.hosts),
            f"{len(comm.ranks)} of {comm.num_ranks} ranks are in the log.",
            "Everything here holds for these alone.",
            "Set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=nccl.%h.%p for all ranks, and "
            "give all files.",
        )


def _slow_init(job: NcclJob) -> Iterator[Diagnostic]:
    ranks = ((rank, comm) for comm in job.communicators for rank in comm.ranks)
    rank, comm = max(ranks, key=lambda pair: pair[0].init_s, default=(None, None))
    if rank and comm and rank.init_s > _SLOW_INIT_S:
        phase, phase_s = rank.init_phases[0] if rank.init_phases else ("", 0.0)
        yield Diagnostic(
            "slow-init",
            Level.NOTE,
            f"rank {rank.rank} on {rank.host}",
            f"The start of {comm.num_ranks} ranks took {rank.init_s:.1f} s"
            + (f", of which {phase} {phase_s:.1f} s." if phase else "."),
            "Every start and restart of the job waits so long.",
            _PHASES.get(phase, "See which rank came last: the others wait for it."),
        )


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
    marked_warnings,
)
