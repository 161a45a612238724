"""Files as facts: ``nvidia-smi -q``, a kernel's log and ``ibstat``, each of one host.

The checks of live hosts judge them, and ``printed-errors`` what only a file shows.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any
from xml.etree.ElementTree import Element

from ronde.check.check import FAIL, Problem, Problems, Severity, each_host
from ronde.check.fleet import Fleet, HostFacts, Value, Values
from ronde.check.gpu.nvml import LOST, keep_report
from ronde.check.gpu.smi import read_answers
from ronde.check.gpu.xids import find_xids
from ronde.check.probing import FactReader
from ronde.errors import UsageError
from ronde.topology.probes.base import Saved
from ronde.topology.probes.others import KERNEL_LINE, KERNEL_LOG, recognise_other
from ronde.topology.probes.rdma_text import RDMA_PORTS, read_rdma_ports
from ronde.topology.probes.smi_query import SMI_QUERY, read_query
from ronde.topology.sources import find_probe
from ronde.units import counted, list_first

NOT_OF_FILES = ("roce-gid",)
"""Checks whose facts a file has in part."""
_ERRORS = "host.printed_errors"
_OFF_THE_BUS = "a GPU has fallen off the bus"
_FIXES = {
    "reset": "stop what uses the GPU, then: sudo nvidia-smi --gpu-reset -i {at}",
    "replace": "have the GPU replaced",
    "mode": "sudo nvidia-smi -i {at} -c DEFAULT",
    "persist": "sudo nvidia-smi -pm 1",
    "reboot": "sudo reboot; if it happens again, the GPU or its slot is broken",
    "driver": "sudo dmesg | grep NVRM; after an update of the driver: sudo reboot",
    "reseat": "sudo lspci -vv -s {at}; reseat the device or its cable",
    "firmware": "sudo mlxfwreset -d {at} -y reset, or power the host off and on",
    "memory": "give the job more memory, or let it use less",
    "link": "look at its cable and transceiver, and at the switch's port",
    "choose": "name the ports for jobs: NCCL_IB_HCA",
}
_AT = r"(?P<at>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_AER = rf"{_AT}: (?:AER: )?PCIe Bus Error: severity="
_RULES = rf"""
fail reset {{}} uncorrectable errors in its memory
  /volatile/(?:dram_uncorrectable|double_bit/total): ([1-9]\d*)
fail reset a repair of its memory waits for a reset
  (?:retired_pages|ecc_errors)/\w*pending\w*: Yes
fail reset the driver asks for a reset
  /reset_required: Yes
