"""What else runs on a host, and what of it hangs in the kernel."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.check.facts import Reading, UnreadableError, Value
from ronde.topology.kernel_files import list_names, read_text

_APART_S = 0.1
_MIN_AGE_S = 10.0
"""Younger processes are this check's own, or come and go."""

_MIN_CPUS = 0.3
_MAX_TOLD = 5
_BLOCKED = "D"


class _Sight(NamedTuple):
    name: str
    state: str
    ticks: int
    started_ticks: int
    cpu: int


class Activity:
    """Two looks at all processes: the first one now, the second when it is read.

    Args:
        root: Where ``proc`` is; empty for this machine.
    """

    def __init__(self, root: str) -> None:
        self._proc = f"{root}/proc"
        self._since_s = time.monotonic()
        self._first = _look(self._proc)

    def read(self, reading: Reading) -> None:
        """Take down the load, who makes it, and who has hung for long.

        The second look is made only where the first or the load gives a reason to.
        """
        loads = Path(f"{self._proc}/loadavg")
        reading.keep("host.load_5m", lambda: float(loads.read_text().split()[1]))
        is_blocked = any(sight.state == _BLOCKED for sight in self._first.values())
        is_loaded = reading.values.get("host.load_5m", 0.0) > 1.0
        second: dict[int, _Sight] = {}
        passed_s = _APART_S
        if is_blocked or is_loaded:
            time.sleep(max(0.0, self._since_s + _APART_S - time.monotonic()))
            passed_s = time.monotonic() - self._since_s
            second = _look(self._proc)
        pairs = [
            (pid, self._first[pid], now)
            for pid, now in second.items()
            if pid in self._first
            and self._first[pid].started_ticks == now.started_ticks
        ]
        reading.keep("host.busy", lambda: self._busy(pairs, passed_s))
        reading.keep("host.blocked", lambda: self._blocked(pairs))

    def _busy(self, pairs: list[tuple[int, _Sight, _Sight]], passed_s: float) -> Value:
        """Return who keeps CPUs busy, the busiest first."""
        per_s = os.sysconf("SC_CLK_TCK")
        uptime_s = float(read_text(f"{self._proc}/uptime").split()[0])
        used = [
            ((now.ticks - before.ticks) / per_s / passed_s, pid, now.name)
            for pid, before, now in pairs
            if now.started_ticks < (uptime_s - _MIN_AGE_S) * per_s
        ]
        return [
            {"pid": pid, "name": name, "cpus": round(cpus, 1)}
            for cpus, pid, name in sorted(used, reverse=True)[:_MAX_TOLD]
            if cpus >= _MIN_CPUS
        ]

    def _blocked(self, pairs: list[tuple[int, _Sight, _Sight]]) -> Value:
        """Return who was blocked in both looks, and has not run for how long."""
        hanging = [
            pid
            for pid, before, now in pairs
            if before.state == now.state == _BLOCKED and before.ticks == now.ticks
        ]
        waits_s = {pid: self._wait_s(pid, self._first[pid].cpu) for pid in hanging}
        longest = sorted(hanging, key=lambda pid: -waits_s[pid])[:_MAX_TOLD]
        return [
            {"pid": pid, "name": self._first[pid].name, "seconds": waits_s[pid]}
            for pid in longest
        ]

    def _wait_s(self, pid: int, cpu: int) -> float:
        """Return how long a process has not run: in seconds, to a tenth."""
        # Each CPU has a clock of its own, and they drift apart by what a hypervisor
        # takes: the present is read where the process last ran, if that is allowed.
        allowed = os.sched_getaffinity(0)
        with suppress(OSError):
            os.sched_setaffinity(0, {cpu})
        try:
            now_ms = self._last_ran_ms("self")
        finally:
            os.sched_setaffinity(0, allowed)
        return round((now_ms - self._last_ran_ms(str(pid))) / 1000, 1)

    def _last_ran_ms(self, name: str) -> float:
        return parse_exec_start(read_text(f"{self._proc}/{name}/sched"))


def parse_exec_start(text: str) -> float:
    """Return of ``/proc/PID/sched`` when it last ran, by the clock of its CPU.

    Returns:
        Milliseconds since the boot.

    Raises:
        UnreadableError: It is not told.
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "se.exec_start":
            return float(value)
    raise UnreadableError("/proc/PID/sched does not tell when a process last ran")


def parse_stat(text: str) -> tuple[str, str, int, int, int]:
    """Return of ``/proc/PID/stat`` name, state, ticks of CPU used, of the start; CPU.

    Raises:
        ValueError: It is no such line.
        IndexError: It is cut short.
    """
    front, _, rest = text.rpartition(")")
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])
    name = front.partition("(")[2]
    return name, fields[0], ticks, int(fields[19]), int(fields[36])


def _look(proc: str) -> dict[int, _Sight]:
    found: dict[int, _Sight] = {}
    for name in list_names(proc):
        text = read_text(f"{proc}/{name}/stat") if name.isdecimal() else ""
        # It may have ended meanwhile.
        with suppress(ValueError, IndexError):
            found[int(name)] = _Sight(*parse_stat(text))
    return found
