"""Query GPUs with ``nvidia-smi``, for hosts without nvidia-ml-py."""

import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from ronde.check.fleet import Value
from ronde.check.probing import UnreadableError
from ronde.topology.pci import plain_address

_DEADLINE_S = 20.0
_MISSING = "neither nvidia-ml-py nor nvidia-smi is installed: pip install nvidia-ml-py"
_ACTIONS = ("none", "reset", "reboot", "drain p2p", "drain and reset")
_ACTIVE = {  # by NVML's bit
    0x80: "hw_power_brake_slowdown",
    0x40: "hw_thermal_slowdown",
    0x20: "sw_thermal_slowdown",
    0x08: "hw_slowdown",
}
_STATES = {"not started": 1, "in progress": 2, "completed": 3}
# Each of these has two bits in NVML's fabric health.
_HEALTH = "bandwidth route_recovery_in_progress route_unhealthy access_timeout_recovery"
_SUMMARIES = {"healthy": 1, "unhealthy": 2, "limited capacity": 3}
_MEMORY = {"total": "total", "used": "used"}
_PCIE = {
    "width": "link_widths/current_link_width",
    "max_width": "link_widths/max_link_width",
    "generation": "pcie_gen/current_link_gen",
    "max_generation": "pcie_gen/max_link_gen",
}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NVLINK = re.compile(r"GPU (?P<gpu>\d+):|\s+Link \d+: (?P<state>.*)")


class NotShownError(Exception):
    """Raised if this version of nvidia-smi does not print a value."""


class FailedError(Exception):
    """Raised if nvidia-smi cannot query the driver; the message is nvidia-smi's."""


# CUDA's version, and the answers of each GPU by question: None if the question does not
# apply; missing if nvidia-smi does not print it.
SmiReport = tuple[list[int] | None, list[dict[str, Value]]]


def ask_smi() -> SmiReport:
    """Run nvidia-smi, and return the values that it prints.

    Raises:
        UnreadableError: nvidia-smi is not installed, or does not answer.
        FailedError: nvidia-smi cannot query the driver.
    """
    return read_smi(_run("-q", "-x"), _run("nvlink", "-s"))


def _run(*words: str) -> bytes:
    command = ["nvidia-smi", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=_DEADLINE_S
        )
    except OSError:
        raise UnreadableError(_MISSING) from None
    except subprocess.TimeoutExpired:
        why = f"nvidia-smi does not answer within {_DEADLINE_S:g} s"
        raise UnreadableError(why) from None
    if done.returncode and words[0] == "-q" and b"<gpu " not in done.stdout:
        lines = (done.stdout + done.stderr).decode(errors="replace").split("\n")
        raise FailedError(next((each for each in lines if each.strip()), "no reason"))
    return done.stdout


def read_smi(log: bytes, nvlinks: bytes) -> SmiReport:
    """Parse the output of ``nvidia-smi -q -x`` and ``nvidia-smi nvlink -s``."""
    try:
        top = ET.fromstring(log)  # noqa: S314  what root has installed
    except ET.ParseError as error:
        raise UnreadableError(
            f"the output of nvidia-smi -q -x is not XML: {error}"
        ) from error
    found = re.fullmatch(r"(\d+)\.(\d+)", top.findtext("cuda_version", "").strip())
    links: dict[int, list[bool]] = {}
    gpu = -1
    for each in _NVLINK.finditer(nvlinks.decode(errors="replace")):
        if each["gpu"]:
            gpu = int(each["gpu"])
        else:
            links.setdefault(gpu, []).append("inactive" not in each["state"])
    gpus = [read_answers(each) for each in top.findall("gpu")]
    for number, own in links.items():
        if 0 <= number < len(gpus):
            gpus[number]["nvlinks"] = own
    return [int(found[1]), int(found[2])] if found else None, gpus


def read_answers(gpu: Element) -> dict[str, Value]:
    answers: dict[str, Value] = {}
    for question, read in _QUESTIONS.items():
        with suppress(NotShownError):
            answers[question] = read(gpu)
    return answers


def find_error(title: str) -> str:
    """Return a GPU's name if it is an error message of nvidia-smi, else ""."""
    words = r"unknown error|is lost|requires reset|err!"
    return title if re.search(words, title, re.IGNORECASE) else ""


def _text(element: Element, *paths: str) -> str:
    """Return the text at the first path that exists, or raise ``NotShownError``."""
    for path in paths:
        text = element.findtext(path)
        if text is not None:
            return text.strip()
    raise NotShownError


def _known(text: str) -> str | None:
    return None if text.strip("[]").upper() in ("N/A", "NOT SUPPORTED") else text


