"""Bandwidth of links in one direction, in GB/s: NCCL's figures and theoretical ones.

Unknown values get NCCL's defaults; lint reports them.
"""

import re

from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)

LOCAL_GB_PER_S = 5000.0
"""NCCL's value for no limit, such as inside an element."""

GPU_CLASSES = (0x03, 0x12)
"""PCI classes of display controllers, and of AMD's accelerators."""

_AMD = 0x1002
_MOST_AT_REST = 5.0  # GT/s.
_UNKNOWN_LANES = 16
_UNKNOWN_GT_PER_S = 8.0
# The beginnings that NCCL knows: "16 GT/s" is PCIe 4, and "16.0 GT/s" alone is none.
_NCCL_SPEED = re.compile(r"(2\.5|5|8|16|32) GT/s|(5|8|16|32|64)\.0 GT/s PCIe")
_NCCL_SHARE_OF_THEORY = (60 / 80) / (8.0 * 128 / 130 / 8)
# GB/s of one NVLink, and most links of a GPU, by lowest compute capability.
_NVLINK_RATES = {100: 40.1, 90: 20.6, 87: 20.0, 86: 12.0, 70: 20.0, 60: 18.0}
_NVLINK_COUNTS = ((90, 18), (80, 12), (70, 6), (60, 4))
# Models on boards that join them by NVLink; those that may do without, in a slot or a
# package of their own; and those that were cut for export.
_BOARDS = re.compile(r"\b(SXM\d?|HBM3E?|H20|H[28]00|G?B[23]00)\b")
_ALONE = re.compile(r"\b(PCIE|NVL|GH200)\b")
_CUT, _CUT_NVLINKS = re.compile(r"\b[AH]800\b"), 8
# GB/s between processors by lowest model of family 6: Emerald Rapids, Sapphire Rapids.
_INTEL_RATES = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
_SMP_BY_ARCH = {"ppc64": 32.0, "arm64": 6.0}


def as_running(device: PciDevice) -> PciDevice:
    """Return a device with the current speed and width of its link as its maximum.

    The low speed of an idle GPU, 2.5 or 5 GT/s, is ignored. Idle GPUs keep their number
    of lanes.
    """
    width = device.width_now if device.width_now > 0 else device.width
    speed = "" if is_at_rest(device) else device.speed_now
    return device._replace(
        speed=speed or device.speed, width=width, speed_now="", width_now=UNKNOWN
    )


def is_at_rest(device: PciDevice) -> bool:
    """Return True if a link has the low speed of an idle GPU."""
    # AMD's GPUs are behind a switch of their own; their idle speed may be higher.
    is_amd = device.vendor == _AMD and device.class_code >> 16 in (*GPU_CLASSES, 0x06)
    is_low = gt_per_s(device.speed_now) <= _MOST_AT_REST
    is_gpu = is_amd or (device.class_code >> 16 in GPU_CLASSES and is_low)
    return is_gpu and 0 <= device.width <= device.width_now


def pci_gb_per_s(device: PciDevice) -> float:
    """Return NCCL's GB/s for the current state of the link above a device.

    Source: src/graph/topo.cc. NCCL itself plans with the maximum of both ends.
    """
    device = as_running(device)
    # hwloc has only the link's rate; NCCL's figure is a share of it from PCIe 3 on.
    if device.gb_per_s > 0 and not device.speed:
        return round(device.gb_per_s * _NCCL_SHARE_OF_THEORY, 3)
    width = device.width if device.width > 0 else _UNKNOWN_LANES
    match = _NCCL_SPEED.match(device.speed)
    rate = float(match[1] or match[2]) if match else _UNKNOWN_GT_PER_S
    # In units of 100 Mb/s: 15, 30, 60, 120, ...
    return width * rate * (6 if rate <= 5 else 7.5) / 80


def link_words(device: PciDevice) -> str:
    """Describe the link above a device, such as ``16.0 GT/s PCIe x16``."""
    if not device.speed and device.gb_per_s:
        return f"{device.gb_per_s:g} GB/s"
    lanes = f" x{device.width}" if device.width >= 0 else ""
    return f"{device.speed or 'no speed'}{lanes}"


