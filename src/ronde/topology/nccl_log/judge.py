"""What looks wrong in NCCL's debug log: the rules that find it, and their texts.

Sources: NVIDIA's guide to NCCL's troubleshooting, and what NCCL's users reported.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ronde.topology.graph import UNKNOWN, Diagnostic, Level
from ronde.topology.nccl_log.log import (
    EdgesSeen,
    NcclJob,
    NcclLog,
    Reported,
    TreeLink,
)
from ronde.units import list_first

# Each: the rule and its severity; what comes of it; what to do. A rule that has several
# texts has a word for each behind a dot; what one lacks is as in the rule's first.
_RULE_TEXTS = """
sockets-despite-infiniband error
  so Most of the adapters' bandwidth is lost, and each message takes longer.
  do Set NCCL_NET=IB: NCCL then reports why it cannot use them.
sockets-between-nodes warning
  so If there is an adapter, most of its bandwidth is lost; each message takes longer.
  do Run ibv_devinfo where the ranks run: a container needs /dev/infiniband, and a
     cloud's own adapter its plugin for NCCL.
libfabric-over-tcp warning
  so Most of the adapter's bandwidth is lost, and each message takes longer.
  do Run fi_info where the ranks run: a container needs the adapter's devices and its
     libfabric.
networks-differ error
  so They cannot connect to each other: the job hangs or ends.
  do Use the same adapters, drivers and image everywhere, or set NCCL_NET for all ranks.
no-gpudirect-rdma warning
  so Data goes through the host's memory, which costs bandwidth and time.
  do See with ronde topo --matrix how far GPUs and adapters are apart: farther than PXB
     it is off, and NCCL_NET_GDR_LEVEL=SYS forces it.
no-gpudirect-rdma.disabled warning
  do Run modprobe nvidia-peermem, or use a driver and a kernel that have DMA-BUF.
no-gpudirect-rdma.plugin note
  do Nothing, if this kind of GPU does without; else update driver, CUDA and plugin.
virtual-interface error
  so Other hosts cannot reach its address: the start hangs, or takes a slow way round.
  do {choice} to the interface between the hosts, which ip route get ADDRESS names.
shm-where-p2p-was-possible warning
  so They reach a part of the bandwidth that the GPUs have among themselves.
  do Let every rank see all GPUs of its host, and give containers of one host the same
     IPC namespace (--ipc=host); on bare metal turn off ACS and the IOMMU.
p2p-refused warning
  so Data between them goes through the host's memory.
  do Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; nvidia-smi topo
     -p2p n shows the pairs.
few-channels error
  so Bandwidth is that of one path: tens instead of hundreds of GB/s.
  do Compare the GPUs in nvidia-smi nvlink -s; with NCCL_TOPO_DUMP_FILE=topo.xml set,
     ronde topo lint topo.xml shows more.
nvls-lost warning
  so AllReduce inside a node is limited to rings; with NVLS, eight GPUs reach up to 1.56
     times that.
  do Look at the fabric manager (systemctl status nvidia-fabricmanager, nvidia-smi -q),
     and give a VM or container all GPUs of the switch.
slow-pci warning
  so All that {name} moves over PCI is limited to that.
  do In lspci -vv -s {below}, LnkSta must be as wide and as fast as LnkCap: reseat the
     card or the riser, or set the slot's speed in the BIOS.
slow-pci.virtual error
  do In a virtual machine name a file with the host's real speeds in NCCL_TOPO_FILE, or
     give the virtual root port x-speed and x-width; on bare metal reseat the card: see
     lspci -vv -s {below}.
versions-differ error
  so The start fails, or ranks choose differently and hang.
  do Use one image and one driver on all hosts; torch brings its own NCCL, which
     LD_LIBRARY_PATH may hide.
versions-differ.driver warning
  so What one driver supports and another does not is lost for all.
settings-differ warning
  so Ranks may choose differently, which hangs or slows down.
  do Set it alike for all ranks, or for none.
