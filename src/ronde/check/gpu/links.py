"""Checks of GPU links: PCI lanes, NVLinks, NVLink fabric, GPUDirect RDMA and ACS."""

import re
import struct
from collections.abc import Iterable
from pathlib import Path

from ronde.check.check import FAIL, INFORM, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.nvml import COUNT, each_gpu, fold_gpus, odd_gpus
from ronde.check.majority import once_a_host
from ronde.check.probing import UnreadableError
from ronde.topology.cpu_sets import format_list
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.probes.sysfs import read_functions
from ronde.units import grouped

# Number of NVLinks by model; only for boards with fixed links, not for bridges.
_EXPECTED_LINKS = (
    (re.compile("A100-SXM"), 12),
    (re.compile("A800-SXM|H800$"), 8),
    (re.compile(r"H100 80GB HBM3|\b([HB]200|H20|B300|G[HB][23]00)\b(?! NVL)"), 18),
)
_COMPLETED = 3
_UNFINISHED = {1: "has not begun", 2: "goes on"}
_SUMMARIES = {
    2: (FAIL, "the fabric is unhealthy"),
    3: (WARN, "the fabric has limited capacity"),
}
_HEALTH = (
    (4, FAIL, "a route of the fabric is unhealthy"),
    (2, WARN, "a route of the fabric is being recovered"),
    (6, WARN, "the fabric recovers from a time-out"),
    (0, WARN, "the fabric has less bandwidth than it should"),
)
"""The first of two bits per fault, the worst fault first; the value 1 is bad."""
_CONFIGURATION_BIT, _CONFIGURATION_FINE = 8, (0, 1)

_CPUINFO_BYTES = 8192  # the first CPU; each further CPU may take milliseconds
_HYPERVISORS = re.compile(
    r"QEMU|KVM|VMware|Virtual Machine|Google Compute Engine|Amazon EC2|OpenStack|Xen"
)
_MELLANOX = "0x15b3"
_EXTENDED, _SPACE_BYTES = 0x100, 4096
_ACS, _ACS_CONTROL = 0x0D, 6
_REDIRECTING = 0b11101
"""Bits of the ACS control register that send traffic upstream: source validation,
redirection of requests and of completions, and upstream forwarding."""

_PCIE, _VIRTUAL, _NVLINKS = "gpu.pcie", "gpu.is_virtual", "gpu.nvlinks"
_DIRECT = "gpu.direct_rdma"
_COMPARE = "sudo lspci -vv  # on the bare machine: LnkCap of the GPU and its bridge"


def read_is_virtual(root: str) -> bool:
    """Return True if the host is known to be a virtual machine."""
    cpu = read_text(f"{root}/proc/cpuinfo", _CPUINFO_BYTES)
    flags = re.search(r"^flags\s*:(.*)", cpu, re.MULTILINE)
    if flags is not None:
        return "hypervisor" in flags[1].split()
    # Only x86 processors have this flag; for others, use the names in the firmware.
    firmware = f"{root}/sys/class/dmi/id"
    product = read_text(f"{firmware}/product_name")
    name = f"{read_text(f'{firmware}/sys_vendor')} {product}"
    # On Amazon EC2, names that end in .metal are no virtual machines.
    return bool(_HYPERVISORS.search(name)) and not product.endswith(".metal")


def read_direct_rdma(root: str, module: str) -> Value:
    """Return the number of NVIDIA RDMA adapters, and their way to GPU memory or ""."""
    top, way = f"{root}/sys/class/infiniband", ""
    vendors = [read_text(f"{top}/{name}/device/vendor") for name in list_names(top)]
    if list_names(f"{root}/sys/module/nvidia_peermem"):
        way = "nvidia_peermem"
    elif "(open)" in module:
        release = read_text(f"{root}/proc/sys/kernel/osrelease")
        version = tuple(int(n) for n in release.split(".", 2)[:2])
        way = "DMA-BUF" if version >= (5, 12) else ""
    return {"adapters": vendors.count(_MELLANOX), "way": way}


def read_acs(root: str, cards: Iterable[str]) -> list[str]:
    """Return the PCI bridges above ``cards`` that redirect traffic because of ACS."""
    if read_is_virtual(root):
        return []
    functions = read_functions(root)
    chains = (functions[card].chain[1:] for card in cards if card in functions)
    above = dict.fromkeys(bridge for chain in chains for bridge in chain)
    return [bridge for bridge in above if _redirects(root, bridge)]