def _count(element: Element, path: str, factor: int = 1) -> int | None:
    """Return a number without its unit, times ``factor``; None if it is "N/A"."""
    text = _known(_text(element, path))
    if text is None:
        return None
    found = _NUMBER.match(text)
    if found is None:
        raise NotShownError
    return int(float(found[0]) * factor)


def _counts(
    gpu: Element, section: str, paths: dict[str, str], factor: int = 1
) -> Value:
    """Return the numbers of a section by name, or None if one of them is "N/A"."""
    counts = {n: _count(gpu, f"{section}/{path}", factor) for n, path in paths.items()}
    return None if None in counts.values() else counts


def _recovery(gpu: Element) -> Value:
    action = _known(_text(gpu, "gpu_recovery_action"))
    if action is None:
        return None
    if action.lower() not in _ACTIONS:
        raise NotShownError
    return _ACTIONS.index(action.lower())


def _rows(gpu: Element) -> Value:
    rows = gpu.find("remapped_rows")
    if rows is None or _known((rows.text or "").strip()) is None:
        return None
    return {
        "corrected": _count(rows, "remapped_row_corr"),
        "uncorrected": _count(rows, "remapped_row_unc"),
        "is_pending": _text(rows, "remapped_row_pending") == "Yes",
        "has_failed": _text(rows, "remapped_row_failure") == "Yes",
    }


def _ecc(gpu: Element) -> Value:
    def uncorrected(since: str) -> int | None:
        own = f"ecc_errors/{since}/sram_uncorrectable"
        try:
            return _count(gpu, own)
        except NotShownError:
            # Newer drivers count two kinds of errors.
            kinds = [_count(gpu, f"{own}_{kind}") for kind in ("parity", "secded")]
            return None if None in kinds else sum(filter(None, kinds))

    counts = {
        "sram_uncorrected": uncorrected("volatile"),
        "sram_uncorrected_ever": uncorrected("aggregate"),
        "sram_corrected": _count(gpu, "ecc_errors/volatile/sram_correctable"),
        "dram_corrected": _count(gpu, "ecc_errors/volatile/dram_correctable"),
    }
    return None if None in counts.values() else counts


def _clock_events(gpu: Element) -> Value:
    bits = 0
    for bit, name in _ACTIVE.items():
        new, old = f"clocks_event_reason_{name}", f"clocks_throttle_reason_{name}"
        paths = f"clocks_event_reasons/{new}", f"clocks_throttle_reasons/{old}"
        state = _known(_text(gpu, *paths))
        if state is None:
            return None
        bits |= bit * (state == "Active")
    return bits


def _fabric(gpu: Element) -> Value:
    state = _known(_text(gpu, "fabric/state"))
    if state is None:
        return None
    if state.lower() not in _STATES:
        raise NotShownError
    # Older drivers have no summary.
    summary = gpu.findtext("fabric//summary", "").strip().lower()
    status = _text(gpu, "fabric/status")
    return {
        "state": _STATES[state.lower()],
        "status": 0 if status in ("Success", "N/A") else status,
        "health": sum(
            1 << 2 * n
            for n, name in enumerate(_HEALTH.split())
            if gpu.findtext(f"fabric/health/{name}") in ("Degraded", "True", "Yes")
        ),
        "summary": _SUMMARIES.get(summary, 0),
    }


def _mig(gpu: Element) -> Value:
    mode = _known(_text(gpu, "mig_mode/current_mig"))
    return None if mode is None else mode == "Enabled"


def _processes(gpu: Element) -> Value:
    return [
        {"pid": _count(each, "pid"), "memory_bytes": _count(each, "used_memory", 2**20)}
        for each in gpu.findall("processes/process_info")
        if _text(each, "type") == "C"
    ]


_QUESTIONS: dict[str, Callable[[Element], Value]] = {
    "titles": lambda gpu: _text(gpu, "product_name"),
    "bus_ids": lambda gpu: plain_address(gpu.get("id", "")),
    "memory_bytes": lambda gpu: _counts(gpu, "fb_memory_usage", _MEMORY, 2**20),
    "vbios": lambda gpu: _known(_text(gpu, "vbios_version")),
    "recovery_action": _recovery,
    "remapped_rows": _rows,
    "ecc_errors": _ecc,
    "clock_events": _clock_events,
    "margin_celsius": lambda gpu: _count(gpu, "temperature/gpu_temp_tlimit"),
    "pcie": lambda gpu: _counts(gpu, "pci/pci_gpu_link_info", _PCIE),
    "fabric": _fabric,
    "mig": _mig,
    "processes": _processes,
    "busy_percent": lambda gpu: _count(gpu, "utilization/gpu_util"),
}
