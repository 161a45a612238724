"""Checks of the health of GPUs: memory, clocks, temperature and firmware."""

from ronde.check.check import FAIL, WARN, Problem, Problems, check
from ronde.check.fleet import Fleet, Value
from ronde.check.gpu.nvml import each_gpu, fold_gpus, odd_gpus

_MAX_UNCORRECTED_ROWS = 512
_MAX_SRAM_CORRECTED = 10_000
_MAX_DRAM_CORRECTED = 20_000_000
_MAX_SRAM_UNCORRECTED_EVER = 4
_MIN_MARGIN_CELSIUS = 5

_RESET = "stop all programs on the GPU, then: sudo nvidia-smi --gpu-reset -i N"
_REPLACE = "have the GPU replaced"
ADVICE = {
    1: ("a reset of the GPU", _RESET),
    2: ("a reboot of the host", "sudo reboot"),
    3: ("no more peer access", "end the jobs that use peers, then reset the GPU"),
    4: ("an end of its jobs, then a reset", _RESET),
    5: ("a recovery of the IMEX domain", "sudo systemctl restart nvidia-imex"),
    6: ("a reset of the bus", "stop all programs on the GPU, then reset its PCI slot"),
    7: ("a reboot of the whole system", "power the host off and on"),
}
"""The driver's advice and the command to follow it, by NVML's number."""

_CLOCK_EVENTS = (
    (0x80, FAIL, "the power supply slows it (power brake slowdown)"),
    (0x40, FAIL, "it is too hot (hardware thermal slowdown)"),
    (0x08, WARN, "its hardware has halved its clocks (hardware slowdown)"),
    (0x20, WARN, "it is hot (software thermal slowdown)"),
)
"""NVML's bits with severity and message, the worst first."""


@each_gpu(FAIL, "gpu.recovery_action")
def gpu_advice(action: Value) -> Problems:
    """The driver advises no recovery action for any GPU.

    reads: NVML's field 230, the recovery action
    threshold: 0 (none)
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261), GET_GPU_RECOVERY_ACTION; actions 6 and
        7: NVML's change log for 615
    fix: stop all programs on the GPU, then: sudo nvidia-smi --gpu-reset -i N
    needs: an NVIDIA GPU, a driver from 570 on
    why: The GPU had an error that it cannot recover from by itself.
    """
    if action:
        message, fix = ADVICE.get(action, (f"action {action}", _RESET))
        yield Problem(f"the driver advises {message}", fix=fix)


@each_gpu(FAIL, "gpu.remapped_rows")
def gpu_rows(rows: Value) -> Problems:
    """Broken rows of GPU memory have been replaced.

    reads: the remapped rows in NVML
    threshold: no failed and no pending row, and at most 512 rows replaced after
        uncorrectable errors
    source: Azure's node health checks 0e0a1ac (azure_gpu_ecc.nhc); 512: NVIDIA's GPU
        Memory Error Management, RMA Policy, and DCGM 72fa3fe
    fix: stop all programs on the GPU, then: sudo nvidia-smi --gpu-reset -i N
    needs: an NVIDIA GPU from Ampere on
    why: Errors in these rows end jobs. Until the reset, their pages are not used;
        without spare rows, more jobs end.
    """
    if rows["has_failed"]:
        yield Problem("a broken row of its memory could not be replaced", fix=_REPLACE)
    if rows["is_pending"]:
        yield Problem("a broken row of its memory waits to be replaced", fix=_RESET)
    if rows["uncorrected"] > _MAX_UNCORRECTED_ROWS:
        message = f"{rows['uncorrected']} rows of its memory were replaced"
        yield Problem(message, fix=_REPLACE)