def _redirects(root: str, bridge: str) -> bool:
    path = Path(f"{root}/sys/bus/pci/devices/{bridge}/config")
    config = path.read_bytes()[:_SPACE_BYTES]
    if len(config) <= _EXTENDED:
        why = f"only {len(config)} bytes of {path} can be read; root would help"
        raise UnreadableError(why)
    # Source: PCI Express Base Specification, "Extended Capabilities List": a word with
    # the capability in bits 0-15 and the offset of the next word in bits 20-31.
    offset, seen = _EXTENDED, set[int]()
    while _EXTENDED <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (word,) = struct.unpack_from("<I", config, offset)
        if word & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, offset + _ACS_CONTROL)
            return bool(control & _REDIRECTING)
        offset = word >> 20 & ~3
    return False


@check(FAIL, _PCIE, _VIRTUAL)
def gpu_pcie(fleet: Fleet) -> Problems:
    """The GPUs' PCI links have all their lanes.

    reads: the current and the maximum width of each link in NVML; not the generation,
        which is low when the GPU is idle
    threshold: the maximum width (only a warning in a virtual machine, and only a note
        if no GPU of the model on the host has more lanes), and the width of most GPUs
        of the model
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261): nvmlDeviceGetMaxPcieLinkWidth is the
        width of GPU and slot, but also 16 for cards of 8 lanes; ronde's choice: the
        rest
    fix: reseat the card or its cable; look at the slot's settings in the BIOS
    needs: an NVIDIA GPU
    why: Copies to the host and to network adapters take several times as long.
    """
    odd = odd_gpus(fleet, _PCIE, "PCI link x{width}".format_map, FAIL)
    narrow = list(_narrow_links(fleet))
    bad = (each for each in narrow if each.severity is not INFORM)
    yield from once_a_host(bad, odd, iter(narrow))
    highest = "PCI link of generation {max_generation} at most"
    yield from odd_gpus(fleet, _PCIE, highest.format_map, WARN)


def _narrow_links(fleet: Fleet) -> Problems:
    for facts in fleet.having(_PCIE, _VIRTUAL, "gpu.titles"):
        pairs = list(zip(facts.values["gpu.titles"], facts.values[_PCIE], strict=True))
        widths = grouped((title, link["width"]) for title, link in pairs if link)
        found = (
            _narrow_link(facts.values, link, max(widths[title])) if link else None
            for title, link in pairs
        )
        yield from fold_gpus(facts.host, found)


def _narrow_link(values: Values, link: dict[str, int], most: int) -> Problem | None:
    message = f"its PCI link has {link['width']} lanes of {link['max_width']}"
    if not 0 < link["width"] < link["max_width"]:
        return None
    if link["width"] == most:
        message += "; the slot or card may have no more"
        return Problem(message, INFORM, fix=_COMPARE)
    # Virtual machines do not see the slot, which may have fewer lanes.
    return (
        Problem(message, WARN, fix=_COMPARE) if values[_VIRTUAL] else Problem(message)
    )


@check(FAIL, _NVLINKS, "gpu.titles")
def gpu_nvlink(fleet: Fleet) -> Problems:
    """All NVLinks of a GPU are active.

    reads: the state of each NVLink in NVML
    threshold: 12 links on A100 SXM; 8 on A800 and H800 SXM; 18 on H100, H200, H20, B200
        and B300 SXM, GH200, GB200 and GB300; and the number of most GPUs of the model
    source: NVIDIA Health Validation, nvlink_bandwidth_count_speed (H100, GB200, GB300);
        the other numbers: NVIDIA's data sheets, the bandwidth of all NVLinks divided by
        that of one in both directions (Ampere and Hopper 50, Blackwell 100 GB/s)
    fix: stop all jobs; sudo nvidia-smi --gpu-reset, or reseat the bridge; or reboot
    needs: an NVIDIA GPU with NVLink
    why: NCCL uses only as many NVLinks as the GPU with the fewest has, or none.
    """

    def show(links: list[bool]) -> str:
        return f"{sum(links)} active NVLinks" if any(links) else ""

    odd = odd_gpus(fleet, _NVLINKS, show, FAIL)
    yield from once_a_host(_inactive_links(fleet), odd)


def _inactive_links(fleet: Fleet) -> Problems:
    for facts in fleet.having(_NVLINKS, "gpu.titles"):
        links = facts.values[_NVLINKS]
        # A virtual machine with only some of a host's GPUs may have no links at all.
        if any(any(each or ()) for each in links):
            pairs = zip(links, facts.values["gpu.titles"], strict=True)
            found = (_lacking_links(each or (), str(title)) for each, title in pairs)
            yield from fold_gpus(facts.host, found)


