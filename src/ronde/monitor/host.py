"""The observer's answer to ``usage``: figures of a host and its ranks' processes.

Figures come from /proc and /sys, and the GPUs' from NVML. The kernel adds the CPU time
of an ended child to its parent, so that of a worker does not fall when one ends; it may
if the parent ignores SIGCHLD, or if the child has left it (a daemon).
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ronde.memory import list_groups, list_limits
from ronde.monitor.gpus import GpuReader, HangingReader
from ronde.monitor.usage import HostUsage, NetworkCounters, ProcessUsage
from ronde.processes import read_process, read_stat, read_text
from ronde.topology.kernel_files import list_names, read_fields, read_number
from ronde.topology.machine import parse_rate

_DEADLINE_S = 0.5  # for NVML, and for adapters, whose firmware is asked
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_INFINIBAND = 32  # of if_arp.h
_OOM_FILES = ("memory.events", "memory.oom_control")  # of cgroups v2 and v1
_WORD_BYTES = 4  # the unit of the data counters of InfiniBand
_PORT_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
)


class UsageReader:
    """Reads the usage of a host; ``root`` has its proc and sys, and is empty here."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        self._lock = threading.Lock()
        self._processes = _ProcessTree()
        self._gpus = GpuReader(root)
        self._ports = HangingReader(lambda: tuple(_read_ports(root)))

    def read(self, pids: Mapping[int, int]) -> HostUsage:
        """Return the usage of the host and of workers' processes, by worker id."""
        with self._lock:
            ports = self._ports.latest(_DEADLINE_S).value or ()
            gpus, problem = self._gpus.read(_DEADLINE_S)
            workers = self._processes.read(pids)
        memory_bytes, total_memory_bytes = _read_memory(self._root)
        shm_bytes, total_shm_bytes = _read_shm()
        interfaces = _read_interfaces(self._root, has_ports=bool(ports))
        return HostUsage(
            at_s=time.monotonic(),
            cpu_s=_read_cpu_s(self._root),
            num_cpus=os.cpu_count() or 1,
            memory_bytes=memory_bytes,
            total_memory_bytes=total_memory_bytes,
            shm_bytes=shm_bytes,
            total_shm_bytes=total_shm_bytes,
            num_oom_kills=_count_oom_kills(self._root),
            interfaces=(*interfaces, *ports),
            gpus=gpus,
            gpu_problem=problem,
            workers=workers,
        )


class _ProcessTree:
    """The parents of all processes of this host.

    A process is read when it is new, and later only if it is a worker's.
    """

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def read(self, pids: Mapping[int, int]) -> dict[str, ProcessUsage]:
        present = {int(name) for name in list_names("/proc") if name.isdecimal()}
        for pid in self._parents.keys() - present:
            del self._parents[pid]
        for pid in present - self._parents.keys():
            if process := read_process(pid):
                self._parents[pid] = process.parent
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            children.setdefault(parent, []).append(pid)
        return {
            str(worker): self._read_tree(pid, children) for worker, pid in pids.items()
        }

    def _read_tree(self, pid: int, children: dict[int, list[int]]) -> ProcessUsage:
        num_ticks, num_pages, waiting = 0, 0, [pid]
        while waiting:
            own = waiting.pop()
            # Removed, since a reused pid could make a circle.
            waiting += children.pop(own, ())
            try:
                fields = read_stat(own)
            except OSError:
                continue
            # Numbers of fields as in proc(5), minus 2: utime to cstime, and rss.
            self._parents[own] = int(fields[2])
            num_ticks += sum(map(int, fields[12:16]))
            num_pages += int(fields[22])
        return ProcessUsage(num_ticks / _TICKS_PER_S, num_pages * _PAGE_BYTES)


def _read_cpu_s(root: str) -> float:
    """Return the busy time of all cores, as user, system and stolen time."""
    words = read_text(f"{root}/proc/stat").partition("\n")[0].split()[1:9]
    ticks = [*map(int, words)]
    return (sum(ticks) - sum(ticks[3:5])) / _TICKS_PER_S  # without idle and iowait


def _read_memory(root: str) -> tuple[int, int]:
    """Return used and total bytes, of the smallest control group with a limit."""
    fields = read_fields(f"{root}/proc/meminfo")
    names = "MemTotal", "MemAvailable"
    total, free = (1024 * int(fields.get(n, "0").split()[0]) for n in names)
    limits = [(each.used_bytes, each.limit_bytes) for each in list_limits(root)]
    return min([(total - free, total), *limits], key=lambda each: each[1])


def _read_shm() -> tuple[int, int]:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108  it is not written
    except OSError:
        return 0, 0
    used = found.f_blocks - found.f_bfree
    return used * found.f_frsize, found.f_blocks * found.f_frsize


def _count_oom_kills(root: str) -> int:
    """Return the kills in the innermost control group that counts them, or here."""
    files = [
        f"{folder}/{name}"
        for folder in list_groups(root, "memory")
        for name in _OOM_FILES
    ]
    for path in (*files, f"{root}/proc/vmstat"):
        for line in read_text(path).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _read_interfaces(root: str, *, has_ports: bool) -> Iterator[NetworkCounters]:
    """Yield the network adapters; in a container without one, all but loopback.

    Bridges and bonds would count the bytes of their adapters again, and so would
    InfiniBand's interfaces those of its ports.
    """
    top = f"{root}/sys/class/net"
    found: dict[str, list[int]] = {}
    for line in read_text(f"{root}/proc/net/dev").splitlines()[2:]:
        name, _, counters = line.partition(":")
        found[name.strip()] = [*map(int, counters.split())]
    found.pop("lo", None)
    adapters = [name for name in found if Path(f"{top}/{name}/device").exists()]
    for name in adapters or found:
        if has_ports and read_number(f"{top}/{name}/type", 0) == _INFINIBAND:
            continue
        counters = found[name]
        yield NetworkCounters(
            name=name,
            received_bytes=counters[0],
            sent_bytes=counters[8],
            num_errors=counters[2] + counters[10],
            bits_per_s=max(0, read_number(f"{top}/{name}/speed", 0)) * 1_000_000,
        )


def _read_ports(root: str) -> Iterator[NetworkCounters]:
    """Yield the InfiniBand and RoCE ports, except those of virtual functions.

    To read counters that a function may not have makes some drivers write to the
    kernel's log each time (gpud#1164).
    """
    top = f"{root}/sys/class/infiniband"
    for adapter in list_names(top):
        if Path(f"{top}/{adapter}/device/physfn").exists():
            continue
        for port in list_names(f"{top}/{adapter}/ports"):
            own = f"{top}/{adapter}/ports/{port}"
            received, sent, *errors = (
                read_number(f"{own}/counters/{name}", -1)
                for name in ("port_rcv_data", "port_xmit_data", *_PORT_ERRORS)
            )
            if min(received, sent) >= 0:
                yield NetworkCounters(
                    name=f"{adapter}:{port}",
                    received_bytes=received * _WORD_BYTES,
                    sent_bytes=sent * _WORD_BYTES,
                    num_errors=sum(count for count in errors if count > 0),
                    bits_per_s=parse_rate(read_text(f"{own}/rate")) * 1_000_000,
                )
