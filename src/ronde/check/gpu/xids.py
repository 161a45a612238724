"""GPU errors (Xid) and NVSwitch errors (SXid) in the kernel log since boot.

The fix for each number is the immediate action in NVIDIA's catalogue of Xid errors, as
copied by gpud 4a8de33 (nvidia/xid/catalog_generated.go, of 2025-10). For 45, 48, 74 and
144 to 150 the catalogue names a workflow; the fix here is its usual outcome. The
catalogue has no action for 167, 171 and 172. Their fix here is that of 48: 171 and 172
come together with a 48, and for 167 it is ronde's choice.
"""

import re
from collections.abc import Iterable, Iterator

from ronde.check.check import FAIL, INFORM, WARN, Problem, Problems, Severity, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.health import ADVICE
from ronde.topology.cpu_sets import members, parse_list
from ronde.topology.kernel_log import read_log
from ronde.topology.pci import plain_address
from ronde.units import format_duration

_Resolution = tuple[Severity, str]  # with the fix; empty for none
_TABLE = """
fail 46,62,64,95,109-110,119-120,136,140,143,155-156,158
  stop all programs on the GPU, then: sudo nvidia-smi --gpu-reset -i N
fail 48,167,171-172
  reset the GPU (sudo nvidia-smi --gpu-reset -i N), then dcgmi diag -r 3; if it happens
  again, have the GPU replaced
fail 79
  reboot the host; if it happens again, the GPU or its slot is broken
fail 151
  restart the virtual machine
fail 54
  connect the GPU's power cable
fail 74,144-150
  nvidia-smi nvlink -e shows the link; reset its GPUs, or look at its bridge, cable or
  switch
warn 78
  update the vGPU software
inform 94
  start the program again; when it suits, stop all programs on the GPU, then: sudo
  nvidia-smi --gpu-reset -i N
inform 8,11,13,25,31-32,39-41,43,45,60,68-72,75-77,80,82-86,88-89,96-105,126-135,139
  start the program again; if it happens again, look at the program
inform 63,92,121
  nvidia-smi -q -i N shows its memory and links: after the job, reset the GPU if a row
  or a page is pending; if the number grows, have the GPU replaced
inform 14,37-38,44,66-67,93,106-108,137,141,152-154,157,160-161
"""
"""Severity, Xid numbers, and NVIDIA's fix.

154 repeats the driver's advice, which the check ``gpu-advice`` reports.
"""


def _read_table() -> Iterator[tuple[int, _Resolution]]:
    for entry in _TABLE.replace("\n  ", " ").strip().splitlines():
        severity, codes, *fix = entry.split()
        for code in members(parse_list(codes)):
            yield code, (Severity(severity), " ".join(fix))


_RESOLUTIONS = dict(_read_table())
_OTHER = INFORM, "look the number up in NVIDIA's catalogue of Xid errors"
_FATAL_SWITCH = FAIL, "reset all GPUs of the host, or reboot it"
_NVLINK = range(144, 151)
_NAMES = {
    8: "a channel hung",
    13: "error in a kernel",
    31: "access to unmapped memory",
    45: "a program ended and was cleaned up",
    43: "a program's work was stopped",
    46: "the GPU hung",
    48: "double-bit memory error",
    54: "no auxiliary power",
    62: "its micro-controller halted",
    63: "a row or page of memory will be replaced",
    64: "a row of memory could not be replaced",
    69: "error in a kernel",
    74: "error of an NVLink",
    79: "it has fallen off the bus",
    92: "many corrected memory errors",
    94: "memory error, contained",
    95: "memory error, not contained",
    109: "a context switch timed out",
    110: "security fault",
    119: "its system processor does not answer",
    120: "error of its system processor",
    121: "corrected error of the link to the CPU",
    136: "an NVLink could not be trained",
    140: "uncorrected memory errors",
    143: "it could not be initialized",
    155: "error of an NVLink's software",
    156: "a broken part was retired",
    158: "a fatal timeout",
    167: "fatal timeout on the PCI bus",
    171: "double-bit memory error (DRAM)",
    172: "double-bit cache error (SRAM)",
} | dict.fromkeys(_NVLINK, "error of an NVLink")

# With MIG the instance follows the address.
_XID = re.compile(
    r"(?P<kind>S?Xid) \((?:PCI:)?(?P<address>[0-9a-fA-F:.]+)"
    r"(?: GPU-I:[0-9a-fA-F]+)?\): (?P<code>\d+)(?P<rest>.*)"
)
_MORE = re.compile(
    r"caused by previous Xid (?P<cause>\d+)|action changed from .* to 0x(?P<advice>\d+)"
)
_ADVICE, _ADDRESSES = "gpu.recovery_action", "gpu.bus_ids"


