"""What looks wrong inside the nodes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.topology.findings import Finding, Severity
from ronde.topology.nccl_log.log import Job, TreeLink
from ronde.topology.nccl_log.verdicts.evidence import (
    all_hosts,
    bus_address,
    direct_links,
    has_much_nvlink,
    has_near_gpus,
    has_neighbours,
    has_nvswitch,
    hosts_of,
    is_gpu,
    may_have_far_gpus,
    name_some,
    setting_of,
    values,
)

_FEW_CHANNELS = 2
_TINY_PCI_GB_PER_S = 3.0
# What virtual machines tell that pass nothing of the real link on.
_LEAST_REAL_GB_PER_S = 1.0
# Eighteen links of Hopper's kind; Ampere's twelve have no multicast.
_MULTICAST_GB_PER_S = 340.0
# PCIe 3 x16 is 12 by NCCL's count and 15.75 by the standard, and so with later ones.
_PCI_LIMIT_OF_NCCL_COUNT = 15.75 / 12
_CHANNEL_LIMITS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")


class _Narrow(NamedTuple):
    """A GPU or port behind a PCI link that is narrower than it should be.

    Attributes:
        name: The GPU or adapter, with its bus address.
        below: Bus address of what hangs below the link.
        gb_per_s: What the link carries by NCCL's count.
        should_gb_per_s: What it should; 0 where that does not follow.
    """

    name: str
    below: str
    gb_per_s: float
    should_gb_per_s: float


def shared_memory_used(job: Job) -> Iterator[Finding]:
    """Find GPUs that pass data through the host's memory and need not."""
    staged = [edges for edges in job.edges if edges.transport.startswith("SHM/")]
    direct = [edges for edges in job.edges if edges.transport.startswith("P2P/")]
    reason = _why_peers(job, has_direct=bool(direct))
    if not staged or not reason:
        return
    num_edges = sum(edges.num_edges for edges in staged)
    first, second = staged[0].example
    yield Finding(
        rule="shm-where-p2p-was-possible",
        severity=_how_bad(job, has_direct=bool(direct)),
        element=name_some(sorted({host for e in staged for host in e.hosts})),
        what=f"{num_edges} connections inside nodes, such as rank {first} to rank "
        f"{second}, go through the host's memory, though {reason}.",
        consequence="They reach a part of the bandwidth that the GPUs have among "
        "themselves.",
        remedy=_allow_peers(job),
    )


def peers_refused(job: Job) -> Iterator[Finding]:
    """Find GPUs that may not reach each other's memory."""
    if not job.p2p:
        return
    yield Finding(
        rule="p2p-refused",
        severity=Severity.WARNING,
        element=name_some(all_hosts(job.p2p)),
        what=f"The driver refuses GPUs each other's memory: {job.p2p[0].value}.",
        consequence="Data between them goes through the host's memory.",
        remedy="Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; "
        "nvidia-smi topo -p2p n shows the pairs.",
    )


def few_channels(job: Job) -> Iterator[Finding]:
    """Find communicators that NCCL found next to no ways for.

    Where each node has one rank, two channels are what there is to one adapter.
    """
    poor = [
        comm
        for comm in job.communicators
        if comm.channels
        and comm.num_ranks != 1
        and max(each.coll for each in comm.channels) <= _FEW_CHANNELS
        and has_neighbours(comm) is not False
    ]
    if not poor:
        return
    worst = next((comm for comm in poor if has_neighbours(comm)), poor[0])
    count = max(each.coll for each in worst.channels)
    is_fast = bool(has_neighbours(worst)) and has_much_nvlink(job)
    limit = setting_of(job, *_CHANNEL_LIMITS)
    yield Finding(
        rule="few-channels",
        severity=Severity.ERROR if is_fast else Severity.NOTE,
        element=name_some(sorted(hosts_of(worst) or job.hosts)),
        what=f"A communicator of {worst.num_ranks or 'some'} ranks has {count} "
        f"channel{'' if count == 1 else 's'}"
        f"{', though the GPUs have NVLink' if is_fast else ''}.",
        consequence="Bandwidth is that of one path: tens instead of hundreds of GB/s."
        if is_fast
        else "Right for GPUs that PCI alone connects; far too little for others.",
        remedy=f"Unset {limit.partition('=')[0]}, which limits them: {limit}."
        if limit
        else "Compare the NVLinks of the GPUs: nvidia-smi nvlink -s; with "
        "NCCL_TOPO_DUMP_FILE=topo.xml set, ronde topo lint topo.xml tells more.",
    )


def nvls_lost(job: Job) -> Iterator[Finding]:
    """Find reductions in the NVLink switches that were there and are not used."""
    lost = [said for said in job.nvls if said.value.startswith("lost: ")]
    absent = [said for said in job.nvls if said.value.startswith("not available")]
    found = [said for said in job.nvls if said.value.startswith("available")]
    if lost:
        error = lost[0].value.removeprefix("lost: ")
        what = f"Reduction in the NVLink switches (NVLS) was given up: {error}."
    elif absent and found:
        devices = [each.rpartition(" ")[2] for each in values(absent)]
        what = (
            "Reduction in the NVLink switches (NVLS) is there on some GPUs and not on "
            f"device {name_some(devices)}."
        )
    elif absent and _has_multicast_links(job):
        what = "The GPUs' NVLinks lead to switches, but these do not reduce (no NVLS)."
    else:
        return
    choice = setting_of(job, "NCCL_NVLS_ENABLE")
    yield Finding(
        rule="nvls-lost",
        severity=Severity.NOTE if choice.endswith("=0") else Severity.WARNING,
        element=name_some(all_hosts(lost or absent)),
        what=what,
        consequence="AllReduce inside a node is limited to what rings reach; on eight "
        "GPUs NVLS reaches up to 1.56 times that.",
        remedy=f"Unset {choice}."
        if choice.endswith("=0")
        else "Look at the fabric manager (systemctl status nvidia-fabricmanager, "
        "nvidia-smi -q), and give a VM or container all GPUs of the switch.",
    )


