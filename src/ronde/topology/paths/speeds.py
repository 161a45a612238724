"""What links carry in one direction, in GB/s: as NCCL counts, and at most by theory.

NCCL's figures are what its authors saw reached, so they lie below what the standards
allow. Where a source tells nothing, NCCL takes a value of its own, and so it is here:
``lint`` is what complains.
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
from ronde.topology.paths.rules import LATEST, NcclRules

LOCAL_GB_PER_S = 5000.0
"""Within an element; NCCL's word for no limit."""

_UNTOLD_LANES = 16
_UNTOLD_PCI_CODE = 60

# Units of 100 Mb/s a lane. The first that a speed begins with counts, so that
# "16 GT/s" is PCIe 4 and "16.0 GT/s" alone is what is not known: PCIe 3.
_PCI_CODES = (
    ("2.5 GT/s", 15),
    ("5 GT/s", 30),
    ("8 GT/s", 60),
    ("16 GT/s", 120),
    ("32 GT/s", 240),
    ("5.0 GT/s PCIe", 30),
    ("8.0 GT/s PCIe", 60),
    ("16.0 GT/s PCIe", 120),
    ("32.0 GT/s PCIe", 240),
    ("64.0 GT/s PCIe", 480),
)

# What is left of a lane's transfers by its encoding: eight bits of ten, 128 of 130, and
# 242 bytes of 256.
_PCI_PAYLOAD = {
    2.5: 8 / 10,
    5.0: 8 / 10,
    8.0: 128 / 130,
    16.0: 128 / 130,
    32.0: 128 / 130,
    64.0: 242 / 256,
}
_SMP_BY_ARCH = {"ppc64": 32.0, "arm64": 6.0}
_NCCL_SHARE_OF_THEORY = (60 / 80) / (8.0 * 128 / 130 / 8)


def pci_gb_per_s(device: PciDevice, rules: NcclRules = LATEST) -> float:
    """Return what NCCL takes the link above a device to carry.

    An empty or odd speed counts as PCIe 3, a width of 0 as 16 lanes. Where a source
    tells only what the link carries (hwloc), it is that times 0.762, NCCL's part of the
    theory from PCIe 3 on.

    Source: the table of PCI generations in NCCL's src/graph/topo.cc; width times code
    by 80.
    """
    del rules  # All releases count alike so far.
    if device.gb_per_s > 0 and not device.speed:
        return round(device.gb_per_s * _NCCL_SHARE_OF_THEORY, 3)
    width = device.width if device.width > 0 else _UNTOLD_LANES
    return width * _pci_code(device.speed) / 80


def is_pci_told(device: PciDevice) -> bool:
    """Return whether a source tells more of a device than its address.

    Of one that it shows NCCL takes a link without speed for PCIe 3; of one that is only
    named, what NCCL would find is not known.
    """
    is_seen = device.class_code != UNKNOWN or device.width != UNKNOWN
    return is_seen or bool(device.speed) or device.gb_per_s > 0


def pci_theory_gb_per_s(speed: str, width: int) -> float:
    """Return what a PCI link carries at most; 0 where it is not told.

    Args:
        speed: Of a lane, as written: ``16.0 GT/s PCIe``.
        width: Lanes.

    Source: transfers a second by 8, times the share that the encoding leaves (8b/10b,
    128b/130b, and 242 of 256 bytes from PCIe 6 on).
    """
    match = re.match(r"(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", speed)
    rate = float(match[1]) if match else 0.0
    if width <= 0 or rate not in _PCI_PAYLOAD:
        return 0.0
    return rate / 8 * _PCI_PAYLOAD[rate] * width


def nvlink_gb_per_s(sm: int, rules: NcclRules = LATEST) -> float:
    """Return what NCCL takes one NVLink of a GPU to carry.

    Args:
        sm: Compute capability, such as 90; any that NCCL does not know counts as 80.
        rules: Of which release.
    """
    by_capability = (
        (100, rules.sm100_gb_per_s),
        (90, rules.sm90_gb_per_s),
        (87, 20.0),
        (86, 12.0),
        (70, 20.0),
        (60, 18.0),
    )
    return next((speed for least, speed in by_capability if sm >= least), 20.0)


