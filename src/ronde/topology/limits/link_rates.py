"""What the links of a host carry by the standards, and what NCCL counts on."""

from typing import NamedTuple

from ronde.topology.graph import GpuDevice, Link, LinkKind, PciDevice
from ronde.topology.paths.rules import LATEST
from ronde.topology.paths.speeds import (
    max_nvlinks,
    nvlink_gb_per_s,
    pci_gb_per_s,
    pci_theory_gb_per_s,
    xgmi_gb_per_s,
)

# GB/s of one link in one direction, payload, by compute capability. Source: NVIDIA's
# data sheets: P100 4 links and 160 GB/s both ways, V100 6 and 300, A100 12 and 600,
# RTX 3090 4 and 112.5, H100 18 and 900, B200 18 and 1800.
_NVLINKS = ((100, 50.0), (90, 25.0), (87, 25.0), (86, 14.0625), (70, 25.0), (60, 20.0))
# Source: AMD's data sheets: MI355X 153.6 GB/s a link both ways, MI300 128, MI250 100,
# MI100 and MI60 92.
_XGMI = (("95", 76.8), ("94", 64.0), ("90a", 50.0), ("910", 50.0), ("", 46.0))


class Figures(NamedTuple):
    """One direction of a link, in GB/s.

    Attributes:
        theory: What it carries by its standard.
        practical: What NCCL counts on.
    """

    theory: float
    practical: float

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
    """Return what the link above a device carries; None where that is not told."""
    theory = pci_theory_gb_per_s(device.speed, device.width)
    if not device.speed:
        theory = device.gb_per_s
    if theory <= 0:
        return None
    return Figures(theory, min(theory, pci_gb_per_s(device, LATEST)))


def gpu_link_figures(gpu: GpuDevice, link: Link) -> Figures:
    """Return what direct links of a GPU carry together.

    A count above what the GPU can have is taken for the most that it can have; 0 where
    the GPU is not known.
    """
    if link.gb_per_s > 0:
        return Figures(link.gb_per_s, link.gb_per_s)
    if link.kind is LinkKind.XGMI:
        name = gpu.gcn.strip().lower().removeprefix("gfx")
        theory = next(rate for prefix, rate in _XGMI if name.startswith(prefix))
        return _times(link.num_links, theory, xgmi_gb_per_s(gpu.gcn))
    theory = next((rate for least, rate in _NVLINKS if gpu.sm >= least), 0.0)
    count = min(link.num_links, max_nvlinks(gpu.sm) or link.num_links)
    return _times(count, theory, nvlink_gb_per_s(gpu.sm, LATEST))


def _times(count: int, theory: float, practical: float) -> Figures:
    return Figures(count * theory, count * min(theory, practical))
