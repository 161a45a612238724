"""Limits that a rank would inherit, and the capabilities that lift them."""

from pathlib import Path

from ronde.check.facts import Reading, UnreadableError

UNLIMITED = -1
"""A limit that there is not."""

_LIMITS = {
    "host.memlock_bytes": "Max locked memory",
    "host.open_files": "Max open files",
    "host.max_processes": "Max processes",
}
_CAPABILITIES = {"ipc_lock": 14, "sys_ptrace": 19, "sys_resource": 24}
_ALL_IDS = "4294967295"
_NICE_FIELD = 16
"""Of ``/proc/PID/stat``, counted behind the name in brackets."""


def read_limits(reading: Reading, root: str) -> None:
    """Take down soft limits, how nice a rank would be, and its capabilities.

    Args:
        reading: Where to.
        root: Where ``proc`` is; empty for this machine.
    """
    own = Path(f"{root}/proc/self")
    with reading.reading(*_LIMITS):
        text = (own / "limits").read_text()
        reading.values |= {
            name: parse_limit(text, row) for name, row in _LIMITS.items()
        }
    reading.keep("host.capabilities", lambda: _capabilities(own))
    reading.keep("host.nice", lambda: _nice(own))


def parse_limit(text: str, row: str) -> int:
    """Return a soft limit of ``/proc/PID/limits``, ``UNLIMITED`` for none.

    Raises:
        UnreadableError: It is not told there.
    """
    for line in text.splitlines():
        if line.startswith(row):
            soft = line[len(row) :].split()[:1]
            if soft == ["unlimited"]:
                return UNLIMITED
            if soft and soft[0].isdecimal():
                return int(soft[0])
    raise UnreadableError(f"/proc/self/limits does not tell {row!r}")


def _capabilities(own: Path) -> list[str]:
    """Return those of the capabilities that lift limits which this process has.

    In a user namespace of its own a process has them over its own things only.
    """
    if (own / "uid_map").read_text().split()[2:] != [_ALL_IDS]:
        return []
    for line in (own / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            bits = int(value, 16)
            return [name for name, bit in _CAPABILITIES.items() if bits >> bit & 1]
    raise UnreadableError("/proc/self/status does not tell the capabilities")


def _nice(own: Path) -> int:
    # The name may hold blanks and brackets, but nothing behind its last bracket does.
    return int((own / "stat").read_text().rpartition(")")[2].split()[_NICE_FIELD])