def max_nvlinks(sm: int) -> int:
    """Return how many NVLinks a GPU has at most; 0 where that is not known.

    Source: ``ncclTopoGetXmlFromGpu`` of NCCL's src/graph/xml.cc.
    """
    by_capability = ((90, 18), (80, 12), (70, 6), (60, 4))
    return next((count for least, count in by_capability if sm >= least), 0)


def xgmi_gb_per_s(gcn: str) -> float:
    """Return what RCCL takes one xGMI link of a GPU to carry.

    Args:
        gcn: AMD's architecture: ``942``, ``gfx90a``; 910 is an old word for the latter.

    Source: ``ncclTopoXGMISpeed`` of RCCL's src/graph/topo.h.
    """
    name = gcn.strip().lower().removeprefix("gfx")
    if name.startswith(("94", "95")):
        return 48.0
    return 36.0 if name.startswith(("90a", "910")) else 24.0


def link_gb_per_s(link: Link, gpu: GpuDevice, rules: NcclRules = LATEST) -> float:
    """Return what NCCL or RCCL takes direct links of a GPU to carry together.

    It counts the links; where their number or the GPU's architecture is not told, what
    the source says of them counts, and so it does for C2C. 0 where nothing is told.
    """
    if link.kind == LinkKind.C2C or link.num_links <= 0:
        return link.gb_per_s
    if link.kind == LinkKind.XGMI:
        is_known, each = bool(gpu.gcn), xgmi_gb_per_s(gpu.gcn)
    else:
        is_known, each = gpu.sm > 0, nvlink_gb_per_s(gpu.sm, rules)
    if link.gb_per_s > 0 and not is_known:
        return link.gb_per_s
    return link.num_links * each


def is_link_told(link: Link, gpu: GpuDevice) -> bool:
    """Return whether what direct links of a GPU carry follows from what is told.

    NCCL asks the GPU for its chip, so that of a chip that no source tells the figure
    is a guess.
    """
    if link.gb_per_s > 0 or link.kind == LinkKind.C2C:
        return link.gb_per_s > 0
    return gpu.sm != UNKNOWN or bool(gpu.gcn)


def smp_gb_per_s(node: NumaNode, other: NumaNode, rules: NcclRules = LATEST) -> float:
    """Return what NCCL takes to pass from one NUMA node to another.

    It asks only the processor that sends. One that no source tells has no limit.
    """
    if node.number == other.number:
        return LOCAL_GB_PER_S
    return _SMP_BY_ARCH.get(node.arch) or _x86_gb_per_s(node, rules)


def port_gb_per_s(port: NetPort) -> float:
    """Return what NCCL takes a port to carry: 10 Gb/s where the speed is none."""
    return (port.mbit_per_s if port.mbit_per_s > 0 else 10000) / 8000


def _pci_code(speed: str) -> int:
    codes = (code for prefix, code in _PCI_CODES if speed.startswith(prefix))
    return next(codes, _UNTOLD_PCI_CODE)


def _x86_gb_per_s(node: NumaNode, rules: NcclRules) -> float:
    # Without the blanks with which Zhaoxin's processors give their name.
    match node.vendor.strip() if node.arch == "x86_64" else "":
        case "GenuineIntel":
            return _intel_gb_per_s(node, rules)
        case "AuthenticAMD" if rules.limits_amd_sockets:
            return 16.0
        case "CentaurHauls" | "Shanghai":
            return 9.0 if (node.family, node.model) == (7, 0x5B) else 6.0
        case _:
            return LOCAL_GB_PER_S


def _intel_gb_per_s(node: NumaNode, rules: NcclRules) -> float:
    if node.family != 6 or node.model < 0x55:
        return 6.0
    if not rules.tells_intel_apart or node.model < 0x8F:
        return 10.0
    return 40.0 if node.model >= 0xCF else 22.0
