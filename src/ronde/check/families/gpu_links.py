"""Whether GPUs are well connected: PCI, NVLink, peers, network adapters."""

from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import Value
from ronde.check.families.device_speeds import Device, DeviceTrouble, tell_devices
from ronde.check.families.gpu_troubles import FINE, Trouble, odd_gpus, tell
from ronde.check.fleet import Fleet
from ronde.topology.cpu_sets import format_list

LOADED_LINKS = "cluster.gpu_links_under_load"
"""Fact: by device, such as ``cuda:0``: its PCI link while it copied."""

_EXPECTED_LINKS = {"A100-SXM4": 12, "H100 80GB HBM3": 18, "GB200": 18, "GB300": 18}
"""By part of the model's name; those whose links the board joins, not a bridge."""

_PEER_OK, _PEER_UNKNOWN = 0, 6
_PEERS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "a setting of the driver forbids it",
    5: "it is not supported",
}

_judge_odd_width = odd_gpus(
    "gpu-pcie", Severity.FAIL, "gpu.pcie", lambda link: f"PCI link x{link['width']}"
)
_judge_odd_generation = odd_gpus(
    "gpu-pcie",
    Severity.WARN,
    "gpu.pcie",
    lambda link: f"PCI link of generation {link['max_generation']} at most",
)


def _judge_pcie(fleet: Fleet) -> Iterator[Finding]:
    narrow: set[str] = set()
    for facts in fleet.having("gpu.pcie", "gpu.is_virtual"):
        # Virtual machines do not see the slot, whose lanes may be fewer.
        is_virtual = facts.values["gpu.is_virtual"]
        severity = Severity.WARN if is_virtual else Severity.FAIL
        troubles = [_judge_width(link, severity) for link in facts.values["gpu.pcie"]]
        for finding in tell("gpu-pcie", facts, troubles):
            narrow.add(facts.host)
            yield finding
    # What is narrower than it could be is told once.
    yield from (each for each in _judge_odd_width(fleet) if each.host not in narrow)
    yield from _judge_odd_generation(fleet)


def _judge_width(link: Value, severity: Severity) -> Trouble:
    if link is None or not 0 < link["width"] < link["max_width"]:
        return FINE
    what = f"its PCI link has {link['width']} lanes of {link['max_width']}"
    return Trouble(severity, what)


def _judge_loaded(fleet: Fleet) -> Iterator[Finding]:
    """Tell of links that do not rise to what is possible though much is copied."""
    for facts in fleet.having(LOADED_LINKS):
        # As above; and without a word about it, it may be virtual.
        is_virtual = facts.values.get("gpu.is_virtual", True)
        severity = Severity.WARN if is_virtual else Severity.FAIL
        links = facts.values[LOADED_LINKS]
        low = [each["address"] for each in links.values() if _is_low(each)]
        fix = f"sudo lspci -vv -s {low[0]} | grep Lnk" if low else ""
        fix += ", and so on" * (len(low) > 1)
        troubles = [
            _judge_loaded_link(Device(facts.host, name, ""), link, severity, fix)
            for name, link in links.items()
            if link is not None and (_is_low(link) or "failure" in link)
        ]
        yield from tell_devices("gpu-pcie-load", troubles)


def _is_low(link: Value) -> bool:
    return (
        link is not None
        and "failure" not in link
        and (
            0 < link["width"] < link["max_width"]
            or 0 < link["generation"] < link["max_generation"]
        )
    )


def _judge_loaded_link(
    device: Device, link: Value, severity: Severity, fix: str
) -> DeviceTrouble:
    if "failure" in link:
        what = f"could not be told: {link['failure']}"
        return DeviceTrouble(device, Severity.INFORM, what)
    what = (
        f"used x{link['width']} of PCI generation {link['generation']} under load, "
        f"x{link['max_width']} of generation {link['max_generation']} is possible"
    )
    fix += "; seat the card or its riser anew; look at the slot in the BIOS"
    return DeviceTrouble(device, severity, what, fix=fix)


def _judge_nvlinks(fleet: Fleet) -> Iterator[Finding]:
    facts_of = ("gpu.nvlinks", "gpu.titles")
    for facts in fleet.having(*facts_of):
        links, titles = (facts.values[name] for name in facts_of)
        # Virtual machines with some of the GPUs may have no links at all.
        if any(any(each or ()) for each in links):
            pairs = zip(links, titles, strict=True)
            troubles = [_judge_links(each or (), str(title)) for each, title in pairs]
            yield from tell("gpu-nvlink", facts, troubles)


