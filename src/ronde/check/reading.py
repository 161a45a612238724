"""Read saved output of ``nvidia-smi -q``, the kernel log and ``ibstat`` as facts.

Each file counts as a host. The checks for live hosts evaluate its facts, and
``logged-errors`` reports other errors in it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any
from xml.etree.ElementTree import Element

from ronde.check.check import FAIL, Problem, Problems, Severity, each_host
from ronde.check.fleet import Fleet, HostFacts, Value, Values
from ronde.check.gpu.nvml import LOST, store_report
from ronde.check.gpu.smi import find_error, read_answers
from ronde.check.gpu.xids import find_xids
from ronde.check.probing import FactReader
from ronde.errors import UsageError
from ronde.topology.probes.base import Saved
from ronde.topology.probes.others import KERNEL_LINE, KERNEL_LOG, recognise_other
from ronde.topology.probes.rdma_text import is_rdma_text, read_rdma_ports
from ronde.topology.probes.smi_query import is_query, read_query
from ronde.topology.sources import find_probe
from ronde.units import counted, list_first

NOT_OF_FILES = ("roce-gid", "gpu-mig")
"""Checks left out for files: their facts are incomplete, or they need a job's ranks."""
_ERRORS = "host.logged_errors"
_OFF_THE_BUS = "a GPU has fallen off the bus"
_FIXES = {
    "reset": "stop all programs on the GPU, then: sudo nvidia-smi --gpu-reset -i {at}",
    "replace": "have the GPU replaced",
    "mode": "sudo nvidia-smi -i {at} -c DEFAULT",
    "persist": "sudo nvidia-smi -pm 1",
    "reboot": "sudo reboot; if it happens again, the GPU or its slot is broken",
    "driver": "sudo dmesg | grep NVRM; after an update of the driver: sudo reboot",
    "reseat": "sudo lspci -vv -s {at}; reseat the device or its cable",
    "firmware": "sudo mlxfwreset -d {at} -y reset, or power the host off and on",
    "memory": "give the job more memory, or let it use less",
    "instances": "nvidia-smi -L  # lists them; NCCL needs whole GPUs",
    "link": "look at its cable and transceiver, and at the switch's port",
    "choose": "name the ports for jobs: NCCL_IB_HCA",
    "cool": "check fans, dust and airflow",
    "host": "drain the host; sudo ras-mc-ctl --errors; have the part replaced",
    "look": "look at the lines around it; it may have ended or delayed the job",
    "cut": "write it again: nvidia-smi -q; a GPU that is still missing has failed",
}
_SILENT = "a file server does not answer"
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
  /unrepairable_memory: Yes
fail replace its caches (SRAM) had more errors than the threshold
  /sram_threshold_exceeded: Yes
warn cool it is above its temperature limit
  /gpu_temp_tlimit: -[1-9]
fail replace 60 or more pages of its memory are retired
  retired_pages/\w+(?:/retired_count)?: (?:[6-9]\d|\d{{3,}})$
fail mode no program may compute on it (compute mode Prohibited)
  /compute_mode: Prohibited
warn mode only one program may use it (compute mode {{}})
  /compute_mode: (Exclusive\w*)
warn reset {{}} with the next reset
  gpu/(\w+ changes from .*)
inform instances split into instances (MIG)
  /current_mig: Enabled
inform persist persistence mode is off
  /persistence_mode: Disabled
fail reboot nvidia-smi cannot query the GPU
  Unable to determine the device handle for (?:[Gg][Pp][Uu]\w*:? *)?(?P<at>[\w:.]+):
fail replace a GPU's InfoROM is damaged
  WARNING: info[Rr][Oo][Mm] is corrupted at gpu (?P<at>[\w:.]+)
fail driver nvidia-smi cannot query the driver
  No devices were found|NVIDIA-SMI has failed|Failed to initialize NVML
fail reboot NVIDIA's driver could not start
  NVRM: (?:GPU {_AT}: )?(?:RmInitAdapter failed|API mismatch)
fail reboot {_OFF_THE_BUS}
  NVRM: (?:The NVIDIA )?GPU (?:at PCI:)?{_AT}.* fallen off the bus
warn driver NVIDIA's driver could not start a GPU
  NVRM: The NVIDIA probe|nvidia(?:: probe of)? {_AT}(?:: probe.*)? failed with error
