"""What NVML is asked: questions, each with the form of its answer, and who answers."""

from enum import StrEnum
from typing import Protocol

from ronde.check.facts import Value


class HostQuestion(StrEnum):
    """Asked once a host."""

    NUM_GPUS = "count"
    """How many GPUs there are."""

    DRIVER_VERSION = "driver_version"
    """A text: ``550.54.15``."""

    CUDA_VERSION = "cuda_version"
    """The newest that the driver supports: ``[12, 4]``."""

    CONFIDENTIAL = "is_confidential"
    """Whether confidential computing is on."""


class GpuQuestion(StrEnum):
    """Asked of each GPU."""

    TITLE = "titles"
    """Its model, a text."""

    UUID = "uuids"
    """A text: ``GPU-...``."""

    BUS_ID = "bus_ids"
    """Its address: ``0000:1b:00.0``."""

    CAPABILITY = "capabilities"
    """Compute capability: ``[9, 0]``."""

    MEMORY = "memory_bytes"
    """``total`` and ``used``, in bytes."""

    VBIOS = "vbios"
    """Version of the firmware of its board, a text."""

    GSP = "gsp_firmware"
    """Version of the firmware of its system processor, a text."""

    INFOROM = "has_valid_inforom"
    """Whether the checksums of its own records are right."""

    RECOVERY = "recovery_action"
    """The number of what the driver advises; 0 is nothing."""

    REMAPPED_ROWS = "remapped_rows"
    """``corrected`` and ``uncorrected``: how many; ``is_pending``; ``has_failed``."""

    ECC_MODE = "ecc_mode"
    """``now``, ``pending``, ``default``: whether errors in memory are corrected."""

    ECC_ERRORS = "ecc_errors"
    """Counts: ``sram_uncorrected``, ``sram_corrected`` and ``dram_corrected`` since the
    driver was loaded, ``sram_uncorrected_ever``."""

    CLOCK_EVENTS = "clock_events"
    """A bit for each reason for which its clocks are not as high as they can be."""

    MARGIN = "margin_celsius"
    """How many degrees are left before its clocks are lowered."""

    PCIE = "pcie"
    """``width`` and ``generation`` now, ``max_width`` and ``max_generation`` of this
    GPU in this host."""

    PCIE_REPLAYS = "pcie_replays"
    """How many packets were sent again since the driver was loaded."""

    POWER_LIMIT = "power_limit_w"
    """``enforced`` and ``default``, in watts."""

    NVLINKS = "nvlinks"
    """Of each NVLink that it has: whether it is active."""

    FABRIC = "fabric"
    """How it is registered with what rules the NVSwitches: ``state``, ``status``,
    ``health`` and ``summary`` as NVML numbers them, ``cluster`` in hexadecimal digits,
    empty for none, and ``clique``, the number of the part of it that is linked."""

    PEERS = "peers"
    """Of each GPU, itself too: NVML's number for reading its memory; 0 is yes, 6 that
    it cannot be told."""

    PERSISTENCE = "is_persistent"
    """Whether the driver stays with it when nobody uses it."""

    MIG = "mig"
    """Whether it is split into instances."""

    COMPUTE_MODE = "compute_mode"
    """NVML's number for who may use it: 0 all, 2 nobody, 3 one process."""

    PROCESSES = "processes"
    """``pid`` and ``memory_bytes`` (may be nothing) of each that computes on it, and
    draws nothing."""

    BUSY = "busy_percent"
    """Of the last moment, the part in which it computed."""

    NEAR_CPUS = "near_cpus"
    """A list of CPUs as the kernel writes it: ``0-15,32-47``."""


class RefusedError(Exception):
    """NVML does not answer a question.

    Args:
        code: NVML's number of the error, see ``NOT_SUPPORTED`` and the like.
        reason: In words.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


NOT_SUPPORTED = 3
NO_PERMISSION = 4
FUNCTION_NOT_FOUND = 13
INSUFFICIENT_POWER = 8
TIMEOUT = 10
IRQ_ISSUE = 11
CORRUPTED_INFOROM = 14
GPU_IS_LOST = 15
RESET_REQUIRED = 16
ARGUMENT_VERSION_MISMATCH = 25
INVALID_ARGUMENT = 2
UNKNOWN = 999

LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED})
"""Errors by which a GPU is said to be of no use, whatever was asked."""

GONE = LOST | {INSUFFICIENT_POWER, TIMEOUT, IRQ_ISSUE, UNKNOWN}
"""Errors by which a GPU that cannot tell even its name is of no use.

The first sign that one has fallen off the bus is often nothing but ``UNKNOWN``.
"""


class Nvml(Protocol):
    """Whoever answers."""

    def ask_host(self, question: HostQuestion) -> Value:
        """Return the answer, in the form that the question tells.

        Raises:
            RefusedError: There is none.
        """
        ...

    def ask_gpu(self, question: GpuQuestion, number: int) -> Value:
        """Return the answer for a GPU, in the form that the question tells.

        Args:
            question: What.
            number: Of the GPU, from 0, as NVML counts.

        Raises:
            RefusedError: There is none.
        """
        ...
