"""The links of a GPU, as NVML tells them. NVML comes with the extra ``ronde[gpu]``."""

from dataclasses import dataclass
from typing import Any

from ronde.topology.graph import PciDevice
from ronde.topology.limits.world import Rate
from ronde.topology.paths.rules import LATEST
from ronde.topology.paths.speeds import (
    nvlink_gb_per_s,
    pci_gb_per_s,
    pci_theory_gb_per_s,
)
from ronde.topology.probes.nvml import NoNvmlError, open_nvml
from ronde.topology.probes.nvml_answers import PCI_SPEEDS

_SM_OF_NVLS = 90
# NVML tells an NVLink's signalling rate. Source: NVLink 2 spends 1 bit in 33 on coding
# (25.781 -> 25), later ones 1 in 17 (26.562 -> 25, 53.125 -> 50).
_NVLINK_2_GB_PER_S, _NVLINK_3_GB_PER_S = 25.0, 26.0


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """How bytes leave one GPU.

    Attributes:
        uuid: Of the GPU; equal where ranks share one.
        name: Its model.
        nvlink_gb_per_s: All active NVLinks together, one direction; 0 without.
        num_nvlinks: How many are active.
        pcie_generation: Of its PCIe link; 0 where NVML does not tell.
        pcie_width: Lanes of that link; 0 likewise.
        sm: Its compute capability, such as 90.
    """

    uuid: str
    name: str
    nvlink_gb_per_s: float
    num_nvlinks: int
    pcie_generation: int
    pcie_width: int
    sm: int

    @property
    def rate(self) -> Rate | None:
        """The best way to another GPU of the node; None where NVML tells none."""
        if self.num_nvlinks:
            link = f"{self.num_nvlinks} NVLinks, {self.nvlink_gb_per_s:g} GB/s a GPU"
            practical = self.num_nvlinks * nvlink_gb_per_s(self.sm, LATEST)
            return Rate(link, self.nvlink_gb_per_s, practical)
        speed = PCI_SPEEDS.get(self.pcie_generation, "")
        if not speed or not self.pcie_width:
            return None
        rate = pci_theory_gb_per_s(speed, self.pcie_width)
        device = PciDevice("", speed=speed, width=self.pcie_width)
        practical = pci_gb_per_s(device, LATEST)
        return Rate(f"PCIe, {rate:.4g} GB/s a GPU", rate, practical)

    @property
    def has_nvls(self) -> bool:
        """Whether NVLink switches, where there are any, may reduce for it."""
        return self.num_nvlinks > 0 and self.sm >= _SM_OF_NVLS


def payload_gb_per_s(signalling_mb_per_s: float) -> float:
    """Return what an NVLink carries, of the rate that NVML tells for one link."""
    rate = signalling_mb_per_s / 1e3
    if rate >= _NVLINK_3_GB_PER_S:
        return rate * 16 / 17
    return rate * 32 / 33 if rate > _NVLINK_2_GB_PER_S else rate


def read_gpu_links(uuid: str, sm: int) -> GpuLinks:
    """Ask NVML for the links of one GPU.

    Args:
        uuid: As torch has it, with or without ``GPU-``.
        sm: Its compute capability, such as 90.

    Raises:
        NoNvmlError: It is not installed, or does not answer.
    """
    with open_nvml() as nvml:
        try:
            return _read(nvml, f"GPU-{uuid.removeprefix('GPU-')}", sm)
        except nvml.NVMLError as error:
            raise NoNvmlError(f"NVML does not tell the GPU's links: {error}") from error


def _read(nvml: Any, uuid: str, sm: int) -> GpuLinks:  # noqa: ANN401  it has no types
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    num_links = sum(
        _is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    )
    rate = payload_gb_per_s(_nvlink_mb_per_s(nvml, handle)) if num_links else 0.0
    name = nvml.nvmlDeviceGetName(handle)
    generation, width = _pcie(nvml, handle)
    return GpuLinks(
        uuid=uuid,
        name=name.decode() if isinstance(name, bytes) else str(name),
        nvlink_gb_per_s=num_links * rate,
        num_nvlinks=num_links if rate else 0,
        pcie_generation=generation,
        pcie_width=width,
        sm=sm,
    )


def _is_active(nvml: Any, handle: object, link: int) -> bool:  # noqa: ANN401
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return False


def _nvlink_mb_per_s(nvml: Any, handle: object) -> float:  # noqa: ANN401
    """Return the signalling rate of each active link; 0 where NVML does not tell."""
    field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    return float(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else 0.0


def _pcie(nvml: Any, handle: object) -> tuple[int, int]:  # noqa: ANN401
    """Return generation and width of the PCIe link; 0 where NVML does not tell."""
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return generation, nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        return 0, 0