def read_xids(root: str) -> list[Value]:
    return find_xids(read_log(root))


def find_xids(lines: Iterable[tuple[float, str]]) -> list[Value]:
    """Return the last error of each kind, device and number, with a count of errors.

    ``lines`` are pairs of a line's age in seconds and its text. ``is_fatal`` is True if
    the driver logged "Fatal": for SXids, since Blackwell also for the Xids of NVLinks.
    """
    found: dict[tuple[str, str, int], Value] = {}
    for age_s, line in lines:
        if xid := _XID.search(line):
            # The driver omits the function, which is 0.
            text = xid["address"]
            address = plain_address(text) or plain_address(f"{text}.0") or text
            kind, code = xid["kind"], int(xid["code"])
            before = found.get((kind, address, code), {"times": 0})
            found[kind, address, code] = {
                "kind": kind,
                "address": address,
                "code": code,
                "times": before["times"] + 1,
                "age_s": max(0.0, round(age_s, 1)),
                "is_fatal": re.search(r"\bFatal\b", xid["rest"]) is not None,
            }
            if more := _MORE.search(xid["rest"]):
                numbers = {name: int(n) for name, n in more.groupdict().items() if n}
                found[kind, address, code] |= numbers
    return list(found.values())


@each_host(FAIL, "gpu.xids", optional=(_ADVICE, _ADDRESSES))
def gpu_xid(values: Values, _: Fleet) -> Problems:
    """The driver has logged no GPU error since the boot.

    reads: Xid and SXid errors in /dev/kmsg, else in journalctl -k; the recovery action
        in NVML (in saved logs that of Xid 154)
    threshold: no error that needs a reset, reboot or repair, and no fatal SXid; only a
        warning if the driver now advises no action. Errors of programs, and NVLink
        errors that are not fatal, are notes
    source: NVIDIA's catalogue of Xid errors, by gpud 4a8de33 (nvidia/xid); fatal SXid:
        Fabric Manager guide, by gpud 4a8de33 (nvidia/sxid)
    fix: look the number up in NVIDIA's catalogue of Xid errors; drain the host
    needs: an NVIDIA GPU; root if kernel.dmesg_restrict is 1
    why: Until its reset or repair, the GPU ends jobs or computes wrong results.
    """
    numbers = zip(values.get(_ADDRESSES) or (), values.get(_ADVICE) or (), strict=False)
    advice = {address: action for address, action in numbers if action is not None}
    causes: dict[str, int] = {}  # the last error of each GPU that needs a repair
    for each in values["gpu.xids"]:
        severity, fix = _resolve(each)
        if not fix or ("advice" in each and each["address"] in advice):
            continue
        is_xid, code = each["kind"] == "Xid", each["code"]
        message = f"{each['kind']} {code}"
        name = _NAMES.get(code, "") if is_xid else ""
        before = causes.get(each["address"]) if is_xid and code == 45 else None
        if cause := each.get("cause", before):
            name, fix = f"it follows from Xid {cause}", f"see Xid {cause}"
        elif "advice" in each:
            name = f"the driver advises {ADVICE.get(each['advice'], ADVICE[1])[0]}"
        if is_xid and severity is FAIL:
            causes[each["address"]] = code
        message += f" ({name})" if name else ""
        message += f" at {each['address']}"
        message += f", {each['times']} times, last" if each["times"] > 1 else ""
        message += f" {each.get('where') or format_duration(each['age_s']) + ' ago'}"
        # A switch is reset together with all GPUs.
        own: list[Value] = [*advice.values()]
        own = [advice.get(each["address"])] if is_xid else own
        if severity is FAIL and own and not any(a != 0 for a in own):
            severity, message = WARN, f"{message}; by now the driver advises no action"
        fix = fix.replace("-i N", f"-i {each['address']}")
        yield Problem(message, severity, fix=fix)


def _resolve(entry: Value) -> _Resolution:
    if entry["kind"] != "Xid":
        return _FATAL_SWITCH if entry["is_fatal"] else _OTHER
    if entry.get("advice"):
        return FAIL, ADVICE.get(entry["advice"], ADVICE[1])[1]
    severity, fix = _RESOLUTIONS.get(entry["code"], _OTHER)
    # In the catalogue most of these need no action unless they are fatal.
    is_harmless = entry["code"] in _NVLINK and not entry["is_fatal"]
    return (INFORM if is_harmless else severity), fix
