"""Whether GPUs are in good health: memory, clocks, temperature, the driver's log."""

from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import Value
from ronde.check.families.gpu_troubles import FINE, Trouble, each_gpu, odd_gpus
from ronde.check.fleet import Fleet

_MAX_UNCORRECTED_ROWS = 512
_MAX_SRAM_CORRECTED = 10_000
_MAX_DRAM_CORRECTED = 20_000_000
_MAX_SRAM_UNCORRECTED_EVER = 4
_MIN_MARGIN_CELSIUS = 5
_RECENT_S = 2 * 3600.0

_RESET = "stop what uses the GPU, then: sudo nvidia-smi --gpu-reset -i N"
_ADVICE = {
    1: ("a reset of the GPU", _RESET),
    2: ("a reboot of the host", "sudo reboot"),
    3: ("no more peer access", "end the jobs that use peers, then reset the GPU"),
    4: ("an end of its jobs, then a reset", _RESET),
    5: ("a recovery of the IMEX domain", "sudo systemctl restart nvidia-imex"),
    6: ("a reset of the bus", "stop what uses the GPU, then reset its PCI slot"),
    7: ("a reboot of the whole system", "power the host off and on"),
}
"""What the driver advises, and what to type, by NVML's number."""

_CLOCK_EVENTS = (
    (0x80, Severity.FAIL, "the power supply brakes it (power brake slowdown)"),
    (0x40, Severity.FAIL, "it is too hot (hardware thermal slowdown)"),
    (0x08, Severity.WARN, "its hardware has halved its clocks (hardware slowdown)"),
    (0x20, Severity.WARN, "it is hot (software thermal slowdown)"),
)
"""Bit of the reason, the worst first."""

_BAD_XIDS = {
    *(48, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 94, 95, 119, 120),
    *range(56, 59),
    *range(144, 151),
}
_XIDS = {
    13: "error in a kernel",
    31: "access to memory that is not its own",
    43: "a kernel was stopped",
    45: "a program ended and was cleaned up",
    48: "two bits wrong in memory",
    62: "its micro-controller halted",
    63: "a row of memory waits to be replaced",
    64: "a row of memory could not be replaced",
    74: "error of an NVLink",
    79: "it has fallen off the bus",
    92: "many single bits wrong in memory",
    94: "memory error, contained",
    95: "memory error, not contained",
    119: "its system processor does not answer",
    120: "error of its system processor",
}


def _judge_recovery(action: Value) -> Trouble:
    if not action:
        return FINE
    what, fix = _ADVICE.get(action, (f"action {action}", ""))
    return Trouble(Severity.FAIL, f"the driver advises {what}", fix)


def _judge_rows(rows: Value) -> Trouble:
    if rows["has_failed"]:
        what = "a broken row of its memory could not be replaced"
        return Trouble(Severity.FAIL, what, "have the GPU replaced")
    if rows["is_pending"]:
        return Trouble(
            Severity.FAIL, "a broken row of its memory waits to be replaced", _RESET
        )
    if rows["uncorrected"] > _MAX_UNCORRECTED_ROWS:
        what = f"{rows['uncorrected']} rows of its memory were replaced"
        return Trouble(Severity.FAIL, what, "have the GPU replaced")
    return FINE


def _judge_ecc_errors(counts: Value) -> Trouble:
    ever = counts["sram_uncorrected_ever"]
    if ever > _MAX_SRAM_UNCORRECTED_EVER:
        what = f"{ever} uncorrectable errors in its caches since it was made"
        return Trouble(Severity.FAIL, what, "have the GPU replaced")
    for name, limit, what in (
        ("sram_uncorrected", 0, "uncorrectable errors in its caches"),
        ("sram_corrected", _MAX_SRAM_CORRECTED, "corrected errors in its caches"),
        ("dram_corrected", _MAX_DRAM_CORRECTED, "corrected errors in its memory"),
    ):
        if counts[name] > limit:
            return Trouble(Severity.FAIL, f"{counts[name]} {what} since the last start")
    return FINE


def _judge_ecc_mode(mode: Value) -> Trouble:
    if mode["now"] != mode["pending"]:
        after = "on" if mode["pending"] else "off"
        what = f"ECC will be {after} after the next reboot, and is not now"
        return Trouble(Severity.WARN, what, "reboot the host")
    if mode["default"] and not mode["now"]:
        return Trouble(Severity.WARN, "ECC is off, errors in memory go unseen")
    return FINE


