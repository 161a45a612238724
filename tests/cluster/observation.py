"""What runs and what listens on a host, as the kernel tells it."""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TCP_LISTEN = 0x0A


@dataclass(frozen=True, slots=True)
class Process:
    """One process; pids are those outside of the host."""

    pid: int
    parent: int  # 0 is outside of the host
    name: str  # as the kernel shortens it
    state: str  # ``R``, ``S``, ``D``, ``Z``, ``T``...
    words: tuple[str, ...]  # arguments; empty for a zombie
    environment: bytes  # at its start, undecoded


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket that listens."""

    protocol: str  # ``tcp`` or ``udp``
    address: str  # ``0.0.0.0`` and ``::`` are all of the host's
    port: int
    inode: int
    pid: int  # of one process that has it open, seen from outside; 0 for none
    words: tuple[str, ...]  # arguments of that process


def processes_of(init_pid: int) -> list[Process]:
    """Return all processes of the process table whose first one is ``init_pid``."""
    with suppress(OSError):
        space = (_PROC / str(init_pid) / "ns/pid").readlink()
        found = (_read(folder, space) for folder in _PROC.glob("[0-9]*"))
        return [process for process in found if process is not None]
    return []


def sockets_of(init_pid: int) -> list[Socket]:
    """Return all TCP sockets that listen and all UDP sockets, IPv4 and IPv6."""
    owners: dict[int, Process] = {}
    for process in processes_of(init_pid):
        for inode in _socket_inodes(process.pid):
            owners.setdefault(inode, process)
    found: list[Socket] = []
    for protocol in ("tcp", "udp"):
        for family in ("", "6"):
            table = _PROC / str(init_pid) / "net" / f"{protocol}{family}"
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if protocol == "tcp" and int(fields[3], 16) != _TCP_LISTEN:
                    continue
                address, port = _place(fields[1])
                inode = int(fields[9])
                owner = owners.get(inode)
                pid, words = (owner.pid, owner.words) if owner else (0, ())
                found.append(Socket(protocol, address, port, inode, pid, words))
    return found


def _read(folder: Path, space: Path) -> Process | None:
    """Return the process of a folder of ``/proc`` where it is in that space."""
    with suppress(OSError):
        # A zombie has no namespaces any more; its status tells that it had.
        state, parent, name = _status(folder)
        if state == "Z":
            if not _is_within(parent, space):
                return None
        elif (folder / "ns/pid").readlink() != space:
            return None
        words = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
        environment = b"" if state == "Z" else (folder / "environ").read_bytes()
        told = tuple(os.fsdecode(word) for word in words)
        return Process(int(folder.name), parent, name, state, told, environment)
    return None


def _status(folder: Path) -> tuple[str, int, str]:
    """Return the state, the parent and the name."""
    head, _, tail = (folder / "stat").read_text().rpartition(")")
    state, parent = tail.split()[:2]
    return state, int(parent), head.partition("(")[2]


def _is_within(pid: int, space: Path) -> bool:
    with suppress(OSError):
        return (_PROC / str(pid) / "ns/pid").readlink() == space
    return False


def _socket_inodes(pid: int) -> list[int]:
    inodes: list[int] = []
    with suppress(OSError):
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.append(int(target[8:-1]))
    return inodes


def _place(word: str) -> tuple[str, int]:
    """Return the address and port that ``/proc/net`` writes as words of the host."""
    address, _, port = word.partition(":")
    packed = b"".join(
        struct.pack("=I", int(address[i : i + 8], 16))
        for i in range(0, len(address), 8)
    )
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)