def _judge_links(links: Value, title: str) -> Trouble:
    num_active = sum(links)
    wanted = next((n for name, n in _EXPECTED_LINKS.items() if name in title), 0)
    if num_active >= wanted:
        return FINE
    inactive = format_list([n for n, is_active in enumerate(links) if not is_active])
    which = f", not {inactive}" if inactive else ""
    what = f"{num_active} of {wanted} NVLinks are active{which}"
    return Trouble(Severity.FAIL, what)


_judge_odd_nvlinks = odd_gpus(
    "gpu-nvlink-alike",
    Severity.FAIL,
    "gpu.nvlinks",
    # A card without a bridge is no fault.
    lambda links: f"{sum(links)} active NVLinks" if any(links) else "",
)


def _judge_peers(fleet: Fleet) -> Iterator[Finding]:
    """Tell of GPUs that both have NVLinks and cannot read each other's memory."""
    for facts in fleet.having("gpu.peers", "gpu.nvlinks"):
        linked = [any(links or ()) for links in facts.values["gpu.nvlinks"]]
        troubles: list[Trouble] = []
        for number, row in enumerate(facts.values["gpu.peers"]):
            statuses: list[int] = row or []
            bad = [
                (other, status)
                for other, status in enumerate(statuses)
                if status not in (_PEER_OK, _PEER_UNKNOWN)
                and linked[number]
                and linked[other]
            ]
            troubles.append(_name_peers(bad) if bad else FINE)
        yield from tell("gpu-peers", facts, troubles)


def _name_peers(bad: list[tuple[int, int]]) -> Trouble:
    why = _PEERS.get(bad[0][1], "the driver does not say why")
    others = format_list([other for other, _ in bad])
    return Trouble(Severity.WARN, f"no access to the memory of GPU {others}: {why}")


