"""The links of a GPU, as NVML tells them. NVML comes with the extra ``ronde[gpu]``."""

from dataclasses import dataclass
from typing import Any

# GB/s of one PCIe lane in one direction by generation, after coding.
_PCI_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# NVML tells an NVLink's signalling rate. Source: NVLink 2 spends 1 bit in 33 on coding
# (25.781 -> 25), later ones 1 in 17 (26.562 -> 25, 53.125 -> 50).
_NVLINK_2_GB_PER_S, _NVLINK_3_GB_PER_S = 25.0, 26.0


class NoNvmlError(Exception):
    """NVML does not answer; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """How bytes leave one GPU.

    Attributes:
        uuid: Of the GPU; equal where ranks share one.
        name: Its model.
        nvlink_gb_per_s: All active NVLinks together, one direction; 0 without.
        num_nvlinks: How many are active.
        pcie_gb_per_s: Its PCIe link, one direction; None where NVML does not tell.
    """

    uuid: str
    name: str
    nvlink_gb_per_s: float
    num_nvlinks: int
    pcie_gb_per_s: float | None

    @property
    def gb_per_s(self) -> float | None:
        """The best way to another GPU of the node."""
        return self.nvlink_gb_per_s or self.pcie_gb_per_s

    @property
    def link(self) -> str:
        """The name of that way."""
        if self.num_nvlinks:
            return f"{self.num_nvlinks} NVLinks, {self.nvlink_gb_per_s:g} GB/s a GPU"
        return f"PCIe, {self.pcie_gb_per_s or 0:.4g} GB/s a GPU"


def payload_gb_per_s(signalling_mb_per_s: float) -> float:
    """Return what an NVLink carries, of the rate that NVML tells for one link."""
    rate = signalling_mb_per_s / 1e3
    if rate >= _NVLINK_3_GB_PER_S:
        return rate * 16 / 17
    return rate * 32 / 33 if rate > _NVLINK_2_GB_PER_S else rate


def read_gpu_links(uuid: str) -> GpuLinks:
    """Ask NVML for the links of one GPU.

    Args:
        uuid: As torch has it, with or without ``GPU-``.

    Raises:
        NoNvmlError: It is not installed, or does not answer.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]  it has none
    except ImportError as error:
        raise NoNvmlError(
            "NVML is needed for the rate of NVLink and PCIe: pip install 'ronde[gpu]'"
        ) from error
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvmlError(f"NVML does not answer: {error}") from error
    try:
        return _read(nvml, f"GPU-{uuid.removeprefix('GPU-')}")
    except nvml.NVMLError as error:
        raise NoNvmlError(f"NVML does not tell the GPU's links: {error}") from error
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, uuid: str) -> GpuLinks:  # noqa: ANN401  a module without types
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    num_links = sum(
        _is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    )
    rate = payload_gb_per_s(_nvlink_mb_per_s(nvml, handle)) if num_links else 0.0
    name = nvml.nvmlDeviceGetName(handle)
    return GpuLinks(
        uuid=uuid,
        name=name.decode() if isinstance(name, bytes) else str(name),
        nvlink_gb_per_s=num_links * rate,
        num_nvlinks=num_links if rate else 0,
        pcie_gb_per_s=_pcie_gb_per_s(nvml, handle),
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


def _pcie_gb_per_s(nvml: Any, handle: object) -> float | None:  # noqa: ANN401
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        width = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        return None
    lane = _PCI_LANE_GB_PER_S.get(generation)
    return None if lane is None else lane * width
