"""What looks wrong between the nodes."""

import re
from collections.abc import Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.nccl_log.log import Job, Said
from ronde.topology.nccl_log.verdicts.evidence import (
    all_hosts,
    name_some,
    setting_of,
    spans_nodes,
    tell_apart,
    values,
)

_VIRTUAL = re.compile(
    r"docker\d|veth|lo\d?$|virbr|br-|cni|flannel|cali|tunl|vxlan|kube-|lxc|lxd|podman"
)
# Providers of libfabric's that drive no adapter.
_BY_TCP = re.compile(r"Libfabric ((?:tcp|sockets|udp|net)(?:;\S+)?) ")
_LOST = "most of its bandwidth is lost, and each message waits longer."


def sockets_used(job: Job) -> Iterator[Finding]:
    """Find data that goes over TCP where an adapter with RDMA is, or may be."""
    chosen = {h for each in job.networks if each.value == "Socket" for h in each.hosts}
    edges = [each for each in job.edges if each.transport.startswith("NET/Socket")]
    hosts = chosen | {host for each in edges for host in each.hosts}
    if not hosts or not spans_nodes(job):
        return
    adapters = _adapters(job)
    found = f"though NCCL found the adapters {name_some(adapters)}"
    seen = found if adapters else _search(job)
    yield Finding(
        rule="sockets-despite-infiniband" if adapters else "sockets-between-nodes",
        severity=Severity.ERROR if adapters else Severity.WARNING,
        element=name_some(sorted(hosts)),
        what=f"Data between nodes goes over TCP sockets, {seen}.",
        consequence=("Of each adapter " if adapters else "Of an adapter that is there ")
        + _LOST,
        remedy=_unset(job) or _find_adapter(job, is_found=bool(adapters)),
    )


def libfabric_over_tcp(job: Job) -> Iterator[Finding]:
    """Find the plugin for libfabric where it drives no adapter."""
    for said in job.candidates:
        if (match := _BY_TCP.match(said.value)) and spans_nodes(job):
            yield Finding(
                rule="libfabric-over-tcp",
                severity=Severity.WARNING,
                element=name_some(said.hosts),
                what=f"libfabric carries the data with its provider {match[1]}, not "
                "with that of an adapter (efa, cxi, verbs, psm3, opx).",
                consequence=f"Of an adapter that is there {_LOST}",
                remedy="Look with fi_info where the ranks run which providers there "
                "are; a container needs the adapter's devices and its libfabric.",
            )


def networks_differ(job: Job) -> Iterator[Finding]:
    """Find hosts of one job that chose different networks."""
    if len(job.networks) > 1 and spans_nodes(job):
        yield Finding(
            rule="networks-differ",
            severity=Severity.ERROR,
            element=name_some(all_hosts(job.networks)),
            what=f"Ranks of one job chose different networks: "
            f"{tell_apart(job.networks)}.",
            consequence="They cannot connect to each other: the job hangs or ends.",
            remedy="Make adapters, drivers and the image alike on all hosts, or set "
            "NCCL_NET for all ranks.",
        )


def no_gpudirect(job: Job) -> Iterator[Finding]:
    """Find data that goes through the hosts' memory between GPU and adapter."""
    if not spans_nodes(job):
        return
    edges = [e for e in job.edges if e.transport.startswith("NET/")]
    fast = [e for e in edges if not e.transport.startswith("NET/Socket")]
    staged = [e for e in fast if "/GDRDMA" not in e.transport]
    disabled = _disabled(job)
    if not staged and (fast or not disabled):
        return
    num_staged, num_all = (sum(e.num_edges for e in es) for es in (staged, fast))
    seen = (
        f"{num_staged} of {num_all} connections between nodes"
        if staged
        else "NCCL's connections between nodes"
    )
    why = f"; it is disabled for {name_some(disabled)}" if disabled else ""
    plugin = _refusal_of_plugin(job)
    hosts = {host for e in staged for host in e.hosts} or set(all_hosts(job.gdr))
    yield Finding(
        rule="no-gpudirect-rdma",
        # Instances with small GPUs have none, and their plugin knows it.
        severity=Severity.NOTE if plugin else Severity.WARNING,
        element=name_some(sorted(hosts)),
        what=f"{seen} do without GPUDirect RDMA{why}{plugin}.",
        consequence="Data between GPU and adapter goes through the host's memory, "
        "which costs bandwidth and time.",
        remedy="Nothing, where the GPU's kind does without; else renew driver, CUDA "
        "and plugin, for these do not fit together."
        if plugin
        else _enable_gpudirect(job, is_disabled=bool(disabled)),
    )