def _judge_direct_rdma(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having("gpu.direct_rdma", "gpu.count"):
        direct = facts.values["gpu.direct_rdma"]
        if facts.values["gpu.count"] and direct["adapters"] and not direct["way"]:
            what = f"{direct['adapters']} RDMA adapters cannot reach the GPUs' memory"
            yield Finding("gpu-direct-rdma", Severity.FAIL, facts.host, what)


def _judge_acs(fleet: Fleet) -> Iterator[Finding]:
    """Tell of bridges that send traffic between devices up, where there is any."""
    for facts in fleet.having("gpu.acs", "gpu.count", "gpu.direct_rdma"):
        bridges = facts.values["gpu.acs"]
        adapters = facts.values["gpu.direct_rdma"]["adapters"]
        if bridges and facts.values["gpu.count"] + adapters > 1:
            what = f"ACS is on in {len(bridges)} PCI bridges above GPUs"
            fix = f"sudo setpci -s {bridges[0]} ECAP_ACS+0x6.w=0000"
            fix += ", and so on, or switch ACS off in the BIOS" * (len(bridges) > 1)
            yield Finding("gpu-acs", Severity.WARN, facts.host, what, fix=fix)


CHECKS = (
    Check(
        id="gpu-pcie",
        family=Family.GPU,
        title="the GPUs' PCI links have all their lanes",
        reads="NVML's width of each link, and what is possible in this host; the "
        "generation now is not looked at, for idle GPUs lower it",
        threshold="the width that is possible (a warning in virtual machines); width "
        "and highest generation as most GPUs of the model have",
        source="NVIDIA's NVML manual: nvmlDeviceGetMaxPcieLinkWidth",
        severity=Severity.FAIL,
        fix="seat the card or its cable anew; look at the slot's settings in the BIOS",
        needs="an NVIDIA GPU",
        why="Copies to the host and to network adapters take a multiple of the time.",
        facts=("gpu.pcie", "gpu.is_virtual"),
        judge=_judge_pcie,
    ),
    Check(
        id="gpu-pcie-load",
        family=Family.GPU,
        title="the GPUs' PCI links rise to what is possible when there is much to copy",
        reads="NVML's width and generation of each link while the GPU copies from the "
        "host, the best of what is answered before the copies end, and what is "
        "possible in this host; GPUs are matched by their PCI address",
        threshold="the width and the generation that are possible (a warning in "
        "virtual machines)",
        source="NVIDIA's NVML manual: nvmlDeviceGetCurrPcieLinkWidth and -Generation, "
        "nvmlDeviceGetMaxPcieLinkWidth and -Generation",
        severity=Severity.FAIL,
        fix="seat the card or its riser anew; look at the slot's lanes and generation "
        "in the BIOS; sudo lspci -vv -s ADDRESS | grep Lnk",
        needs="--burn, torch, an NVIDIA GPU, nvidia-ml-py",
        why="Copies to the host and to network adapters take a multiple of the time.",
        facts=(LOADED_LINKS,),
        judge=_judge_loaded,
    ),
    Check(
        id="gpu-nvlink",
        family=Family.GPU,
        title="all NVLinks of a GPU are active",
        reads="NVML's state of each NVLink",
        threshold="12 of A100 SXM, 18 of H100 SXM, GB200 and GB300; none on the whole "
        "host is taken for a virtual machine",
        source="NVIDIA Health Validation; A100: its data sheet",
        severity=Severity.FAIL,
        fix="stop all jobs; sudo nvidia-smi --gpu-reset; else reboot the host",
        needs="an NVIDIA GPU with NVLink",
        why="NCCL uses as many links as the GPU with the fewest has, or none.",
        facts=("gpu.nvlinks", "gpu.titles"),
        judge=_judge_nvlinks,
    ),
    Check(
        id="gpu-nvlink-alike",
        family=Family.GPU,
        title="GPUs of one model have the same number of active NVLinks",
        reads="NVML's state of each NVLink",
        threshold="what most GPUs of the model have, on all hosts; none is taken for a "
        "card without a bridge",
        source="NVIDIA Health Validation counts inactive links of each GPU",
        severity=Severity.FAIL,
        fix="nvidia-smi nvlink -s, then reset the GPUs, or seat the bridge anew",
        needs="three GPUs of one model",
        why="NCCL uses as many links as the GPU with the fewest has, or none.",
        facts=("gpu.nvlinks", "gpu.titles"),
        judge=_judge_odd_nvlinks,
    ),
    Check(
        id="gpu-peers",
        family=Family.GPU,
        title="GPUs with NVLinks can read each other's memory",
        reads="NVML's peer status of each pair",
        threshold="OK for each pair of which both have active NVLinks; what cannot be "
        "told of a pair counts for nothing",
        source="NVIDIA's NVML manual: nvmlDeviceGetP2PStatus",
        severity=Severity.WARN,
        fix="nvidia-smi topo -p2p r; look at containers, MIG and driver settings",
        needs="two NVIDIA GPUs with NVLink",
        why="NCCL copies through the host's memory instead.",
        facts=("gpu.peers", "gpu.nvlinks"),
        judge=_judge_peers,
    ),
    Check(
        id="gpu-direct-rdma",
        family=Family.GPU,
        title="RDMA adapters can reach the GPUs' memory",
        reads="/sys/class/infiniband, /sys/module/nvidia_peermem, the kind of the "
        "driver and the kernel's version",
        threshold="nvidia_peermem is loaded, or the open driver on Linux from 5.12",
        source="NVIDIA's GPUDirect RDMA manual; NCCL's manual on DMA-BUF",
        severity=Severity.FAIL,
        fix="sudo modprobe nvidia-peermem (after the RDMA driver is installed)",
        needs="several hosts, GPUs and RDMA adapters of NVIDIA's",
        why="All traffic between hosts is copied through the host's memory.",
        facts=("gpu.direct_rdma", "gpu.count"),
        judge=_judge_direct_rdma,
    ),
    Check(
        id="gpu-acs",
        family=Family.GPU,
        title="PCI bridges pass traffic between devices on directly",
        reads="the ACS control register of each bridge above a GPU; not in virtual "
        "machines, which need it",
        threshold="no source validation, redirection or forwarding upstream",
        source="NCCL's manual: troubleshooting, PCI Access Control Services",
        severity=Severity.WARN,
        fix="sudo setpci -s BRIDGE ECAP_ACS+0x6.w=0000, or switch ACS off in the BIOS",
        needs="root; two GPUs, or a GPU and an RDMA adapter",
        why="Traffic between GPUs and adapters goes up to the processor and is slow.",
        facts=("gpu.acs", "gpu.count", "gpu.direct_rdma"),
        judge=_judge_acs,
    ),
)