def is_pci_known(device: PciDevice) -> bool:
    """Return True if a source shows anything about a device besides its address."""
    is_seen = device.class_code != UNKNOWN or device.width != UNKNOWN
    return is_seen or bool(device.speed) or device.gb_per_s > 0


def gt_per_s(speed: str) -> float:
    """Return the number in front of GT/s; 0 if there is none."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", speed)
    return float(match[1]) if match else 0.0


def pci_theory_gb_per_s(speed: str, width: int) -> float:
    """Return the theoretical payload rate of a PCI link; 0 if unknown."""
    rate = gt_per_s(speed)
    if width <= 0 or rate not in (2.5, 5, 8, 16, 32, 64):
        return 0.0
    # Payload of the encoding: eight bits of ten, 128 of 130, 242 bytes of 256.
    payload = 8 / 10 if rate <= 5 else 128 / 130 if rate <= 32 else 242 / 256
    return rate / 8 * payload * width


def nvlink_gb_per_s(sm: int) -> float:
    """Return NCCL's figure for one NVLink; an unknown ``sm`` counts as 80."""
    return next((speed for least, speed in _NVLINK_RATES.items() if sm >= least), 20.0)


def max_nvlinks(sm: int) -> int:
    """Return the largest number of NVLinks of a GPU; 0 if unknown."""
    return next((count for least, count in _NVLINK_COUNTS if sm >= least), 0)


def board_nvlinks(gpu: GpuDevice) -> int:
    """Return the number of NVLinks of a GPU by its board; 0 if it may have none."""
    name = gpu.title.upper()
    if not _BOARDS.search(name) or _ALONE.search(name):
        return 0
    return _CUT_NVLINKS if _CUT.search(name) else max_nvlinks(gpu.sm)


def xgmi_gb_per_s(gcn: str) -> float:
    """Return RCCL's figure for one xGMI link (``ncclTopoXGMISpeed``)."""
    name = gcn.strip().lower().removeprefix("gfx")
    if name.startswith(("94", "95")):
        return 48.0
    # 910 is an old word for 90a.
    return 36.0 if name.startswith(("90a", "910")) else 24.0


def link_gb_per_s(link: Link, gpu: GpuDevice) -> float:
    """Return NCCL's or RCCL's figure for direct links of a GPU; 0 if unknown."""
    # The figure is per link; if the number of links or the GPU's architecture is
    # unknown, and for C2C, use the source's own figure.
    if link.kind == LinkKind.C2C or link.num_links <= 0:
        return link.gb_per_s
    if link.kind == LinkKind.XGMI:
        is_known, each = bool(gpu.gcn), xgmi_gb_per_s(gpu.gcn)
    else:
        is_known, each = gpu.sm > 0, nvlink_gb_per_s(gpu.sm)
    if link.gb_per_s > 0 and not is_known:
        return link.gb_per_s
    return link.num_links * each


def is_link_known(link: Link, gpu: GpuDevice) -> bool:
    """Return True if the rate of direct links of a GPU is known."""
    if link.gb_per_s > 0 or link.kind == LinkKind.C2C:
        return link.gb_per_s > 0
    return gpu.sm != UNKNOWN or bool(gpu.gcn)


def smp_gb_per_s(node: NumaNode, other: NumaNode) -> float:
    """Return NCCL's GB/s between NUMA nodes; it depends on the sender's processor."""
    if node.number == other.number:
        return LOCAL_GB_PER_S
    if node.arch in _SMP_BY_ARCH:
        return _SMP_BY_ARCH[node.arch]
    # Without the blanks with which Zhaoxin's processors give their name.
    vendor = node.vendor.strip() if node.arch == "x86_64" else ""
    if vendor == "GenuineIntel":
        model = node.model if node.family == 6 else 0
        return next((speed for least, speed in _INTEL_RATES if model >= least), 6.0)
    if vendor in ("CentaurHauls", "Shanghai"):
        return 9.0 if (node.family, node.model) == (7, 0x5B) else 6.0
    return 16.0 if vendor == "AuthenticAMD" else LOCAL_GB_PER_S


def port_gb_per_s(port: NetPort) -> float:
    """Return NCCL's figure for a port; an unknown speed counts as 10 Gb/s."""
    return (port.mbit_per_s if port.mbit_per_s > 0 else 10000) / 8000