def _judge_clocks(reasons: Value) -> Trouble:
    for bit, severity, what in _CLOCK_EVENTS:
        if reasons & bit:
            return Trouble(severity, what)
    return FINE


def _judge_margin(margin: Value) -> Trouble:
    if margin <= 0:
        what = "as hot as it may be: its clocks are lowered"
        return Trouble(Severity.FAIL, what)
    if margin < _MIN_MARGIN_CELSIUS:
        return Trouble(Severity.WARN, f"{margin} degrees Celsius below its limit")
    return FINE


def _judge_power(limit: Value) -> Trouble:
    if limit["enforced"] >= limit["default"]:
        return FINE
    what = f"limited to {limit['enforced']:g} W, by default {limit['default']:g} W"
    return Trouble(
        Severity.WARN, what, f"sudo nvidia-smi -i N -pl {limit['default']:g}"
    )


def _judge_inforom(is_valid: Value) -> Trouble:
    return FINE if is_valid else Trouble(Severity.FAIL, "its InfoROM is damaged")


def _judge_xids(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("gpu.xids"):
        for each in facts.values["gpu.xids"]:
            if each["age_s"] > _RECENT_S:
                continue
            if each["kind"] == "Xid":
                is_bad = each["code"] in _BAD_XIDS
            else:
                is_bad = each["is_fatal"]
            title = _XIDS.get(each["code"], "") if each["kind"] == "Xid" else ""
            what = f"{each['kind']} {each['code']} {title}".rstrip()
            what += f", {each['times']} times" if each["times"] > 1 else ""
            what += f", {each['age_s'] / 60:.0f} minutes ago at {each['address']}"
            severity = Severity.FAIL if is_bad else Severity.INFORM
            fix = "" if is_bad else "look at the program that ran then"
            yield Finding("gpu-xid", severity, facts.host, what, fix=fix)


_judge_vbios = odd_gpus(
    "gpu-firmware", Severity.WARN, "gpu.vbios", lambda version: f"VBIOS {version}"
)
_judge_gsp = odd_gpus(
    "gpu-firmware", Severity.WARN, "gpu.gsp_firmware", lambda version: f"GSP {version}"
)


def _judge_firmware(fleet: Fleet) -> Iterator[Finding]:
    yield from _judge_vbios(fleet)
    yield from _judge_gsp(fleet)


CHECKS = (
    Check(
        id="gpu-advice",
        family=Family.GPU,
        title="the driver advises nothing for any GPU",
        reads="NVML's field 230, the recovery action",
        threshold="0, none",
        source="NVIDIA's NVML manual: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        severity=Severity.FAIL,
        fix=_RESET,
        needs="an NVIDIA GPU, a driver of 2025 or later",
        why="The GPU has met an error that it cannot recover from by itself.",
        facts=("gpu.recovery_action",),
        judge=each_gpu("gpu-advice", "gpu.recovery_action", _judge_recovery),
    ),
    Check(
        id="gpu-rows",
        family=Family.GPU,
        title="no broken row of a GPU's memory is in use",
        reads="NVML's remapped rows",
        threshold="none failed, none pending, at most "
        f"{_MAX_UNCORRECTED_ROWS} replaced after uncorrectable errors",
        source="Azure's node health checks; NVIDIA's GPU memory error management",
        severity=Severity.FAIL,
        fix=_RESET,
        needs="an NVIDIA GPU from Ampere on",
        why="The next access to the row ends the job, or gives a wrong number.",
        facts=("gpu.remapped_rows",),
        judge=each_gpu("gpu-rows", "gpu.remapped_rows", _judge_rows),
    ),
    Check(
        id="gpu-ecc-errors",
        family=Family.GPU,
        title="GPUs have met no errors that ECC cannot correct, and few that it can",
        reads="NVML's error counters of caches (SRAM) and memory (DRAM)",
        threshold="caches: no uncorrectable since the driver was loaded, "
        f"{_MAX_SRAM_UNCORRECTED_EVER} ever, {_MAX_SRAM_CORRECTED} corrected; memory: "
        f"{_MAX_DRAM_CORRECTED} corrected",
        source="Azure's node health checks; 4 ever: Stas Bekman's ML engineering book",
        severity=Severity.FAIL,
        fix=_RESET,
        needs="an NVIDIA GPU with ECC",
        why="Uncorrectable errors end the job; many corrected ones announce them.",
        facts=("gpu.ecc_errors",),
        judge=each_gpu("gpu-ecc-errors", "gpu.ecc_errors", _judge_ecc_errors),
    ),
    Check(
        id="gpu-ecc-mode",
        family=Family.GPU,
        title="ECC is on where it is on by default",
        reads="NVML's ECC mode: now, after the next reboot, by default",
        threshold="all the same",
        source="NVIDIA's NVML manual: nvmlDeviceGetDefaultEccMode",
        severity=Severity.WARN,
        fix="sudo nvidia-smi -e 1, then reboot",
        needs="an NVIDIA GPU with ECC",
        why="A flipped bit changes weights without a word.",
        facts=("gpu.ecc_mode",),
        judge=each_gpu("gpu-ecc-mode", "gpu.ecc_mode", _judge_ecc_mode),
    ),
    Check(
        id="gpu-clocks",
        family=Family.GPU,
        title="nothing slows the GPUs' clocks down",
        reads="NVML's reasons for clocks below the highest, at this moment",
        threshold="no slowdown by heat or by the power supply; a bare hardware "
        "slowdown, which also shows for a moment when clocks change, is a warning",
        source="NVIDIA's NVML manual: clocks event reasons; gpud",
        severity=Severity.FAIL,
        fix="check fans, airflow and power supplies; nvidia-smi -q -d PERFORMANCE",
        needs="an NVIDIA GPU",
        why="One slow GPU slows every step of all ranks.",
        facts=("gpu.clock_events",),
        judge=each_gpu("gpu-clocks", "gpu.clock_events", _judge_clocks),
    ),
    Check(
        id="gpu-temperature",
        family=Family.GPU,
        title="GPUs are well below their temperature limit",
        reads="NVML's margin temperature",
        threshold=f"{_MIN_MARGIN_CELSIUS} degrees Celsius below; at the limit is worse",
        source="0: gpud; 5: ronde's own",
        severity=Severity.FAIL,
        fix="check fans, dust and airflow",
        needs="an NVIDIA GPU from Hopper on",
        why="At the limit the clocks go down, and all ranks wait.",
        facts=("gpu.margin_celsius",),
        judge=each_gpu("gpu-temperature", "gpu.margin_celsius", _judge_margin),
    ),
    Check(
        id="gpu-power-limit",
        family=Family.GPU,
        title="no GPU has a power limit below its default",
        reads="NVML's enforced and default power limit",
        threshold="the default",
        source="ronde's own",
        severity=Severity.WARN,
        fix="sudo nvidia-smi -pl WATTS",
        needs="an NVIDIA GPU",
        why="Under load its clocks stay lower than those of the others.",
        facts=("gpu.power_limit_w",),
        judge=each_gpu("gpu-power-limit", "gpu.power_limit_w", _judge_power),
    ),
    Check(
        id="gpu-inforom",
        family=Family.GPU,
        title="the GPUs' own records are undamaged",
        reads="NVML's validation of the InfoROM's checksums",
        threshold="valid",
        source="NVIDIA's NVML manual: NVML_ERROR_CORRUPTED_INFOROM",
        severity=Severity.FAIL,
        fix="have the GPU replaced, or its InfoROM written anew by the vendor",
        needs="an NVIDIA GPU",
        why="Broken rows and error counts of its past are lost, and some features too.",
        facts=("gpu.has_valid_inforom",),
        judge=each_gpu("gpu-inforom", "gpu.has_valid_inforom", _judge_inforom),
    ),
    Check(
        id="gpu-firmware",
        family=Family.GPU,
        title="GPUs of one model have the same firmware",
        reads="NVML's versions of VBIOS and GSP firmware",
        threshold="what most GPUs of the model have",
        source="ronde's own: what differs is looked at first",
        severity=Severity.WARN,
        fix="ask the vendor for the firmware of the others",
        needs="three GPUs of one model",
        why="Clocks, power and errors are handled by firmware.",
        facts=("gpu.vbios", "gpu.titles"),
        judge=_judge_firmware,
    ),
    Check(
        id="gpu-xid",
        family=Family.GPU,
        title="the driver has logged no error of a GPU of late",
        reads="Xid and SXid in /dev/kmsg",
        threshold=f"no Xid of the hardware and no fatal SXid for {_RECENT_S / 3600:g} "
        "hours; those of programs are told only",
        source="Azure's node health checks; NVIDIA's catalogue of Xid errors; 144 to "
        "150: gpud",
        severity=Severity.FAIL,
        fix="look the number up in NVIDIA's catalogue of Xid errors; drain the host",
        needs="an NVIDIA GPU; root where kernel.dmesg_restrict is 1",
        why="What broke once in two hours will break again.",
        facts=("gpu.xids",),
        judge=_judge_xids,
    ),
)