fail reset the driver advises: {{}}
  /gpu_recovery_action: (?!None|N/A|\[|Reset$|Reboot$|Drain)(.+)
fail replace its memory cannot be repaired
  /unrepairable_memory: Yes|/sram_threshold_exceeded: Yes
fail replace 60 or more pages of its memory are retired
  retired_pages/\w+(?:/retired_count)?: (?:[6-9]\d|\d{{3,}})$
fail mode no program may compute on it (compute mode Prohibited)
  /compute_mode: Prohibited
warn mode one program alone may use it (compute mode {{}})
  /compute_mode: (Exclusive\w*)
warn reset {{}} with the next reset
  gpu/(\w+ changes from .*)
inform persist persistence mode is off
  /persistence_mode: Disabled
fail reboot nvidia-smi cannot ask the GPU
  Unable to determine the device handle for (?:[Gg][Pp][Uu]\w*:? *)?(?P<at>[\w:.]+):
fail driver nvidia-smi cannot ask the driver
  No devices were found|NVIDIA-SMI has failed|Failed to initialize NVML
fail reboot NVIDIA's driver could not start
  NVRM: (?:GPU {_AT}: )?(?:RmInitAdapter failed|API mismatch)
fail reboot {_OFF_THE_BUS}
  NVRM: GPU (?:at PCI:)?{_AT}.* fallen off the bus
fail reseat fatal PCI errors (AER)
  {_AER}Uncorrect\w+ \(Fatal
warn reseat uncorrected PCI errors (AER)
  {_AER}Uncorrect\w+ \(Non-
inform reseat corrected PCI errors (AER)
  {_AER}Correct
fail firmware the adapter's firmware has failed
  mlx5_core {_AT}: .*(?:health compromised|Fatal error|flow aborted|severity\([0-3])
fail reboot the driver has reset a GPU
  amdgpu {_AT}: .*(?:GPU reset begin|uncorrectable hardware errors)
warn memory the kernel has killed programs for lack of memory
  ut of memory: Kill(?:ed)? process \d+ \((?P<at>[^)]*)\)
warn link {{}}
  ^(\S+ .*lost its link (?:.* is down|(?:\d\d+|[3-9]) times))
inform link {{}}
  ^(\S+ .*lost its link .*)
warn link {{}}
  ^(\S+ has a quarter of the rate .*)
inform choose {{}}
  ^(ports are of .*|\S+ has [\d.]+ of [\d.]+ Gb/s.*)
"""
"""Severity, fix and meaning; and the pattern of a line, the first group for ``{}``."""
_LINK = re.compile(
    r"(?:mlx[45]_\w+|bnxt_en|ice|i40e|ionic) (?P<at>\S+(?: [\w-]+)?): .*?"
    r"[Ll]ink (?:is )?(?P<word>[Uu]p|UP|[Dd]own|DOWN)\b"
)
_GONE = re.compile("GPU (?:is lost|requires reset)")
_PASSED_ON = ("Pass-Through", "VGPU", "")
_MAX_LINE_CHARS = 1000


_Lines = Iterable[tuple[str, str]]  # each with its place
_Error = tuple[str, str, str]  # meaning, severity and fix


@each_host(FAIL, _ERRORS)
def printed_errors(values: Values, _: Fleet) -> Problems:
    """A file shows no error of a GPU, adapter or link, and no lack of memory.

    reads: for ronde check read: nvidia-smi -q, a saved kernel log, ibstat
    threshold: no uncorrectable or pending error, no GPU or adapter that was lost, no
        link lost three times or for good; settings, corrected errors and different
        ports are warnings or only shown
    source: nvidia-smi's manual; NVIDIA's Dynamic Page Retirement guide (60 pages);
        Linux' drivers/pci/pcie/aer.c, mlx5/core/health.c and mm/oom_kill.c
    fix: look at the line, and at those around it
    needs: a file
    why: What has failed ends the next job as well.
    """
    for what, severity, fix in values[_ERRORS]:
        yield Problem(what, Severity(severity), fix=fix)


def read_saved_facts(saved: Saved) -> tuple[HostFacts, str]:
    """Return a file as facts of a host of its name, and what it is.

    Raises ``UsageError`` for one of another form.
    """
    other, probe = recognise_other(saved)[0], find_probe(saved)
    is_log = other == KERNEL_LOG
    values: dict[str, Value] = {}
    lines = list(_log_lines(saved))
    if probe is SMI_QUERY:
        what, more = _read_query(values, saved)
    elif probe is RDMA_PORTS:
        what, more = _read_ports(values, saved)
    else:
        what = counted(len(lines), "kernel line" if is_log else "line")
        more = _lost_links(lines)
        # The index of the line stands for the age.
        xids = find_xids((number, line) for number, (_, line) in enumerate(lines))
        for each in xids:
            each["where"] = lines[int(each["age_s"])][0].strip()
        values["gpu.xids"] = xids
    errors = _find_errors([*lines, *more])
    if not (errors or is_log or probe in (SMI_QUERY, RDMA_PORTS)):
        name = probe.format if probe else other or "none of them"
        cure = f" Type: ronde topo lint {saved.name}" * (probe is not None)
        raise UsageError(
            f"{saved.name} must be what nvidia-smi -q, dmesg or ibstat prints, got "
            f"{name}.{cure}"
        )
    is_gone = any(each["code"] == 79 for each in values.get("gpu.xids", ()))
    values[_ERRORS] = [e for e in errors if not is_gone or _OFF_THE_BUS not in e[0]]
    return HostFacts(saved.name, values, {}, {}), what


def _log_lines(saved: Saved) -> Iterator[tuple[str, str]]:
    """Yield lines of a kernel or of nvidia-smi itself, each with its place."""
    for number, line in enumerate(saved.text.splitlines(), 1):
        if match := KERNEL_LINE.match(line[:_MAX_LINE_CHARS]):
            stamp = (match["at"] or match["date"] or "").strip("[] ")
            yield f" in line {number}" + f" ({stamp})" * bool(stamp), match["text"]
        elif line.startswith(("Unable to", "No devices", "NVIDIA-SMI", "Failed to")):
            yield f" in line {number}", line[:_MAX_LINE_CHARS]


def _find_errors(lines: _Lines) -> list[_Error]:
    """Return what rules find in lines, each once: meaning, severity and fix."""
    rows = _RULES.strip().splitlines()
    patterns = [re.compile(row.strip()) for row in rows[1::2]]
    found: dict[_Error, list[tuple[str, str]]] = {}
    for place, line in lines:
        for row, pattern in zip(rows[::2], patterns, strict=True):
            if match := pattern.search(line):
                severity, fix, what = row.split(maxsplit=2)
                error = what.format(*match.groups()), severity, _FIXES[fix]
                # A GPU is its own place.
                at = place if place.isdecimal() else match.groupdict().get("at") or ""
                found.setdefault(error, []).append((at, place))
                break
    return [_sum_up(*error, seen) for error, seen in found.items()]


def _sum_up(what: str, severity: str, fix: str, seen: list[tuple[str, str]]) -> _Error:
    ends = list(dict.fromkeys(at for at, _ in seen if at))
    place = seen[-1][1]
    text = f"GPU{'s' * (len(ends) > 1)} {', '.join(ends)}: {what}"
    if not place.isdecimal():
        named = f": {list_first(ends, 4)}" if ends else ""
        times = f", {len(seen)} times, last" if len(seen) > 1 else ""
        text = f"{what}{named}{times}{place}"
    return text, severity, fix.format(at=",".join(ends))


def _lost_links(lines: _Lines) -> Iterator[tuple[str, str]]:
    """Yield a sentence for each link that went down after it was up."""
    states: dict[str, list[bool]] = {}
    for _, line in lines:
        if match := _LINK.search(line):
            states.setdefault(match["at"], []).append(match["word"].lower() == "up")
    for at, own in states.items():
        if lost := sum(was and not is_up for was, is_up in pairwise(own)):
            end = "" if own[-1] else " and is down"
            yield "", f"{at} lost its link {counted(lost, 'time')}{end}"


def _read_query(values: dict[str, Value], saved: Saved) -> tuple[str, _Lines]:
    top = read_query(saved)
    gpus = top.findall("gpu")
    answers, reader = [read_answers(gpu) for gpu in gpus], FactReader({})
    for own in answers:
        # Jobs may run while the file is written.
        for name in ("processes", "busy_percent", "memory_bytes"):
            own.pop(name, None)
    keep_report(reader, (None, answers))
    for number, gpu in enumerate(gpus):
        if match := _GONE.search(" ".join(gpu.itertext())):
            reader.values[LOST][number] = match[0]
    path = "gpu_virtualization_mode/virtualization_mode"
    modes = {gpu.findtext(path, "").strip() for gpu in gpus}
    values |= reader.values | {"gpu.files": {}}
    values["gpu.is_virtual"] = not modes.isdisjoint(_PASSED_ON)
    if version := top.findtext("driver_version"):
        values["versions.driver"] = f"NVIDIA {version.strip()}"
    lines = (
        (str(n), line) for n, gpu in enumerate(gpus) for line in _flatten(gpu, "gpu")
    )
    return f"nvidia-smi -q of {counted(len(gpus), 'GPU')}", lines


def _flatten(section: Element, path: str) -> Iterator[str]:
    """Yield ``section/name: value`` for each value, and modes that will change."""
    values: dict[str, str] = {}
    for each in section:
        text = (each.text or "").strip()
        values[each.tag.partition("_")[0]] = text
        yield f"{path}/{each.tag}: {text}"
        yield from _flatten(each, f"{path}/{each.tag}")
    now, then = values.get("current"), values.get("pending")
    if now and then and now != then:
        yield f"{path} changes from {now} to {then}"


def _read_ports(values: dict[str, Value], saved: Saved) -> tuple[str, _Lines]:
    ports = read_rdma_ports(saved)
    values |= {"network.rdma_ports": ports, "network.variables": {}}
    up = {name: own for name, own in ports.items() if own["state"] == "ACTIVE"}
    return f"ibstat of {counted(len(ports), 'port')}", _compare_ports(up)


def _compare_ports(up: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield a sentence for what differs among ports of a host, and of one model."""
    layers = sorted({own["layer"] for own in up.values()})
    if len(layers) > 1:
        yield "", f"ports are of {' and '.join(layers)}"
    for name, own in up.items():
        alike = [each for each in up.values() if each["model"] == own["model"]]
        alike = [each["mbit_per_s"] for each in alike if each["layer"] == own["layer"]]
        rate, most = own["mbit_per_s"] / 1000, max(alike) / 1000
        if 0 < 4 * rate <= most:  # as with one lane of four
            yield "", f"{name} has a quarter of the rate of others: {rate:g} Gb/s"
        elif 0 < rate < most:
            yield "", f"{name} has {rate:g} of {most:g} Gb/s, which others have"