fail reseat fatal PCI errors (AER)
  {_AER}Uncorrect\w+ \(Fatal
warn reseat uncorrected PCI errors (AER)
  {_AER}Uncorrect\w+ \(Non-
inform reseat corrected PCI errors (AER)
  {_AER}Correct
fail firmware the adapter's firmware has failed
  mlx5_core {_AT}: .*(?:health compromised|Fatal error|flow aborted|severity\([0-3])
fail reboot the driver could not reset a GPU
  amdgpu {_AT}: .*GPU reset\(\d+\) failed
fail reboot the driver has reset a GPU
  amdgpu {_AT}: .*GPU reset begin
fail reboot uncorrectable errors in a GPU's memory or caches
  amdgpu {_AT}: .*\b[1-9]\d* (?:new )?uncorrectable hardware errors
warn link an adapter reports a cable or transceiver error: {{1}}
  mlx5_core {_AT}: .*Port module event\[error\]: module \d+, (?:Cable error, )?(.+)
warn cool an adapter is too hot
  mlx5_core {_AT}: .*High temperature on sensors
inform memory a program has reached its cgroup's limit of memory
  Memory cgroup (?P<at>.*?) ?out of memory: Kill(?:ed)? process
warn memory the kernel has killed programs for lack of memory
  ut of memory: Kill(?:ed)? process \d+ \((?P<at>[^)]*)\)
warn host errors of the host's memory or processor
  Machine Check Exception|event severity: (?:fatal|recover)|EDAC \S+ [1-9]\d* UE\b
warn look a processor was stuck
  soft lockup - CPU|hard LOCKUP on|self-detected stall
warn look a program was blocked for minutes
  task (?P<at>\S+):\d+ blocked for more than
warn look {_SILENT}
  nfs: server (?P<at>\S+) (?:not responding|timed out)
warn look a program crashed in {{}}
  (?:segfault|general protection) .* in (lib(?:[nr]ccl|cuda|torch|ibv|fabric)[^\[ ]*)
"""
"""Two lines per rule: severity, fix and message; then a pattern with groups for {}."""
_LINK = re.compile(
    r"(?:mlx[45]_\w+|bnxt_en|ice|i40e|ionic) (?P<at>\S+(?: [\w-]+)?): .*?"
    r"(?:[Ll]ink (?:is )?|module \d+, Cable )"
    r"(?P<word>[Uu]p|UP|ACTIVE|plugged|[Dd]own|DOWN|unplugged)\b"
)
_OF_NVIDIA_SMI = "Unable to|No devices|NVIDIA-SMI|Failed to|WARNING: info"
_GONE = re.compile("GPU (?:is lost|requires reset)")
_PASSED_ON = ("Pass-Through", "VGPU", "")
_ALIKE = {
    "model": ("product_name", "train on GPUs that are alike"),
    "power limit": (".//current_power_limit", "sudo nvidia-smi -i {} -pl {}"),
    "ECC": ("ecc_mode/current_ecc", "sudo nvidia-smi -i {} -e {}; sudo reboot"),
}
_SOUGHT = "errors of GPUs, adapters, links, PCI, memory, processors and file servers"
_MAX_LINE_CHARS = 1000
# The cgroup whose limit was reached: the job's, else the innermost one.
_CGROUP = re.compile(
    r"(?:oom_memcg=|result of limit of )(?:\S*/(?=job_\d+\b)|[^\s,]*/)([^\s,/]+)"
)
_BOOT_OR_END = ("Linux version ", "reboot: ")


_Lines = Iterable[tuple[str, str]]  # location and text
_Error = tuple[str, str, str]  # message, severity and fix


@each_host(FAIL, _ERRORS)
def logged_errors(values: Values, _: Fleet) -> Problems:
    """A saved file is complete, and shows no hardware or host error.

    reads: the files given to ronde check read: nvidia-smi -q, a kernel log, ibstat
    threshold: no uncorrectable or pending error, no lost GPU or adapter, and no link
        that was lost three times or is still down. Settings, corrected errors, and GPUs
        or ports that differ from the others are warnings or notes
    source: nvidia-smi's manual; NVIDIA's Dynamic Page Retirement guide (60 pages);
        Linux' drivers/pci/pcie/aer.c, mlx5/core/health.c and events.c, mm/oom_kill.c
    fix: read the reported line with the lines around it
    needs: a saved file
    why: The same fault will end the next job.
    """
    for message, severity, fix in values[_ERRORS]:
        yield Problem(message, Severity(severity), fix=fix)


def read_saved_facts(saved: Saved) -> tuple[HostFacts, str]:
    """Return the facts in a saved file, as those of a host, and its kind as text.

    Raise ``UsageError`` for a file of an unknown kind.
    """
    (other, cure), probe = recognise_other(saved), find_probe(saved)
    is_log = other == KERNEL_LOG
    values: dict[str, Value] = {}
    lines = list(_log_lines(saved))
    has_facts = is_query(saved) or is_rdma_text(saved)
    if is_query(saved):
        kind, own, more = _read_query(values, saved)
        lines += more
    elif has_facts:
        kind, own = _read_ports(values, saved)
    else:
        kind = counted(len(lines), "kernel line" if is_log else "line")
        kind += f" (searched for {_SOUGHT})" * is_log
        own = _lost_links(lines)
        # In place of its age, each line has its index.
        xids = find_xids((number, line) for number, (_, line) in enumerate(lines))
        for each in xids:
            each["where"] = lines[int(each["age_s"])][0].strip()
        values["gpu.xids"] = xids
    errors = [*_find_errors(lines), *own]
    if not (errors or is_log or has_facts):
        name = probe.format if probe else other or "an unknown format"
        cure = f"Type: ronde topo lint {saved.name}" if probe else cure
        cure = f" {cure}" * cure.startswith("Type: ")
        raise UsageError(
            f"{saved.name} is not output of nvidia-smi -q, dmesg or ibstat, but "
            f"{name}.{cure}"
        )
    is_gone = any(each["code"] == 79 for each in values.get("gpu.xids", ()))
    values[_ERRORS] = [e for e in errors if not is_gone or _OFF_THE_BUS not in e[0]]
    return HostFacts(saved.name, values, {}, {}), kind


def _log_lines(saved: Saved) -> Iterator[tuple[str, str]]:
    """Yield the lines of a kernel log or of nvidia-smi, each with its location."""
    card = group = ""
    for number, line in enumerate(saved.text.splitlines(), 1):
        if match := KERNEL_LINE.match(line[:_MAX_LINE_CHARS]):
            stamp = (match["at"] or match["date"] or "").strip("[] ")
            # In a message of three lines, the first one names the GPU.
            card = match["text"] if "NVRM: The NVIDIA GPU" in line else card
            text = re.sub(
                r"^NVRM: (?=(?:system )?(?:has )?fallen off)", f"{card} ", match["text"]
            )
            # The line before the one with the killed program names the cgroup.
            limit = _CGROUP.search(text)
            group = limit[1] if limit else group
            text = text.replace("Memory cgroup out", f"Memory cgroup {group} out", 1)
            yield f" in line {number}" + f" ({stamp})" * bool(stamp), text
        elif re.match(_OF_NVIDIA_SMI, line):
            yield f" in line {number}", line[:_MAX_LINE_CHARS]


def _find_errors(lines: _Lines) -> list[_Error]:
    """Return the errors that the rules find in the lines, each error once."""
    rows = _RULES.strip().splitlines()
    patterns = [re.compile(row.strip()) for row in rows[1::2]]
    found: dict[_Error, list[tuple[str, str]]] = {}
    for location, line in lines:
        if match := re.search(r"nfs: server (\S+) OK", line):
            silent = _SILENT, "warn", _FIXES["look"]
            found[silent] = [e for e in found.get(silent, []) if e[0] != match[1]]
        for row, pattern in zip(rows[::2], patterns, strict=True):
            if match := pattern.search(line):
                severity, fix, message = row.split(maxsplit=2)
                error = message.format(*match.groups()), severity, _FIXES[fix]
                # The location in nvidia-smi -q is the number of the GPU.
                is_gpu = location.isdecimal()
                at = location if is_gpu else match.groupdict().get("at") or ""
                found.setdefault(error, []).append((at, location))
                break
    return [_sum_up(*error, seen) for error, seen in found.items() if seen]


def _sum_up(
    message: str, severity: str, fix: str, seen: list[tuple[str, str]]
) -> _Error:
    ends = list(dict.fromkeys(at for at, _ in seen if at))
    location = seen[-1][1]
    text = f"GPU{'s' * (len(ends) > 1)} {', '.join(ends)}: {message}"
    if not location.isdecimal():
        named = f": {list_first(ends, 4)}" if ends else ""
        times = f", {len(seen)} times, last" if len(seen) > 1 else ""
        text = f"{message}{named}{times}{location}"
    return text, severity, fix.format(at=",".join(ends))


def _lost_links(lines: _Lines) -> Iterator[_Error]:
    """Yield an error for each link that was up and went down."""
    boots: list[defaultdict[str, list[bool]]] = [defaultdict(list)]
    for _, line in lines:
        if line.startswith(_BOOT_OR_END):
            boots.append(defaultdict(list))
        elif match := _LINK.search(line):
            is_up = match["word"].lower() in ("up", "active", "plugged")
            boots[-1][match["at"]].append(is_up)
    for at in dict.fromkeys(at for states in boots for at in states):
        lost, is_down = 0, False
        for number, states in enumerate(boots):
            own = states[at]
            flaps = sum(was and not is_up for was, is_up in pairwise(own))
            is_down = flaps > 0 and not own[-1]
            # The last loss before a reboot is part of the reboot. If the log lacks its
            # start, the link was up before.
            lost += flaps - (is_down and number < len(boots) - 1)
            lost += flaps > 0 and number == 0 and not own[0]
        if lost:
            message = f"{at} lost its link {counted(lost, 'time')}"
            message += " and is down" * is_down
            yield message, "warn" if lost > 2 or is_down else "inform", _FIXES["link"]


def _read_query(
    values: dict[str, Value], saved: Saved
) -> tuple[str, Iterable[_Error], _Lines]:
    top = read_query(saved)
    gpus = top.findall("gpu")
    answers, reader = [read_answers(gpu) for gpu in gpus], FactReader({})
    for own in answers:
        # Jobs may have been running when the file was written.
        for name in ("processes", "busy_percent", "memory_bytes"):
            own.pop(name, None)
    store_report(reader, (None, answers))
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
    errors = _compare_gpus(gpus, top.findtext("attached_gpus", "").strip())
    return f"nvidia-smi -q of {counted(len(gpus), 'GPU')}", errors, lines


def _compare_gpus(gpus: list[Element], attached: str) -> Iterator[_Error]:
    """Yield errors for GPUs that are missing, cut off, or unlike the others."""
    num = len(gpus)
    if attached.isdecimal() and num < int(attached):
        severity = "inform" if num == 1 else "warn"  # as of nvidia-smi -q -i 3
        yield f"the file shows {num} of {attached} GPUs", severity, _FIXES["cut"]
    tags = [[each.tag for each in gpu] for gpu in gpus]
    if gpus and tags[0][: len(tags[-1])] == tags[-1] != tags[0]:
        yield f"GPU {num - 1} lacks its last sections", "warn", _FIXES["cut"]
    for name, (path, fix) in _ALIKE.items():
        values = [gpu.findtext(path, "").strip() for gpu in gpus]
        usual = max(values, key=values.count, default="")
        for n, value in enumerate(values):
            is_odd = value not in ("", "N/A", usual) and 2 * values.count(usual) > num
            if is_odd and not find_error(value):
                message = f"GPU {n}: its {name} is {value}, but {usual} on most GPUs"
                severity = "inform" if name == "model" else "warn"
                yield message, severity, fix.format(n, usual.partition(" ")[0].upper())


def _flatten(section: Element, path: str) -> Iterator[str]:
    """Yield all values as ``section/name: value``, and all pending changes of modes."""
    values: dict[str, str] = {}
    for each in section:
        text = (each.text or "").strip()
        values[each.tag.partition("_")[0]] = text
        yield f"{path}/{each.tag}: {text}"
        yield from _flatten(each, f"{path}/{each.tag}")
    now, then = values.get("current"), values.get("pending")
    if now and then and now != then:
        yield f"{path} changes from {now} to {then}"


def _read_ports(values: dict[str, Value], saved: Saved) -> tuple[str, Iterable[_Error]]:
    ports = read_rdma_ports(saved)
    values |= {"network.rdma_ports": ports, "network.variables": {}}
    up = {name: own for name, own in ports.items() if own["state"] == "ACTIVE"}
    return f"ibstat of {counted(len(ports), 'port')}", _compare_ports(up)


def _compare_ports(up: dict[str, dict[str, Any]]) -> Iterator[_Error]:
    """Yield errors for ports slower than others, and for mixed link layers."""
    layers = sorted({own["layer"] for own in up.values()})
    if len(layers) > 1:
        yield (
            f"ports have different link layers: {' and '.join(layers)}",
            "inform",
            _FIXES["choose"],
        )
    for name, own in up.items():
        alike = [each for each in up.values() if each["model"] == own["model"]]
        alike = [each["mbit_per_s"] for each in alike if each["layer"] == own["layer"]]
        rate, most = own["mbit_per_s"] / 1000, max(alike) / 1000
        # One lane of four, or the only slow port; several may be for storage.
        is_odd = len(alike) > 3 and sorted(alike)[1] == max(alike)
        is_slow = is_odd or 4 * rate <= most
        severity, fix = ("warn", "link") if is_slow else ("inform", "choose")
        if 0 < rate < most:
            message = f"{name} runs at {rate:g} Gb/s, but others at {most:g} Gb/s"
            yield message, severity, _FIXES[fix]
