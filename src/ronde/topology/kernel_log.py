"""Read the kernel's log since boot from /dev/kmsg or the journal."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_RECORD_BYTES = 8192
_MAX_BYTES = 16 << 20
_RECORD = re.compile(r"\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>.*)")
_JOURNAL = ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-unix")
_JOURNAL_LINE = re.compile(r"(?P<at_s>\d{9,}\.\d+) (?P<text>.*)")


def read_log(root: str) -> list[tuple[float, str]]:
    """Return the age in seconds and the text of each line."""
    try:
        return list(_kernel_log(root))
    except OSError as error:
        if root:
            raise
        return _journal(error)


def _kernel_log(root: str) -> Iterator[tuple[float, str]]:
    now_s = read_clock_s(root)
    for record in _records(f"{root}/dev/kmsg"):
        if at := _RECORD.match(record):
            yield now_s - int(at["us"]) / 1e6, at["text"]


def _journal(why: OSError) -> list[tuple[float, str]]:
    reason = f"/dev/kmsg: {why.strerror}, and journalctl -k is empty; root would help"
    try:
        done = subprocess.run(_JOURNAL, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise OSError(reason) from why
    text = done.stdout[-_MAX_BYTES:].decode(errors="replace")
    lines = [at for line in text.splitlines() if (at := _JOURNAL_LINE.match(line))]
    # The kernel logs its own start, so an empty journal is not this kernel's.
    if not lines:
        raise OSError(reason) from why
    now_s = time.time()
    return [(now_s - float(at["at_s"]), at["text"]) for at in lines]


def read_clock_s(root: str) -> float:
    """Return the current time on the log's clock: seconds since the boot."""
    if not root:
        # Not /proc/uptime, which includes sleep, and may be the container's own.
        return time.monotonic()
    return float(Path(f"{root}/proc/uptime").read_text("ascii").split()[0])


def _records(path: str) -> Iterator[str]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        rest, num_bytes = b"", 0
        for chunk in read_records(fd):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            num_bytes += len(chunk)
            if num_bytes >= _MAX_BYTES:
                break
    finally:
        os.close(fd)


def read_records(fd: int) -> Iterator[bytes]:
    """Yield the records of the kernel's log that are available now."""
    while True:
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BrokenPipeError:
            # Records were overwritten meanwhile; the next read continues after them.
            continue
        except BlockingIOError:
            return
        if not record:
            return
        yield record