@each_gpu(FAIL, "gpu.ecc_errors")
def gpu_ecc_errors(counts: Value) -> Problems:
    """GPUs had no uncorrectable ECC errors, and few corrected ones.

    reads: the error counters of caches (SRAM) and memory (DRAM) in NVML
    threshold: since the driver was loaded: 0 uncorrectable and 10000 corrected errors
        in caches, and 20000000 corrected errors in memory; since manufacture: 4
        uncorrectable errors in caches
    source: Azure's node health checks 0e0a1ac (azure_gpu_ecc.nhc and
        nd96isr_h100_v5.conf), which also allow 0 since manufacture; 4 since
        manufacture: Stas Bekman's ML Engineering 744d01e (nvidia/debug.md), similar to
        NVIDIA's RMA policy, which counts by bank
    fix: stop all programs on the GPU, then: sudo nvidia-smi --gpu-reset -i N
    needs: an NVIDIA GPU with ECC
    why: Uncorrectable errors end the job, and often follow many corrected errors.
    """
    ever = counts["sram_uncorrected_ever"]
    if ever > _MAX_SRAM_UNCORRECTED_EVER:
        message = f"{ever} uncorrectable errors in its caches since it was made"
        yield Problem(message, fix=_REPLACE)
    for name, limit, message in (
        ("sram_uncorrected", 0, "uncorrectable errors in its caches"),
        ("sram_corrected", _MAX_SRAM_CORRECTED, "corrected errors in its caches"),
        ("dram_corrected", _MAX_DRAM_CORRECTED, "corrected errors in its memory"),
    ):
        if counts[name] > limit:
            yield Problem(f"{counts[name]} {message} since the last start", fix=_RESET)


@each_gpu(FAIL, "gpu.clock_events")
def gpu_clocks(reasons: Value) -> Problems:
    """Nothing reduces the clocks of the GPUs.

    reads: the current reasons for reduced clocks in NVML
    threshold: no slowdown because of heat or power supply; a hardware slowdown without
        another reason is a warning
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261): clocks event reasons; gpud 4a8de33
        (hw-slowdown), which waits for 6 in 10 minutes; ronde's choice: the warnings
    fix: check fans, airflow and power supplies; nvidia-smi -q -d PERFORMANCE
    needs: an NVIDIA GPU
    why: One slow GPU slows every step of all ranks.
    """
    for bit, severity, message in _CLOCK_EVENTS:
        if reasons & bit:
            yield Problem(message, severity)


@each_gpu(WARN, "gpu.margin_celsius")
def gpu_temperature(margin: Value) -> Problems:
    """GPUs are well below their temperature limit.

    reads: the margin temperature in NVML
    threshold: 5 degrees Celsius below the limit; a margin of 0 or less is not a reading
        (H100, older GPUs)
    source: gpud 4a8de33 (temperature/component.go) skips 0 and less, and has no default
        limit; ronde's choice: 5, since idle GPUs are tens of degrees below the limit
    fix: check fans, dust and airflow
    needs: an NVIDIA GPU from Ada on, and a driver from 570 on
    why: At the limit the GPU lowers its clocks, and all ranks wait.
    """
    if 0 < margin < _MIN_MARGIN_CELSIUS:
        yield Problem(f"{margin} degrees Celsius below its limit")


@check(FAIL, "gpu.titles", optional=("gpu.has_valid_inforom", "gpu.vbios"))
def gpu_firmware(fleet: Fleet) -> Problems:
    """GPUs of one model have the same VBIOS and an intact InfoROM.

    reads: the VBIOS version in NVML, and NVML's validation of the InfoROM
    threshold: a valid InfoROM; another VBIOS than most GPUs of the model is a warning
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261): NVML_ERROR_CORRUPTED_INFOROM; ronde's
        choice: equal versions
    fix: install the firmware version of the other GPUs; ask the vendor for it
    needs: an NVIDIA GPU; for the comparison three GPUs of one model
    why: Firmware controls clocks, power and errors; the InfoROM stores error counters.
    """
    fix = "have the GPU replaced, or its InfoROM rewritten by the vendor"
    damaged = Problem("its InfoROM is damaged", fix=fix)
    for host, valid in fleet.known("gpu.has_valid_inforom").items():
        found = (damaged if is_valid is False else None for is_valid in valid)
        yield from fold_gpus(host, found)
    yield from odd_gpus(fleet, "gpu.vbios", lambda v: f"VBIOS {v}", WARN)
