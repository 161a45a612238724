"""What NVIDIA's driver reports through the module ``pynvml``: questions and answers.

Each question is a few calls, made anew each time it is asked. Numbers of fields and
errors are NVML's own, which do not change; names of calls that a release of the module
or of the driver lacks are refused like what a GPU does not support.
"""

from collections.abc import Callable
from ctypes import byref
from enum import StrEnum
from typing import Any

from ronde.check.facts import Value
from ronde.topology.cpu_sets import format_list, members
from ronde.topology.pci import plain_address


class HostQuestion(StrEnum):
    """Asked once a host; the answer is the fact ``gpu.`` and this name."""

    NUM_GPUS = "count"
    CUDA_VERSION = "cuda_version"
    """The newest that the driver supports: ``[12, 4]``."""


class GpuQuestion(StrEnum):
    """Asked of each GPU; the answers are the fact ``gpu.`` and this name."""

    TITLE = "titles"
    BUS_ID = "bus_ids"
    """Its address: ``0000:1b:00.0``."""

    CAPABILITY = "capabilities"
    """Compute capability: ``[9, 0]``."""

    MEMORY = "memory_bytes"
    """``total`` and ``used``."""

    VBIOS = "vbios"
    GSP = "gsp_firmware"
    INFOROM = "has_valid_inforom"
    RECOVERY = "recovery_action"
    """The number of what the driver advises; 0 is nothing."""

    REMAPPED_ROWS = "remapped_rows"
    """``corrected`` and ``uncorrected``: how many; ``is_pending``; ``has_failed``."""

    ECC_MODE = "ecc_mode"
    """``now``, ``pending``, ``default``: whether errors in memory are corrected."""

    ECC_ERRORS = "ecc_errors"
    """``sram_uncorrected``, ``sram_corrected`` and ``dram_corrected`` since the driver
    was loaded, ``sram_uncorrected_ever``."""

    CLOCK_EVENTS = "clock_events"
    """A bit for each reason for which its clocks are not as high as they can be."""

    MARGIN = "margin_celsius"
    PCIE = "pcie"
    """``width`` and ``generation`` now, ``max_width`` and ``max_generation`` of this
    GPU in this host."""

    POWER_LIMIT = "power_limit_w"
    """``enforced`` and ``default``, in watts."""

    NVLINKS = "nvlinks"
    """Of each NVLink that it has: whether it is active."""

    FABRIC = "fabric"
    """``state``, ``status``, ``health`` and ``summary`` as NVML numbers them."""

    PEERS = "peers"
    """Of each GPU, itself too: NVML's number for reading its memory; 0 is yes, 6 is
    unknown."""

    PERSISTENCE = "is_persistent"
    MIG = "mig"
    COMPUTE_MODE = "compute_mode"
    """Who may use it: 0 all, 2 nobody, 3 one process."""

    PROCESSES = "processes"
    """``pid`` and ``memory_bytes`` (may be nothing) of each that computes on it, and
    draws nothing."""

    BUSY = "busy_percent"
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


INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_POWER = 2, 3, 4, 8
TIMEOUT, IRQ_ISSUE, FUNCTION_NOT_FOUND, CORRUPTED_INFOROM = 10, 11, 13, 14
GPU_IS_LOST, RESET_REQUIRED, ARGUMENT_VERSION_MISMATCH, UNKNOWN = 15, 16, 25, 999

LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED})
"""Errors by which NVML reports a GPU as lost, whatever was asked."""

GONE = LOST | {INSUFFICIENT_POWER, TIMEOUT, IRQ_ISSUE, UNKNOWN}
"""Errors by which a GPU without even a name is lost.

The first sign that one has fallen off the bus is often nothing but ``UNKNOWN``.
"""

_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_LOADED, _EVER = 0, 1
_DRAM, _SRAM = 2, 7
_READ = 0
_PEER_UNKNOWN = 6
_RECOVERY_FIELD = 230
_MAX_LINKS = 36
_CPU_WORDS = 64

_Ask = Callable[..., Any]
"""Calls a function of NVML's by name, for one GPU or for the host."""


