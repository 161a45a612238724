"""NVIDIA's driver answers, through the module ``pynvml``.

Each question is a few calls, made anew each time it is asked. Numbers of fields and
errors are NVML's own, which do not change; names of calls that a release of the module
or of the driver lacks are refused like what a GPU does not support.
"""

from collections.abc import Callable
from ctypes import byref
from typing import Any

from ronde.check.facts import Value
from ronde.check.nvml.questions import (
    ARGUMENT_VERSION_MISMATCH,
    CORRUPTED_INFOROM,
    FUNCTION_NOT_FOUND,
    GONE,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    GpuQuestion,
    HostQuestion,
    RefusedError,
)
from ronde.topology.cpu_sets import format_list, members
from ronde.topology.pci import plain_address

_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_LOADED, _EVER = 0, 1
_DRAM, _SRAM = 2, 7
_READ = 0
_PEER_UNKNOWN = 6
_RECOVERY_FIELD = 230
_MAX_LINKS = 36
_CPU_WORDS = 64


class NvmlDriver:
    """Answers for this host.

    Args:
        nvml: The module ``pynvml``, as ``open_nvml`` gives it.
    """

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401  a module without types
        self._nvml = nvml
        self._mismatch: Any = getattr(nvml, "NVMLLibraryMismatchError", ())

    def ask_host(self, question: HostQuestion) -> Value:
        """See ``Nvml``."""
        return _HOST[question](self._call)

    def ask_gpu(self, question: GpuQuestion, number: int) -> Value:
        """See ``Nvml``."""
        handle = self._call("nvmlDeviceGetHandleByIndex", number)

        def ask(name: str, *given: object) -> Any:  # noqa: ANN401
            return self._call(name, handle, *given)

        match question:
            case GpuQuestion.PEERS:
                return self._peers(ask, number)
            case GpuQuestion.FABRIC:
                return self._fabric(ask)
            case GpuQuestion.MEMORY:
                return self._memory(ask)
            case _:
                return _GPU[question](ask)

    def _call(self, name: str, *given: object) -> Any:  # noqa: ANN401
        function = getattr(self._nvml, name, None)
        if function is None:
            raise RefusedError(
                FUNCTION_NOT_FOUND, f"nvidia-ml-py is too old: it has no {name}"
            )
        try:
            return function(*given)
        except self._nvml.NVMLError as error:
            code = int(error.value)
            raise RefusedError(code, f"NVML says: {error}") from error
        except self._mismatch as error:
            # Not one of NVML's own: the module's word for a driver without a function.
            raise RefusedError(
                FUNCTION_NOT_FOUND, f"the driver is too old for nvidia-ml-py's {name}"
            ) from error

    def _peers(self, ask: "_Ask", number: int) -> list[int]:
        count = self._call("nvmlDeviceGetCount")
        return [
            0 if other == number else self._peer(ask, other) for other in range(count)
        ]

    def _peer(self, ask: "_Ask", other: int) -> int:
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

    def _memory(self, ask: "_Ask") -> Value:
        """Return how much is used without what the driver keeps for itself."""
        try:
            version = getattr(self._nvml, "nvmlMemory_v2", None)
            memory = ask("nvmlDeviceGetMemoryInfo", version)
        except RefusedError:
            # Before release 510 the driver has but the first form, which counts it.
            memory = ask("nvmlDeviceGetMemoryInfo")
        return {"total": int(memory.total), "used": int(memory.used)}

    def _fabric(self, ask: "_Ask") -> Value:
        """Return what the newest form of the question that is known here tells."""
        forms = ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")
        refusal = RefusedError(FUNCTION_NOT_FOUND, "nvidia-ml-py is too old")
        for form in forms:
            make = getattr(self._nvml, form, None)
            if make is None:
                continue
            told = make()
            try:
                ask("nvmlDeviceGetGpuFabricInfoV", byref(told))
            except RefusedError as error:
                refusal = error
                if error.code not in {ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT}:
                    break
                continue
            cluster = bytes(told.clusterUuid)
            return {
                "state": int(told.state),
                "status": int(told.status),
                "health": int(told.healthMask),
                "summary": int(getattr(told, "healthSummary", 0)),
                "clique": int(told.cliqueId),
                "cluster": cluster.hex() if any(cluster) else "",
            }
        raise refusal


_Ask = Callable[..., Any]


def _text(said: Any) -> str:  # noqa: ANN401
    # Older releases of the module have bytes.
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _texts(name: str) -> Callable[[_Ask], Value]:
    return lambda ask: _text(ask(name))


def _number(name: str) -> Callable[[_Ask], Value]:
    return lambda ask: int(ask(name))


def _cuda_version(ask: _Ask) -> Value:
    version = int(ask("nvmlSystemGetCudaDriverVersion_v2"))
    return [version // 1000, version % 1000 // 10]


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
        # A driver that does not know a field says that its number is invalid.
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
    def count(kind: int, since: int, where: int) -> int:
        return int(ask("nvmlDeviceGetMemoryErrorCounter", kind, since, where))

    return {
        "sram_uncorrected": count(_UNCORRECTED, _SINCE_LOADED, _SRAM),
        "sram_uncorrected_ever": count(_UNCORRECTED, _EVER, _SRAM),
        "sram_corrected": count(_CORRECTED, _SINCE_LOADED, _SRAM),
        "dram_corrected": count(_CORRECTED, _SINCE_LOADED, _DRAM),
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
            if error.code not in {NOT_SUPPORTED, INVALID_ARGUMENT}:
                raise
            # Numbers of links that it does not have may lie between others.
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


_HOST: dict[HostQuestion, Callable[[_Ask], Value]] = {
    HostQuestion.NUM_GPUS: _number("nvmlDeviceGetCount"),
    HostQuestion.DRIVER_VERSION: _texts("nvmlSystemGetDriverVersion"),
    HostQuestion.CUDA_VERSION: _cuda_version,
    HostQuestion.CONFIDENTIAL: lambda ask: bool(
        ask("nvmlSystemGetConfComputeState").ccFeature
    ),
}

_GPU: dict[GpuQuestion, Callable[[_Ask], Value]] = {
    GpuQuestion.TITLE: _texts("nvmlDeviceGetName"),
    GpuQuestion.UUID: _texts("nvmlDeviceGetUUID"),
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
    GpuQuestion.PCIE_REPLAYS: _number("nvmlDeviceGetPcieReplayCounter"),
    GpuQuestion.POWER_LIMIT: _power_limit,
    GpuQuestion.NVLINKS: _nvlinks,
    GpuQuestion.PERSISTENCE: lambda ask: bool(ask("nvmlDeviceGetPersistenceMode")),
    GpuQuestion.MIG: lambda ask: bool(ask("nvmlDeviceGetMigMode")[0]),
    GpuQuestion.COMPUTE_MODE: _number("nvmlDeviceGetComputeMode"),
    GpuQuestion.PROCESSES: _processes,
    GpuQuestion.BUSY: lambda ask: int(ask("nvmlDeviceGetUtilizationRates").gpu),
    GpuQuestion.NEAR_CPUS: _near_cpus,
}