def _lacking_links(links: Value, title: str) -> Problem | None:
    wanted = next((num for name, num in _EXPECTED_LINKS if name.search(title)), 0)
    inactive = format_list([n for n, is_active in enumerate(links) if not is_active])
    message = f"{sum(links)} of {wanted} NVLinks are active"
    message += f", not {inactive}" * bool(inactive)
    return Problem(message) if sum(links) < wanted else None


@each_gpu(FAIL, "gpu.fabric")
def gpu_fabric(fabric: Value) -> Problems:
    """GPUs behind NVSwitches are registered with the fabric.

    reads: the state, status and health of the fabric in NVML
    threshold: the registration has completed without an error, and the fabric is
        healthy
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261): fabric state, health mask, summary;
        NVIDIA's Fabric Manager guide 2.3
    fix: stop all programs on the GPUs; install the driver's Fabric Manager version,
        then: sudo systemctl restart nvidia-fabricmanager; on GB200: look at the switch
        trays
    needs: NVIDIA GPUs behind NVSwitches
    why: CUDA does not start (error 802), or NVLinks are slow.
    """
    status, health = fabric["status"], fabric["health"]
    if fabric["state"] != _COMPLETED:
        if message := _UNFINISHED.get(fabric["state"]):
            yield Problem(f"its registration with the fabric {message}")
        return  # the rest is valid only once it is registered
    if status:
        yield Problem(f"its registration with the fabric ended in error {status}")
    configuration = health >> _CONFIGURATION_BIT & 0xF
    if configuration not in _CONFIGURATION_FINE:
        message = f"the fabric is configured wrongly (NVML's number {configuration})"
        yield Problem(message)
    for first_bit, severity, message in _HEALTH:
        if health >> first_bit & 3 == 1:
            yield Problem(message, severity)
    if fabric["summary"] in _SUMMARIES:
        severity, message = _SUMMARIES[fabric["summary"]]
        yield Problem(message, severity)


@each_host(FAIL, _DIRECT, COUNT)
def gpu_direct_rdma(values: Values, fleet: Fleet) -> Problems:
    """RDMA adapters can access the memory of the GPUs.

    reads: /sys/class/infiniband, /sys/module/nvidia_peermem, driver and kernel version
    threshold: nvidia_peermem is loaded, or the open driver runs on Linux 5.12 or newer
    source: NCCL 2.30.7's manual, GPU-to-NIC communication; open driver and 5.12:
        NVIDIA's GPU Operator manual, GPUDirect RDMA (cloud-native-docs 52dcb7b)
    fix: sudo modprobe nvidia-peermem (after MLNX_OFED or DOCA-OFED is installed), or
        install the open GPU driver
    needs: several hosts with NVIDIA GPUs and NVIDIA RDMA adapters
    why: All traffic between hosts is copied through host memory.
    """
    adapters, way = values[_DIRECT]["adapters"], values[_DIRECT]["way"]
    if len(fleet.hosts) > 1 and values[COUNT] and adapters and not way:
        yield Problem(f"{adapters} RDMA adapters cannot reach the GPUs' memory")


@each_host(WARN, "gpu.acs", COUNT, _DIRECT)
def gpu_acs(values: Values, _: Fleet) -> Problems:
    """PCI bridges pass traffic directly between devices.

    reads: the ACS control register of each bridge above a GPU; not in virtual machines
    threshold: no source validation, no redirection of requests or completions, and no
        upstream forwarding
    source: NCCL 2.30.7's manual, PCI Access Control Services
    fix: sudo setpci -s BRIDGE ECAP_ACS+0x6.w=0000 after each boot, or switch ACS off in
        the BIOS
    needs: root; two GPUs, or a GPU and an RDMA adapter
    why: Traffic between GPUs and adapters goes up to the processor first, which is
        slow.
    """
    bridges = values["gpu.acs"]
    # A single device has no peer.
    if bridges and (values[COUNT] or 0) + values[_DIRECT]["adapters"] > 1:
        fix = f"sudo setpci -s {bridges[0]} ECAP_ACS+0x6.w=0000"
        fix += ", and so on, or switch ACS off in the BIOS" * (len(bridges) > 1)
        yield Problem(f"ACS is on in {len(bridges)} PCI bridges above GPUs", fix=fix)