settings-differ.absent note
  so Ranks may choose differently, if it is not set here.
  do See that the launcher passes it to all hosts.
nodes-unlike-hosts error
  so It takes ranks of different hosts for neighbours, and cannot connect them.
  do Give every host a name of its own, or NCCL_HOSTID.
nodes-unlike-hosts.many warning
  so It takes neighbours for strangers: data inside a host goes over the network.
  do Give a host's containers one name and one boot id, or its name as NCCL_HOSTID.
init-incomplete error
  so The job hangs or has ended in its start, unless the log was cut.
  do Look at ranks that are not in the log and at warnings first; then whether the hosts
     reach each other on the bootstrap interface.
ranks-not-in-log note
  so The findings hold for these alone.
  do Set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=nccl.%h.%p for all ranks; give all files.
slow-init note
  so Every start and restart of the job waits so long.
  do The others wait for the rank that came last. Bootstrap: see what ranks do before,
     and NCCL_SOCKET_IFNAME. Kernels: have the image on a local disk, and set
     CUDA_MODULE_LOADING=LAZY.
log-incomplete note
  so Their content is missing here.
  do Let every rank write a file of its own: NCCL_DEBUG_FILE=nccl.%h.%p.
"""
# The same of lines that NCCL itself marks as warnings, with a pattern behind; the first
# that fits counts. What comes of most is the same.
_SO = "The job does not start, or ends."
_WARNING_TEXTS = r"""
warned-shared-memory error shared memory|/dev/shm|posix_fallocate|shm_open
  do Give containers more shared memory: --shm-size=1g --ulimit memlock=-1; in
     Kubernetes an emptyDir with medium Memory at /dev/shm.
warned-locked-memory error ibv_reg_mr|ibv_\w+ failed.*cannot allocate memory
  do Set the limit of locked memory (ulimit -l) to unlimited where the ranks start:
     limits.conf, the launcher's service, or --ulimit memlock=-1.
