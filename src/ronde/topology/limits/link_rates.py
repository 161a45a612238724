"""What the links of a host carry by the standards, and what NCCL counts on."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.graph import GpuDevice, Link, LinkKind, PciDevice
from ronde.topology.paths.rules import LATEST
from ronde.topology.paths.speeds import (
    link_gb_per_s,
    max_nvlinks,
    pci_gb_per_s,
    pci_theory_gb_per_s,
)

# GB/s of one link in one direction, payload, by compute capability. Source: NVIDIA's
# data sheets: P100 4 links and 160 GB/s both ways, V100 6 and 300, A100 12 and 600,
# RTX 3090 4 and 112.5, H100 18 and 900, B200 18 and 1800.
_NVLINKS = ((100, 50.0), (90, 25.0), (87, 25.0), (86, 14.0625), (70, 25.0), (60, 20.0))
# Source: AMD's data sheets: MI355X 153.6 GB/s a link both ways, MI300 128, MI250 100,
# MI100 and MI60 92.
_XGMI = (("95", 76.8), ("94", 64.0), ("90a", 50.0), ("910", 50.0), ("", 46.0))

_HOST_BRIDGE = 0x0600
# One lane of 2.5 GT/s: what virtual machines say of links of which they know nothing.
_NOTHING_GB_PER_S = 0.25


class Figures(NamedTuple):
    """One direction of a link, in GB/s.

    Attributes:
        theory: What it carries by its standard.
        practical: What NCCL counts on.
    """

    theory: float
    practical: float

    @property
    def is_told(self) -> bool:
        """Whether anybody knows what the link carries at most."""
        return self.theory < float("inf")

    def plus(self, other: "Figures") -> "Figures":
        """Return both links together."""
        return Figures(self.theory + other.theory, self.practical + other.practical)

    def capped(self, other: "Figures") -> "Figures":
        """Return one link behind the other."""
        return Figures(
            min(self.theory, other.theory), min(self.practical, other.practical)
        )


NO_FIGURES = Figures(0.0, 0.0)
UNLIMITED = Figures(float("inf"), float("inf"))


def pci_figures(device: PciDevice) -> Figures | None:
    """Return what the link above a device carries; None where that is not told.

    A host bridge has no link above it, though NCCL counts one where a file says so, and
    of the least link that there is nobody knows the limit: virtual machines have it.
    """
    theory = pci_theory_gb_per_s(device.speed, device.width)
    if not device.speed:
        theory = device.gb_per_s
    if theory <= 0:
        return None
    practical = min(theory, pci_gb_per_s(device, LATEST))
    is_bridge = device.class_code >> 8 == _HOST_BRIDGE
    is_limit = theory > _NOTHING_GB_PER_S and not is_bridge
    return Figures(theory if is_limit else float("inf"), practical)


def direct_figures(gpu: GpuDevice, links: Sequence[Link]) -> Figures:
    """Return what direct links of one kind carry together.

    Args:
        gpu: At one of their ends.
        links: At least one; a count above what the GPU can have is taken for the most
            that it can have.

    Returns:
        Zeros where neither the source nor the GPU tells.
    """
    count = count_links(gpu, links)
    told = sum(link.gb_per_s for link in links)
    if links[0].kind is LinkKind.XGMI:
        name = gpu.gcn.strip().lower().removeprefix("gfx")
        each = next(rate for prefix, rate in _XGMI if name.startswith(prefix))
    else:
        each = next((rate for least, rate in _NVLINKS if gpu.sm >= least), 0.0)
    theory = told or count * each
    together = links[0]._replace(num_links=count, gb_per_s=told)
    return Figures(theory, min(theory, link_gb_per_s(together, gpu)))


def count_links(gpu: GpuDevice, links: Sequence[Link]) -> int:
    """Return how many direct links there are, at most as many as the GPU can have."""
    count = sum(link.num_links for link in links)
    if links[0].kind is LinkKind.XGMI:
        return count
    return min(count, max_nvlinks(gpu.sm) or count)
