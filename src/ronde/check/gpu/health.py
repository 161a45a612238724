"""Whether GPUs are in good health: memory, clocks, temperature, firmware, Xids."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from ronde.check.check import FAIL, INFORM, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.nvml import each_gpu, fold_gpus, odd_gpus
from ronde.topology.pci import plain_address

_MAX_UNCORRECTED_ROWS = 512
_MAX_SRAM_CORRECTED = 10_000
_MAX_DRAM_CORRECTED = 20_000_000
_MAX_SRAM_UNCORRECTED_EVER = 4
_MIN_MARGIN_CELSIUS = 5

_RESET = "stop what uses the GPU, then: sudo nvidia-smi --gpu-reset -i N"
_REPLACE = "have the GPU replaced"
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
    (0x80, FAIL, "the power supply brakes it (power brake slowdown)"),
    (0x40, FAIL, "it is too hot (hardware thermal slowdown)"),
    (0x08, WARN, "its hardware has halved its clocks (hardware slowdown)"),
    (0x20, WARN, "it is hot (software thermal slowdown)"),
)
"""Bit of the reason, the worst first."""


@each_gpu(FAIL, "gpu.recovery_action")
def gpu_advice(action: Value) -> Problems:
    """The driver asks for no recovery of any GPU.

    reads: NVML's field 230, the recovery action
    threshold: 0, none
    source: NVIDIA's NVML manual: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    fix: stop what uses the GPU, then: sudo nvidia-smi --gpu-reset -i N
    needs: an NVIDIA GPU, a driver of 2025 or later
    why: The GPU has met an error that it cannot recover from by itself.
    """
    if action:
        what, fix = _ADVICE.get(action, (f"action {action}", ""))
        yield Problem(f"the driver advises {what}", fix=fix)


@each_gpu(FAIL, "gpu.remapped_rows")
def gpu_rows(rows: Value) -> Problems:
    """No broken row of a GPU's memory is in use.

    reads: NVML's remapped rows
    threshold: none failed, none pending, at most 512 replaced (uncorrectable errors)
    source: Azure's node health checks; NVIDIA's GPU memory error management
    fix: stop what uses the GPU, then: sudo nvidia-smi --gpu-reset -i N
    needs: an NVIDIA GPU from Ampere on
    why: The next access to the row ends the job, or gives a wrong number.
    """
    if rows["has_failed"]:
        yield Problem("a broken row of its memory could not be replaced", fix=_REPLACE)
    if rows["is_pending"]:
        yield Problem("a broken row of its memory waits to be replaced", fix=_RESET)
    if rows["uncorrected"] > _MAX_UNCORRECTED_ROWS:
        what = f"{rows['uncorrected']} rows of its memory were replaced"
        yield Problem(what, fix=_REPLACE)


@each_gpu(FAIL, "gpu.ecc_errors")
def gpu_ecc_errors(counts: Value) -> Problems:
    """GPUs had no errors that ECC cannot correct, and few others.

    reads: NVML's error counters of caches (SRAM) and memory (DRAM)
    threshold: caches: 0 uncorrectable (4 ever), 10000 corrected; memory: 20000000
    source: Azure's node health checks; 4 ever: Stas Bekman's ML engineering book
    fix: stop what uses the GPU, then: sudo nvidia-smi --gpu-reset -i N
    needs: an NVIDIA GPU with ECC
    why: Uncorrectable errors end the job; many corrected ones announce them.
    """
    ever = counts["sram_uncorrected_ever"]
    if ever > _MAX_SRAM_UNCORRECTED_EVER:
        what = f"{ever} uncorrectable errors in its caches since it was made"
        yield Problem(what, fix=_REPLACE)
    for name, limit, what in (
        ("sram_uncorrected", 0, "uncorrectable errors in its caches"),
        ("sram_corrected", _MAX_SRAM_CORRECTED, "corrected errors in its caches"),
        ("dram_corrected", _MAX_DRAM_CORRECTED, "corrected errors in its memory"),
    ):
        if counts[name] > limit:
            yield Problem(f"{counts[name]} {what} since the last start")


@each_gpu(FAIL, "gpu.clock_events")
def gpu_clocks(reasons: Value) -> Problems:
    """Nothing slows the GPUs' clocks down.

    reads: NVML's reasons for clocks below the highest, at this moment
    threshold: no slowdown by heat or power supply; a bare hardware slowdown warns
    source: NVIDIA's NVML manual: clocks event reasons; gpud
    fix: check fans, airflow and power supplies; nvidia-smi -q -d PERFORMANCE
    needs: an NVIDIA GPU
    why: One slow GPU slows every step of all ranks.
    """
    for bit, severity, what in _CLOCK_EVENTS:
        if reasons & bit:
            yield Problem(what, severity)


@each_gpu(FAIL, "gpu.margin_celsius")
def gpu_temperature(margin: Value) -> Problems:
    """GPUs are well below their temperature limit.

    reads: NVML's margin temperature
    threshold: 5 degrees Celsius below; at the limit is worse
    source: 0: gpud; 5: ronde's own
    fix: check fans, dust and airflow
    needs: an NVIDIA GPU from Hopper on
    why: At the limit the clocks go down, and all ranks wait.
    """
    if margin <= 0:
        yield Problem("as hot as it may be: its clocks are lowered")
    elif margin < _MIN_MARGIN_CELSIUS:
        yield Problem(f"{margin} degrees Celsius below its limit", WARN)


@each_gpu(WARN, "gpu.power_limit_w")
def gpu_power_limit(limit: Value) -> Problems:
    """No GPU has a power limit below its default.

    reads: NVML's enforced and default power limit
    threshold: the default
    source: ronde's own
    fix: sudo nvidia-smi -pl WATTS
    needs: an NVIDIA GPU
    why: Under load its clocks stay lower than those of the others.
    """
    if limit["enforced"] < limit["default"]:
        what = f"limited to {limit['enforced']:g} W, by default {limit['default']:g} W"
        yield Problem(what, fix=f"sudo nvidia-smi -i N -pl {limit['default']:g}")


_FIRMWARE = ("gpu.has_valid_inforom", "gpu.vbios", "gpu.gsp_firmware")


@check(FAIL, "gpu.titles", besides=_FIRMWARE)
def gpu_firmware(fleet: Fleet) -> Problems:
    """GPUs of one model have the same firmware, and no damaged InfoROM.

    reads: NVML's VBIOS and GSP versions, and its validation of the InfoROM
    threshold: a valid InfoROM; versions as on most GPUs of the model, else a warning
    source: NVIDIA's NVML manual: NVML_ERROR_CORRUPTED_INFOROM; versions: ronde's own
    fix: install the firmware of the others; ask the vendor for it
    needs: an NVIDIA GPU; to compare, three of one model
    why: Firmware controls clocks, power and errors; the InfoROM keeps counts of errors.
    """
    damaged = Problem(
        "its InfoROM is damaged",
        fix="have the GPU replaced, or its InfoROM rewritten by the vendor",
    )
    for host, valid in fleet.known("gpu.has_valid_inforom").items():
        found = (damaged if is_valid is False else None for is_valid in valid)
        yield from fold_gpus(host, found)
    yield from odd_gpus(fleet, "gpu.vbios", lambda v: f"VBIOS {v}", WARN)
    yield from odd_gpus(fleet, "gpu.gsp_firmware", lambda v: f"GSP {v}", WARN)


_RECENT_S = 2 * 3600.0
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

_RECORD_BYTES = 8192
_MAX_BYTES = 16 << 20
_XID = re.compile(
    r"(?P<kind>S?Xid) \(PCI:(?P<address>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?P<rest>.*)"
)
_RECORD = re.compile(r"\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>.*)")


def read_xids(root: str) -> list[Value]:
    """Return what the log has of each kind, GPU and number: the last one, and how many.

    Whether an error is fatal the log has for SXid only.
    """
    now_s = read_clock_s(root)
    found: dict[tuple[str, str, int], Value] = {}
    for record in _records(f"{root}/dev/kmsg"):
        at, xid = _RECORD.match(record), _XID.search(record)
        if at is None or xid is None:
            continue
        # The driver leaves out the function, which is 0.
        text = xid["address"]
        address = plain_address(text) or plain_address(f"{text}.0") or text
        key = xid["kind"], address, int(xid["code"])
        found[key] = {
            "kind": key[0],
            "address": key[1],
            "code": key[2],
            "times": found[key]["times"] + 1 if key in found else 1,
            "age_s": max(0.0, round(now_s - int(at["us"]) / 1e6, 1)),
            "is_fatal": ", Fatal" in xid["rest"],
        }
    return list(found.values())


def read_clock_s(root: str) -> float:
    """Return the time by the clock of the log: seconds since the start of the host."""
    if not root:
        # Not /proc/uptime: that counts sleep, and a container's may be its own.
        return time.monotonic()
    return float(Path(f"{root}/proc/uptime").read_text("ascii").split()[0])


def _records(path: str) -> Iterator[str]:
    """Yield the kernel's log, the oldest first; one read gives one record."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        rest, num_bytes = b"", 0
        while num_bytes < _MAX_BYTES:
            try:
                chunk = os.read(fd, _RECORD_BYTES)
            except BrokenPipeError:
                # Records were overwritten meanwhile; the next one is there.
                continue
            except BlockingIOError:
                break
            if not chunk:
                break
            num_bytes += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
    finally:
        os.close(fd)


@each_host(FAIL, "gpu.xids")
def gpu_xid(values: Values, _: Fleet) -> Problems:
    """The driver has logged no recent GPU error.

    reads: Xid and SXid in /dev/kmsg
    threshold: no Xid of hardware, no fatal SXid for 2 hours; others are only shown
    source: Azure's node health checks; NVIDIA's catalogue of Xids; 144 to 150: gpud
    fix: look the number up in NVIDIA's catalogue of Xid errors; drain the host
    needs: an NVIDIA GPU; root where kernel.dmesg_restrict is 1
    why: A GPU that failed in the last two hours will probably fail again.
    """
    for each in values["gpu.xids"]:
        if each["age_s"] > _RECENT_S:
            continue
        is_xid, code = each["kind"] == "Xid", each["code"]
        is_bad = code in _BAD_XIDS if is_xid else each["is_fatal"]
        what = f"{each['kind']} {code} {_XIDS.get(code, '') if is_xid else ''}".rstrip()
        what += f", {each['times']} times" if each["times"] > 1 else ""
        what += f", {each['age_s'] / 60:.0f} minutes ago at {each['address']}"
        fix = "" if is_bad else "look at the program that ran then"
        yield Problem(what, FAIL if is_bad else INFORM, fix=fix)