warned-peer-unreachable error got completion .*(status|error)[ =](\w+\()?12\b
  so The peer did not answer: the job ends.
  do See whether the peer had ended before; else check cables, the switch (ibdiagnet),
     on RoCE NCCL_IB_GID_INDEX, and raise NCCL_IB_TIMEOUT.
warned-adapter-error error got completion .*(status|error)(?![ =](\w+\()?5\b)
  do Turn off ACS (GPUDirect needs that on bare metal); NCCL_NET_GDR_LEVEL=LOC shows
     whether it is GPUDirect.
warned-link-event warning async (fatal )?event|speed change|GID table changed
  so A port of the network changed while the job ran.
  do Look at the port's errors and cable: ibstat, mlxlink, dmesg.
warned-no-libibverbs note failed to open libibverbs
  so No InfiniBand and no RoCE is used, which is right where there is none.
  do Where there is, install libibverbs (package rdma-core).
warned-host-setting warning numa auto balancing|iommu=(pt|on)|HSA_FORCE_FINE_GRAIN_PCIE
  so Transfers may be slow, vary, fail or hang.
  do Set what it names: sysctl kernel.numa_balancing=0, kernel options, or a variable.
warned-adapter-call error call to ibv_|NET/IB : unable to open
  do ibv_devinfo must show the port as ACTIVE; on RoCE set NCCL_IB_GID_INDEX to what
     show_gids shows (often 3).
warned-no-interface error no (socket |usable listening |ip )?interface found
  do NCCL_SOCKET_IFNAME must name an interface that has an address: see ip address.
warned-gpu-shared error duplicate gpu|multiple ranks are using the same gpu
  do Give each rank its own GPU: set the device by local rank before any collective.
warned-versions error mismatched nccl version|nccl version mismatch
    |wrong type \d+ != \d+
  do Use one image on all hosts: the ranks have different versions of NCCL, or another
     program uses the port.
warned-fabric-manager error cuda failure 802\b|system not yet initialized
  do Start nvidia-fabricmanager (systemctl status nvidia-fabricmanager); its version
     must be the driver's.
warned-imex error imex
  do nvidia-imex-ctl -N must show all nodes of the domain as up, and containers need an
     IMEX channel; NCCL_MNNVL_ENABLE=0 does without.
warned-driver error driver/library version mismatch|cuda driver (version found|<)
    |driver version is insufficient
  do Use a driver that is new enough for CUDA; after an update, reload it or reboot.
warned-peer-access error failed to peer with|peer access|p2p is disabled between nvlink
  so GPUs cannot reach each other's memory: the job does not start.
  do Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; check NVLinks
     (nvidia-smi nvlink -s). NCCL_P2P_DISABLE=1 avoids it at a loss.
warned-gpu-memory error cuda failure.*out of memory|cuda failure 2\b
  do Free memory on the GPU: NCCL needs some beside the model; nvidia-smi shows
     processes that are left over.
warned-cuda error cuda failure
  do An earlier kernel may be to blame: repeat with CUDA_LAUNCH_BLOCKING=1; look for Xid
     in dmesg.
warned-calls-differ error message truncated|collective mismatch
  do Ranks call different collectives, or with different sizes: compare the programs'
     calls, or run with TORCH_DISTRIBUTED_DEBUG=DETAIL.
warned-ranks-mixed error already checked in|bootstrap root : mismatch
  do Two processes have the same rank, or two jobs one address: end older jobs.
warned-no-transport error no transport found|mixed local \w+ device counts
  do See that no host lacks a network adapter (ibstat), and that NCCL_P2P_DISABLE,
     NCCL_SHM_DISABLE, NCCL_NET and NCCL_IB_HCA do not forbid all there is.
warned-connection error connection (refused|reset|timed out|closed)|closed by remote
    |no route to|connect to .* failed|timed? ?out|network is unreachable
    |exceeded (error retry count|retries)
  so A rank could not be reached, or has gone: the job ends.
  do Look at the rank that ended first; at the start see that no firewall is between the
     hosts and that NCCL_SOCKET_IFNAME fits.
warned-follows warning ^\[(proxy|service) |ncclproxy\w+ .*failed|in abort state
    |got completion
  so It follows from an error before it, mostly of another rank.
  do Look for the first warning of the job.
warned-topology error xml|topology|could not find (any local path|cpu close)
    |too many .*nodes
  do Check the file that NCCL_TOPO_FILE names: ronde topo lint FILE.
warned warning .?
  so The log does not show what follows from it.
  do Look at the next lines of the same rank, and for these words in NCCL's issues.
"""


def _read(table: str) -> Iterator[tuple[str, str, tuple[Level, str, str]]]:
    """Yield of each entry its rule, its pattern, and severity, consequence, remedy."""
    bases: dict[str, dict[str, str]] = {}
    joined = re.sub(r"\n +\|", "|", re.sub(r"\n {5}", " ", table.strip()))
    for entry in re.split(r"\n(?=\w)", joined):
        head, *lines = entry.split("\n")
        rule, severity, pattern = [*head.split(" ", 2), ""][:3]
        own = {line[2:4]: line[5:] for line in lines}
        base = bases.setdefault(rule.partition(".")[0], own)
        texts = {"so": _SO} | base | own
        yield rule, pattern, (Level(severity), texts["so"], texts["do"])


_KNOWN = list(_read(_WARNING_TEXTS))
_WARNINGS = [(re.compile(pattern, re.IGNORECASE), rule) for rule, pattern, _ in _KNOWN]
VERDICTS = {rule: verdict for rule, _, verdict in (*_read(_RULE_TEXTS), *_KNOWN)}
"""By rule, with the word for its text where it has several."""

_named = partial(list_first, most=3)
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
    if lost := log.num_lost:
        # What is found by a missing line is in doubt.
        lines = "1 line was" if lost == 1 else f"{lost} lines were"
        for place, each in enumerate(found):
            if each.rule == "init-incomplete":
                what = f"{each.what} {lines} lost where the log broke."
                found[place] = each._replace(severity=Level.WARNING, what=what)
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
        _named(places),
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
    settings = _values(job.settings)
    return next((s for n in names for s in settings if s.startswith(f"{n}=")), "")


def _unset(job: NcclJob, why: str, *names: str) -> str:
    """Return the advice to unset the first of these settings that is there, if any."""
    choice = _setting_of(job, *names)
    return f"Unset {choice.partition('=')[0]}, which {why}: {choice}." if choice else ""


def _values(reported: Iterable[Reported]) -> list[str]:
    return [each.value for each in reported]


def _hosts(found: Iterable[Reported | EdgesSeen]) -> list[str]:
    return sorted({host for each in found for host in each.hosts})


def _by_host(reported: Iterable[Reported]) -> str:
    """Return values with their hosts: ``IB on a, b; Socket on c``."""
    return "; ".join(f"{each.value} on {_named(each.hosts)}" for each in reported)


def _sockets_used(job: NcclJob) -> Iterator[Diagnostic]:
    """Find data that goes over TCP where an adapter with RDMA is, or may be."""
    hosts = _hosts(each for each in job.networks if each.value == "Socket")
    hosts += _hosts(e for e in job.edges if e.transport.startswith("NET/Socket"))
    hosts = sorted(set(hosts))
    if not hosts or not _spans_nodes(job):
        return
    searched = [value for value in _values(job.candidates) if value.startswith("IB")]
    adapters = [v.split(" ", 1)[1] for v in searched if not v.endswith(" none")]
    bans = ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket")
    ban = next((each for each in bans if each in _values(job.settings)), "")
    key, remedy = "sockets-between-nodes", ""
    if adapters:
        key = "sockets-despite-infiniband"
        seen = f"though NCCL found the adapters {_named(adapters)}"
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


def _ranks_differ(job: NcclJob) -> Iterator[Diagnostic]:
    networks = job.networks if _spans_nodes(job) else ()
    for key, what, found in (
        ("networks-differ", "Ranks of one job chose different networks", networks),
        ("versions-differ", "Ranks have different versions of NCCL", job.versions),
        (
            "versions-differ.driver",
            "Ranks have different versions of the CUDA driver",
            job.drivers,
        ),
    ):
        if len(found) > 1:
            yield _verdict(key, _hosts(found), f"{what}: {_by_host(found)}.")


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


def _no_gpudirect(job: NcclJob) -> Iterator[Diagnostic]:
    """Find data that goes through the hosts' memory between GPU and adapter."""
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
    what = f"{which} connections between nodes do without GPUDirect RDMA"
    key = "no-gpudirect-rdma"
    remedy = _unset(job, "may forbid it", "NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE")
    if disabled:
        what += f"; it is disabled for {_named(disabled)}"
        key = "no-gpudirect-rdma.disabled"
    # Instances with small GPUs have none, and their plugin knows it.
    known = [v for v in _values(job.plugins) if "disabling GDR" in v]
    if known:
        what += f"; the plugin reports: {known[0].removeprefix('NET/OFI ')}"
        key, remedy = "no-gpudirect-rdma.plugin", ""
    yield _verdict(key, _hosts(staged or job.gdr), f"{what}.", do=remedy)


def _virtual_interfaces(job: NcclJob) -> Iterator[Diagnostic]:
    """Find interfaces of containers and of the host itself that carry traffic."""
    used = [("ranks meet on", each) for each in job.bootstrap]
    if "Socket" in _values(job.networks):
        used += [("data goes over", each) for each in job.candidates]
    choice = _setting_of(job, "NCCL_SOCKET_IFNAME")
    change = f"Change {choice}" if choice else "Set NCCL_SOCKET_IFNAME"
    for use, each in used:
        name = each.value.removeprefix("Socket ")
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
    do = _unset(job, "forbids it", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    key = "shm-where-p2p-was-possible"
    yield _verdict(key, _hosts(staged), what, level=severity, do=do)


def _peers_refused(job: NcclJob) -> Iterator[Diagnostic]:
    if job.p2p:
        what = f"The driver refuses GPUs each other's memory: {job.p2p[0].value}."
        yield _verdict("p2p-refused", _hosts(job.p2p), what)


def _has_nvlink(job: NcclJob, targets: tuple[str, ...], gb_per_s: float) -> bool:
    links = [link for link in job.trees if link.target.startswith(targets)]
    return any(link.kind == "NVL" and link.gb_per_s >= gb_per_s for link in links)


def _few_channels(job: NcclJob) -> Iterator[Diagnostic]:
    """Find communicators that NCCL found next to no ways for, though there is NVLink.

    Where each node has one rank, two channels are what there is to one adapter.
    """
    # Multicast is in switches alone, and these have links enough.
    has_much = _has_nvlink(job, (*_GPUS, "NVS/"), _MUCH_NVLINK_GB_PER_S) or any(
        value.startswith("available") for value in _values(job.nvls)
    )
    limits = "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS"
    do = _unset(job, "limits them", *limits)
    for comm in job.communicators if has_much else ():
        num_nodes = comm.num_nodes if comm.num_nodes > 0 else len(comm.hosts)
        count = max((each.coll for each in comm.channels), default=_FEW_CHANNELS + 1)
        if count <= _FEW_CHANNELS and max(comm.num_ranks, len(comm.ranks)) > num_nodes:
            what = (
                f"A communicator of {comm.num_ranks} ranks has {count} "
                f"channel{'s'[: count - 1]}, though the GPUs have NVLink."
            )
            yield _verdict("few-channels", comm.hosts, what, do=do)
            return


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
            f"device {_named(devices)}."
        )
    elif absent and _has_nvlink(job, ("NVS/",), _MULTICAST_GB_PER_S):
        what = "The GPUs' NVLinks lead to switches, but these do not reduce (no NVLS)."
    else:
        return
    choice = _setting_of(job, "NCCL_NVLS_ENABLE")
    level, do = ("note", f"Unset {choice}.") if choice.endswith("=0") else ("", "")
    yield _verdict("nvls-lost", _hosts(lost or absent), what, level=level, do=do)


def _slow_pci(job: NcclJob) -> Iterator[Diagnostic]:
    """Find GPUs and adapters behind a PCI link that is narrower than it should be."""
    links: defaultdict[str, list[TreeLink]] = defaultdict(list)
    for link in job.trees:
        for host in link.hosts:
            links[host].append(link)
    # What is so on many hosts is reported once.
    hosts: defaultdict[tuple[str, TreeLink, float], list[str]] = defaultdict(list)
    for host in sorted(links):
        for narrow in _narrow_ones(links[host]):
            hosts[narrow].append(host)
    for (name, link, should), where in hosts.items():
        has, below = link.gb_per_s, _bus_address(link.target)
        rates = f"{has:.1f} GB/s" + (f" instead of {should:.1f}" if should else "")
        what = f"The PCI link above {below} carries {rates} by NCCL's count."
        key = "slow-pci.virtual" if has < _LEAST_REAL_GB_PER_S else "slow-pci"
        level = "error" if has <= _TINY_PCI_GB_PER_S else "warning"
        places = [f"{name} on {_named(where)}"]
        verdict = _verdict(key, places, what, level=level, name=name, below=below)
        yield verdict._replace(has_gb_per_s=has, should_gb_per_s=should)


def _narrow_ones(links: Sequence[TreeLink]) -> Iterator[tuple[str, TreeLink, float]]:
    """Yield what is behind too narrow a link on one host.

    That is its name, the link, and the GB/s that it should have; 0 if unknown.
    """
    above = {link.target: link for link in links if link.kind == "PCI"}

    def narrowest(name: str) -> TreeLink:
        chain = {name: above[name]}
        while (upper := above.get(above[name].source)) and upper.target not in chain:
            name = upper.target
            chain[name] = upper
        return min(chain.values(), key=lambda link: link.gb_per_s)

    # A GPU in one package with its processor leaves the bus aside.
    packaged = {link.source for link in links if link.kind == "C2C"}
    gpus = {
        name: narrowest(name)
        for name in above
        if name.startswith(_GPUS) and name not in packaged
    }
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
    """Return 0000:1b:00.0 for NCCL's ``GPU/0-1b000``, as sysfs and lspci write it."""
    digits = name.rpartition("/")[2].rpartition("-")[2].lower().zfill(9)
    return f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}"


def _nodes_unlike_hosts(job: NcclJob) -> Iterator[Diagnostic]:
    """Find a communicator whose nodes NCCL counts differently from the log's hosts."""
    for comm in job.communicators:
        num_hosts = len(comm.hosts)
        is_whole = len(comm.ranks) == comm.num_ranks
        if comm.is_mnnvl or not is_whole or comm.num_nodes in (UNKNOWN, num_hosts):
            continue
        what = (
            f"NCCL counts {comm.num_nodes} as the number of nodes of {comm.num_ranks} "
            f"ranks, and the log names {num_hosts} as hosts."
        )
        key = "nodes-unlike-hosts" + ".many" * (comm.num_nodes > num_hosts)
        yield _verdict(key, comm.hosts, what)
        return


def _init_incomplete(job: NcclJob) -> Iterator[Diagnostic]:
    """Find ranks whose start began and is not reported as complete."""
    for comm in job.communicators:
        # How long the start took is reported at its end.
        waiting = [
            f"rank {rank.rank} on {rank.host}"
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
            where, peers = _hosts(job.retries), _values(job.retries)
            what += f"; on {_named(where)} they try to connect: {_named(peers)}"
        yield _verdict("init-incomplete", waiting, f"{what}.")
        return


def _ranks_not_in_log(job: NcclJob) -> Iterator[Diagnostic]:
    for comm in job.communicators[:1]:
        if 0 < len(comm.ranks) < comm.num_ranks:
            what = f"{len(comm.ranks)} of {comm.num_ranks} ranks are in the log."
            yield _verdict("ranks-not-in-log", job.hosts, what)


def _slow_init(job: NcclJob) -> Iterator[Diagnostic]:
    ranks = [(rank, comm) for comm in job.communicators for rank in comm.ranks]
    for rank, comm in sorted(ranks, key=lambda pair: -pair[0].init_s)[:1]:
        if rank.init_s > _SLOW_INIT_S:
            what = f"The start of {comm.num_ranks} ranks took {rank.init_s:.1f} s"
            for phase, phase_s in rank.init_phases[:1]:
                what += f", of which {phase} {phase_s:.1f} s"
            yield _verdict(
                "slow-init", [f"rank {rank.rank} on {rank.host}"], f"{what}."
            )


def _warnings(job: NcclJob) -> Iterator[Diagnostic]:
    """Yield NCCL's own warnings, with what is known of them."""
    for text, place, num_times, hosts in job.warnings:
        # That is reported with what else shows it.
        if not text.startswith("Failed to bind NVLink SHARP"):
            rule = next(rule for pattern, rule in _WARNINGS if pattern.search(text))
            is_long = len(text) > _MAX_WARNING
            shown = f"{text[: _MAX_WARNING - 3]}..." if is_long else text
            times = "once" if num_times == 1 else f"{num_times} times"
            where = f" ({place})" if place else ""
            yield _verdict(rule, hosts, f"NCCL reports {times}: {shown}{where}")


_RULES = (
    _sockets_used,
    _libfabric_over_tcp,
    _ranks_differ,
    _settings_differ,
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
    _warnings,
)
