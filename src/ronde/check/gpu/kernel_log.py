"""What NVIDIA's driver has written into the kernel's log: Xid, SXid of NVSwitches."""

import os
import re
import time
from collections.abc import Iterator

from ronde.check.check import FAIL, INFORM, Family, Problem, Problems, each_host
from ronde.check.facts import Fleet, Value, Values
from ronde.topology.pci import plain_address

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

    Each has ``kind`` (``Xid`` or ``SXid``), ``address``, ``code``, ``times``, ``age_s``
    and ``is_fatal``, which the log has for SXid only.

    Raises:
        OSError: The log may not be read.
        ValueError: A saved tree has no uptime.
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
    with open(f"{root}/proc/uptime", encoding="ascii") as uptime:  # noqa: PTH123
        return float(uptime.read().split()[0])


def _records(path: str) -> Iterator[str]:
    """Yield the records of a log of the kernel's, the oldest first.

    A read gives one record and never waits; a file that holds a copy gives more.
    """
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


@each_host(Family.GPU, FAIL, "gpu.xids")
def gpu_xid(values: Values, _: Fleet) -> Problems:
    """The driver has logged no error of a GPU of late.

    reads: Xid and SXid in /dev/kmsg
    threshold: no Xid of the hardware and no fatal SXid for 2 hours; those of programs
        are only shown
    source: Azure's node health checks; NVIDIA's catalogue of Xid errors; 144 to 150:
        gpud
    fix: look the number up in NVIDIA's catalogue of Xid errors; drain the host
    needs: an NVIDIA GPU; root where kernel.dmesg_restrict is 1
    why: What broke once in two hours will break again.
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
