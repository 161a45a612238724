"""What NVIDIA's driver has written into the kernel's log: Xid, SXid of NVSwitches."""

import os
import re
import time
from collections.abc import Iterator

from ronde.check.facts import Value
from ronde.topology.pci import plain_address

_RECORD_BYTES = 8192
_MAX_BYTES = 16 << 20
_XID = re.compile(
    r"(?P<kind>S?Xid) \(PCI:(?P<address>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?P<rest>.*)"
)
_RECORD = re.compile(r"\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>.*)")


def read_xids(root: str) -> list[Value]:
    """Return what the log has of each kind, GPU and number: the last one, and how many.

    Returns:
        ``kind`` (``Xid`` or ``SXid``), ``address``, ``code``, ``times``, ``age_s``, and
        ``is_fatal``: whether the log calls it so, which it does for SXid only.

    Args:
        root: Where ``dev`` and ``proc`` are; empty for this machine.

    Raises:
        OSError: The log may not be read.
        ValueError: A saved tree does not tell the time since the start of its host.
    """
    now_s = read_clock_s(root)
    found: dict[tuple[str, str, int], Value] = {}
    for record in _records(f"{root}/dev/kmsg"):
        at, said = _RECORD.match(record), _XID.search(record)
        if at is None or said is None:
            continue
        key = said["kind"], _address(said["address"]), int(said["code"])
        times = found[key]["times"] if key in found else 0
        found[key] = {
            "kind": key[0],
            "address": key[1],
            "code": key[2],
            "times": times + 1,
            "age_s": max(0.0, round(now_s - int(at["us"]) / 1e6, 1)),
            "is_fatal": ", Fatal" in said["rest"],
        }
    return list(found.values())


def read_clock_s(root: str) -> float:
    """Return the time by the clock of the log: seconds since the start of the host.

    Args:
        root: Where ``proc`` is; empty for this machine.
    """
    if not root:
        # Not /proc/uptime: that counts sleep, and a container's may be its own.
        return time.monotonic()
    with open(f"{root}/proc/uptime", encoding="ascii") as uptime:  # noqa: PTH123
        return float(uptime.read().split()[0])


def _address(text: str) -> str:
    # The driver leaves out the function, which is 0.
    return plain_address(text) or plain_address(f"{text}.0") or text


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