def virtual_interfaces(job: Job) -> Iterator[Finding]:
    """Find interfaces of containers and of the host itself that carry traffic."""
    if len(job.hosts) < 2:
        return
    used = [("ranks meet on", said) for said in job.bootstrap]
    if "Socket" in values(job.networks):
        used += [
            ("data goes over", said._replace(value=said.value.removeprefix("Socket ")))
            for said in job.candidates
            if said.value.startswith("Socket ")
        ]
    for use, said in used:
        if _VIRTUAL.match(said.value):
            yield _virtual(job, use, said)


def _virtual(job: Job, use: str, said: Said) -> Finding:
    choice = setting_of(job, "NCCL_SOCKET_IFNAME")
    change = f"Change {choice}" if choice else "Set NCCL_SOCKET_IFNAME"
    return Finding(
        rule="virtual-interface",
        severity=Severity.ERROR,
        element=name_some(said.hosts),
        what=f"Of a job on {len(job.hosts)} hosts, {use} {said.value}, an interface "
        "inside one host.",
        consequence="Other hosts do not reach its address: the start hangs, or goes "
        "a slow way round.",
        remedy=f"{change} to the interface between the hosts, which ip route get "
        "ADDRESS names.",
    )


def _adapters(job: Job) -> tuple[str, ...]:
    """Return the adapters with RDMA that NCCL found."""
    return tuple(
        said.value.split(" ", 1)[1]
        for said in job.candidates
        if said.value.startswith("IB") and not said.value.endswith(" none")
    )


def _is_searched(job: Job) -> bool:
    return any(value.startswith("IB") for value in values(job.candidates))


def _search(job: Job) -> str:
    if ban := _ban(job):
        return f"and {ban} keeps NCCL from InfiniBand and RoCE"
    if _is_searched(job):
        return "and NCCL found no InfiniBand or RoCE"
    return "and the log does not say whether NCCL looked for InfiniBand or RoCE"


def _ban(job: Job) -> str:
    """Return the setting that forbids the adapters, if one is there."""
    bans = ("NCCL_IB_DISABLE=1", "NCCL_NET=Socket")
    return next((each for each in bans if each in values(job.settings)), "")


def _unset(job: Job) -> str:
    ban = _ban(job)
    return f"Unset {ban.partition('=')[0]}." if ban else ""


def _find_adapter(job: Job, *, is_found: bool) -> str:
    if is_found:
        return "Set NCCL_NET=IB: NCCL then says why it cannot use them."
    if any("libibverbs" in plugin for plugin in values(job.plugins)):
        return "Install libibverbs (package rdma-core) where the ranks run."
    if not _is_searched(job):
        return "Set NCCL_DEBUG_SUBSYS=INIT,NET,ENV to see what is looked for."
    return (
        "Run ibv_devinfo where the ranks run: a container needs /dev/infiniband, and "
        "a cloud's own adapter its plugin for NCCL."
    )


def _refusal_of_plugin(job: Job) -> str:
    """Return why the network's plugin does without GPUDirect, if it says so."""
    for value in values(job.plugins):
        if value.startswith("NET/OFI") and "disabling GDR" in value:
            return f"; the plugin says: {value.removeprefix('NET/OFI ')}"
    return ""


def _disabled(job: Job) -> tuple[str, ...]:
    """Return the adapters in use without GPUDirect RDMA."""
    networks = values(job.networks)
    return tuple(
        value.removesuffix(" Disabled")
        for value in values(job.gdr)
        if value.endswith(" Disabled")
        and not value.startswith("Socket")
        and any(not networks or value.startswith(each) for each in networks or [""])
    )


def _enable_gpudirect(job: Job, *, is_disabled: bool) -> str:
    choice = setting_of(job, "NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE")
    if choice:
        return f"Look at {choice} in the environment, and unset it."
    if is_disabled:
        return (
            "Load the kernel's module: modprobe nvidia-peermem; or use a driver and a "
            "kernel that have DMA-BUF."
        )
    return (
        "See with ronde topo --matrix how far GPUs and adapters are apart: farther "
        "than PXB it is off, and NCCL_NET_GDR_LEVEL=SYS forces it."
    )