def fabric_not_ready(job: Job) -> Iterator[Finding]:
    """Find NVLink fabrics whose start is not over."""
    words = {"state 1": "not started", "state 2": "still starting"}
    waiting = [said for said in job.mnnvl if said.value[:7] in words]
    if waiting:
        yield Finding(
            rule="fabric-not-ready",
            severity=Severity.WARNING,
            element=name_some(all_hosts(waiting)),
            what=f"The NVLink fabric of some GPUs is {words[waiting[0].value[:7]]}.",
            consequence="NVLink between them is not used, or fails.",
            remedy="Wait for or restart nvidia-fabricmanager; nvidia-smi -q shows "
            "the fabric's state.",
        )


def slow_pci(job: Job) -> Iterator[Finding]:
    """Find GPUs and adapters behind a PCI link that is narrower than it should be."""
    links: defaultdict[str, list[TreeLink]] = defaultdict(list)
    for link in job.trees:
        for host in link.hosts:
            links[host].append(link)
    # What is so on many hosts is told once.
    hosts: dict[_Narrow, list[str]] = {}
    for host in sorted(links):
        for narrow in _narrow_ones(links[host]):
            hosts.setdefault(narrow, []).append(host)
    for narrow, where in hosts.items():
        yield _slow(narrow, where)


def _narrow_ones(links: Sequence[TreeLink]) -> Iterator[_Narrow]:
    """Yield what is behind too narrow a link on one host."""
    above = {link.target: link for link in links if link.kind == "PCI"}
    # A GPU in one package with its processor leaves the bus aside.
    packaged = {link.source for link in links if link.kind == "C2C"}
    gpus = {
        name: _narrowest(above, name)
        for name in above
        if is_gpu(name) and name not in packaged
    }
    best = max((link.gb_per_s for link in gpus.values()), default=0.0)
    for name, link in gpus.items():
        if link.gb_per_s < best or link.gb_per_s <= _TINY_PCI_GB_PER_S:
            should = best if best > link.gb_per_s else 0.0
            gpu, below = f"GPU {bus_address(name)}", bus_address(link.target)
            yield _Narrow(gpu, below, link.gb_per_s, should)
    for port in links:
        nic = _narrowest(above, port.source) if port.source in above else None
        if nic and port.kind == "NET":
            limit = nic.gb_per_s * _PCI_LIMIT_OF_NCCL_COUNT
            if limit < port.port_gb_per_s:
                adapter = f"adapter {bus_address(port.source)}"
                below, should = bus_address(nic.target), port.port_gb_per_s
                yield _Narrow(adapter, below, nic.gb_per_s, should)


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


def _slow(narrow: _Narrow, hosts: Sequence[str]) -> Finding:
    name, below, gb_per_s, should_gb_per_s = narrow
    is_tiny = gb_per_s <= _TINY_PCI_GB_PER_S
    should = f" instead of {should_gb_per_s:.1f}" if should_gb_per_s else ""
    return Finding(
        rule="slow-pci",
        severity=Severity.ERROR if is_tiny else Severity.WARNING,
        element=f"{name} on {name_some(hosts)}",
        what=f"The PCI link above {below} carries {gb_per_s:.1f} GB/s"
        f"{should} by NCCL's count.",
        consequence=f"All that {name} moves over PCI is limited to "
        f"{gb_per_s:.1f} GB/s.",
        remedy=_widen(below, gb_per_s),
        has_gb_per_s=gb_per_s,
        should_gb_per_s=should_gb_per_s,
    )


def _widen(below: str, gb_per_s: float) -> str:
    if gb_per_s < _LEAST_REAL_GB_PER_S:
        return (
            "In a virtual machine name a file with the host's real speeds in "
            "NCCL_TOPO_FILE, or give the virtual root port x-speed and x-width; on "
            f"bare metal reseat the card: see lspci -vv -s {below}."
        )
    return (
        f"Compare with lspci -vv -s {below} there: LnkSta must be as wide and as fast "
        "as LnkCap; reseat the card or the riser, or set the slot's speed in the BIOS."
    )


def _why_peers(job: Job, *, has_direct: bool) -> str:
    """Return what shows that GPUs could reach each other's memory, if anything."""
    if links := direct_links(job):
        return f"NCCL found {links}"
    if has_near_gpus(job):
        return "NCCL found GPUs below one PCI switch"
    return "other GPUs reach each other's memory" if has_direct else ""


def _how_bad(job: Job, *, has_direct: bool) -> Severity:
    if direct_links(job) and (has_nvswitch(job) or not has_direct):
        return Severity.ERROR
    # Of GPUs at different processors it is right, and some others do without.
    is_usual = has_direct and may_have_far_gpus(job)
    return Severity.NOTE if is_usual else Severity.WARNING


def _allow_peers(job: Job) -> str:
    choice = setting_of(job, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    if choice:
        return f"Unset {choice.partition('=')[0]}, which forbids it: {choice}."
    return (
        "Let every rank see all GPUs of its host, and give containers of one host the "
        "same IPC namespace (--ipc=host); on bare metal turn off ACS and the IOMMU."
    )


def _has_multicast_links(job: Job) -> bool:
    return any(
        link.kind == "NVL"
        and link.target.startswith("NVS/")
        and link.gb_per_s >= _MULTICAST_GB_PER_S
        for link in job.trees
    )