class NvmlDriver:
    """Answers for this host.

    Args:
        nvml: The module ``pynvml``, as ``open_nvml`` gives it.
    """

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401  a module without types
        self._nvml = nvml
        self._mismatch: Any = getattr(nvml, "NVMLLibraryMismatchError", ())

    def ask_host(self, question: HostQuestion) -> Value:
        """Return the answer.

        Raises:
            RefusedError: There is none.
        """
        if question is HostQuestion.NUM_GPUS:
            return int(self._call("nvmlDeviceGetCount"))
        version = int(self._call("nvmlSystemGetCudaDriverVersion_v2"))
        return [version // 1000, version % 1000 // 10]

    def ask_gpu(self, question: GpuQuestion, number: int) -> Value:
        """Return the answer for a GPU, as NVML counts them.

        Raises:
            RefusedError: There is none.
        """
        handle = self._call("nvmlDeviceGetHandleByIndex", number)

        def ask(name: str, *given: object) -> Any:  # noqa: ANN401
            return self._call(name, handle, *given)

        match question:
            case GpuQuestion.PEERS:
                count = self._call("nvmlDeviceGetCount")
                return [0 if n == number else self._peer(ask, n) for n in range(count)]
            case GpuQuestion.FABRIC:
                return self._fabric(ask)
            case GpuQuestion.MEMORY:
                return self._memory(ask)
            case _:
                return _GPU[question](ask)

    def _call(self, name: str, *given: object) -> Any:  # noqa: ANN401
        function = getattr(self._nvml, name, None)
        if function is None:
            reason = f"nvidia-ml-py is too old: it has no {name}"
            raise RefusedError(FUNCTION_NOT_FOUND, reason)
        try:
            return function(*given)
        except self._nvml.NVMLError as error:
            raise RefusedError(int(error.value), f"NVML reports: {error}") from error
        except self._mismatch as error:
            # Not one of NVML's own: the module's word for a driver without a function.
            reason = f"the driver is too old for nvidia-ml-py's {name}"
            raise RefusedError(FUNCTION_NOT_FOUND, reason) from error

    def _peer(self, ask: _Ask, other: int) -> int:
        """Return the number for one other GPU; what is wrong with that one is its own.

        Of a GPU that is lost every question fails that names it, whoever is asked.
        """
        try:
            handle = self._call("nvmlDeviceGetHandleByIndex", other)
            return int(ask("nvmlDeviceGetP2PStatus", handle, _READ))
        except RefusedError as error:
            if error.code in GONE:
                return _PEER_UNKNOWN
            raise

    def _memory(self, ask: _Ask) -> Value:
        """Return how much is used without what the driver keeps for itself."""
        try:
            version = getattr(self._nvml, "nvmlMemory_v2", None)
            memory = ask("nvmlDeviceGetMemoryInfo", version)
        except RefusedError:
            # Before release 510 the driver has but the first form, which counts it.
            memory = ask("nvmlDeviceGetMemoryInfo")
        return {"total": int(memory.total), "used": int(memory.used)}

    def _fabric(self, ask: _Ask) -> Value:
        """Ask in the newest form of the question that module and driver both know."""
        refusal = RefusedError(FUNCTION_NOT_FOUND, "nvidia-ml-py is too old")
        for form in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
            make = getattr(self._nvml, form, None)
            if make is None:
                continue
            info = make()
            try:
                ask("nvmlDeviceGetGpuFabricInfoV", byref(info))
            except RefusedError as error:
                refusal = error
                if error.code not in {ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT}:
                    break
                continue
            return {
                "state": int(info.state),
                "status": int(info.status),
                "health": int(info.healthMask),
                "summary": int(getattr(info, "healthSummary", 0)),
            }
        raise refusal


def _text(answer: Any) -> str:  # noqa: ANN401
    # Older releases of the module have bytes.
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _texts(name: str) -> Callable[[_Ask], Value]:
    return lambda ask: _text(ask(name))


def _number(name: str) -> Callable[[_Ask], Value]:
    return lambda ask: int(ask(name))


def _has_valid_inforom(ask: _Ask) -> Value:
    try:
        ask("nvmlDeviceValidateInforom")
    except RefusedError as error:
        if error.code == CORRUPTED_INFOROM:
            return False
        raise
    return True


def _recovery(ask: _Ask) -> Value:
    (field,) = ask("nvmlDeviceGetFieldValues", [_RECOVERY_FIELD])
    if field.nvmlReturn:
        # A driver that does not know a field reports an invalid number.
        code = int(field.nvmlReturn)
        code = NOT_SUPPORTED if code == INVALID_ARGUMENT else code
        raise RefusedError(code, f"NVML refuses the field with error {code}")
    return int(field.value.uiVal)


def _remapped_rows(ask: _Ask) -> Value:
    corrected, uncorrected, is_pending, has_failed = ask("nvmlDeviceGetRemappedRows")
    return {
        "corrected": int(corrected),
        "uncorrected": int(uncorrected),
        "is_pending": bool(is_pending),
        "has_failed": bool(has_failed),
    }


def _ecc_mode(ask: _Ask) -> Value:
    now, pending = ask("nvmlDeviceGetEccMode")
    (default,) = ask("nvmlDeviceGetDefaultEccMode")
    return {"now": bool(now), "pending": bool(pending), "default": bool(default)}


def _ecc_errors(ask: _Ask) -> Value:
    return {
        name: int(ask("nvmlDeviceGetMemoryErrorCounter", *which))
        for name, which in (
            ("sram_uncorrected", (_UNCORRECTED, _SINCE_LOADED, _SRAM)),
            ("sram_uncorrected_ever", (_UNCORRECTED, _EVER, _SRAM)),
            ("sram_corrected", (_CORRECTED, _SINCE_LOADED, _SRAM)),
            ("dram_corrected", (_CORRECTED, _SINCE_LOADED, _DRAM)),
        )
    }


def _clock_events(ask: _Ask) -> Value:
    try:
        return int(ask("nvmlDeviceGetCurrentClocksEventReasons"))
    except RefusedError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        return int(ask("nvmlDeviceGetCurrentClocksThrottleReasons"))


def _pcie(ask: _Ask) -> Value:
    return {
        "width": int(ask("nvmlDeviceGetCurrPcieLinkWidth")),
        "max_width": int(ask("nvmlDeviceGetMaxPcieLinkWidth")),
        "generation": int(ask("nvmlDeviceGetCurrPcieLinkGeneration")),
        "max_generation": int(ask("nvmlDeviceGetMaxPcieLinkGeneration")),
    }


def _power_limit(ask: _Ask) -> Value:
    return {
        "enforced": ask("nvmlDeviceGetEnforcedPowerLimit") / 1000,
        "default": ask("nvmlDeviceGetPowerManagementDefaultLimit") / 1000,
    }


def _nvlinks(ask: _Ask) -> Value:
    found: list[bool] = []
    for link in range(_MAX_LINKS):
        try:
            found.append(bool(ask("nvmlDeviceGetNvLinkState", link)))
        except RefusedError as error:
            # Numbers of links that it does not have may lie between others.
            if error.code not in {NOT_SUPPORTED, INVALID_ARGUMENT}:
                raise
    return found


def _processes(ask: _Ask) -> Value:
    computing = _list_processes(ask, "nvmlDeviceGetComputeRunningProcesses")
    drawing = _drawing(ask) if computing else set[int]()
    return [
        {"pid": int(each.pid), "memory_bytes": each.usedGpuMemory}
        for each in computing
        if int(each.pid) not in drawing
    ]


def _drawing(ask: _Ask) -> set[int]:
    """Return the processes that draw: a desktop's do that, and compute besides."""
    try:
        processes = _list_processes(ask, "nvmlDeviceGetGraphicsRunningProcesses")
    except RefusedError:
        return set()
    return {int(each.pid) for each in processes}


def _list_processes(ask: _Ask, name: str) -> Any:  # noqa: ANN401
    try:
        return ask(name)
    except RefusedError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        # Before release 510 the driver has but the second form.
        return ask(f"{name}_v2")


def _near_cpus(ask: _Ask) -> Value:
    words = ask("nvmlDeviceGetCpuAffinity", _CPU_WORDS)
    return format_list(members(sum(int(w) << 64 * n for n, w in enumerate(words))))


_GPU: dict[GpuQuestion, Callable[[_Ask], Value]] = {
    GpuQuestion.TITLE: _texts("nvmlDeviceGetName"),
    GpuQuestion.BUS_ID: lambda ask: plain_address(
        _text(ask("nvmlDeviceGetPciInfo").busId)
    ),
    GpuQuestion.CAPABILITY: lambda ask: [
        int(part) for part in ask("nvmlDeviceGetCudaComputeCapability")
    ],
    GpuQuestion.VBIOS: _texts("nvmlDeviceGetVbiosVersion"),
    GpuQuestion.GSP: _texts("nvmlDeviceGetGspFirmwareVersion"),
    GpuQuestion.INFOROM: _has_valid_inforom,
    GpuQuestion.RECOVERY: _recovery,
    GpuQuestion.REMAPPED_ROWS: _remapped_rows,
    GpuQuestion.ECC_MODE: _ecc_mode,
    GpuQuestion.ECC_ERRORS: _ecc_errors,
    GpuQuestion.CLOCK_EVENTS: _clock_events,
    GpuQuestion.MARGIN: _number("nvmlDeviceGetMarginTemperature"),
    GpuQuestion.PCIE: _pcie,
    GpuQuestion.POWER_LIMIT: _power_limit,
    GpuQuestion.NVLINKS: _nvlinks,
    GpuQuestion.PERSISTENCE: lambda ask: bool(ask("nvmlDeviceGetPersistenceMode")),
    GpuQuestion.MIG: lambda ask: bool(ask("nvmlDeviceGetMigMode")[0]),
    GpuQuestion.COMPUTE_MODE: _number("nvmlDeviceGetComputeMode"),
    GpuQuestion.PROCESSES: _processes,
    GpuQuestion.BUSY: lambda ask: int(ask("nvmlDeviceGetUtilizationRates").gpu),
    GpuQuestion.NEAR_CPUS: _near_cpus,
}
