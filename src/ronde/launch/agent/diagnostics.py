"""Why a rank ended, by the kernel, and where it is now, by its Python stacks.

Note [Stacks]: an agent gives each rank the path of a file in memory, and a start-up
module on its ``PYTHONPATH`` (``startup/sitecustomize.py``) that has ``faulthandler``
write all stacks there on one signal. That works in a call into C too, and while another
thread holds the interpreter. A process is signalled only if it holds that file open and
catches that signal; of others the state in the kernel is shown.
"""

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.launch.messages import ProcessStack, Stacks
from ronde.launch.process_tree import (
    ProcessStat,
    descendants,
    read_process,
    read_processes,
    signal_process,
)

_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)
_PLAIN_ENDS = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_OOM_KILL = re.compile(r"oom-kill:|oom_reaper:|Killed process ")
_GPU_ERROR = "NVRM: Xid"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_CLOCK_STEP_S = 1.0
_MEMORY_DIR = "/dev/shm"  # noqa: S108 - it is asked about, nothing is put there
_MAX_KERNEL_TEXT = 160
_MAX_KEPT_LINES = 256
_KMSG_BYTES = 8192
ANSWER_S = 5.0  # what the agents of a job have to answer in
_SIGNAL = signal.SIGRTMAX - 4
_DIRECTORY = Path(__file__).parents[1] / "startup"
_PROCESS_S = 1.0
_RANK_S = 4.0
_POLL_S = 0.005
_MAX_PROCESSES = 16
_MAX_TEXT_BYTES = 64 << 10


class KernelDiagnostics:
    """Looks at the machine now, to tell later what changed.

    It must be made in the control group that the processes will be in, before they
    start. Nothing that cannot be read is an error: there is less to tell then.
    """

    def __init__(self) -> None:
        self._since_s = time.time()
        self._counters = _oom_counters_here()
        self._num_oom_kills = self._count_oom_kills()
        self._kernel_lines: list[str] = []
        self._kernel_fd = _open_kernel_log()

    def explain(self, status: int, wait_status: int, pid: int, cwd: str) -> str:
        """Say in half a sentence what the kernel knows of an end, or nothing.

        Each process that the kernel killed for lack of memory explains one end only.
        """
        if status in _PLAIN_ENDS:
            return ""
        kernel_line = self._kernel_line(pid)
        is_crash = -status in _CRASH_SIGNALS
        told = [self._explain_core(wait_status, pid, cwd)] if status < 0 else []
        if _OOM_KILL.search(kernel_line):
            self._num_oom_kills += 1
            told.append("the kernel killed it for lack of memory (OOM)")
        elif self._count_oom_kills() > self._num_oom_kills and not is_crash:
            told.append(self._explain_oom_kill(is_own=status == -signal.SIGKILL))
        elif kernel_line and (is_crash or _GPU_ERROR in kernel_line):
            told.append(f"the kernel says: {kernel_line}")
        if status == -signal.SIGBUS:
            told.append(_explain_shared_memory())
        return "; ".join(filter(None, told))

    def close(self) -> None:
        if self._kernel_fd is not None:
            os.close(self._kernel_fd)
            self._kernel_fd = None

    def _explain_oom_kill(self, *, is_own: bool) -> str:
        if not is_own:
            return "the kernel killed a process of the job for lack of memory"
        self._num_oom_kills += 1
        return "the kernel killed it for lack of memory (OOM), it seems"

    def _explain_core(self, wait_status: int, pid: int, cwd: str) -> str:
        if not os.WCOREDUMP(wait_status):
            return ""
        pattern = _read("/proc/sys/kernel/core_pattern").rstrip("\n")
        if pattern.startswith("|"):
            taker = pattern[1:].split()[0].rpartition("/")[2]
            is_systemd = taker == "systemd-coredump"
            cure = f", see coredumpctl info {pid}" if is_systemd else ""
            return f"core dumped to {taker}{cure}"
        has_pid = _read("/proc/sys/kernel/core_uses_pid").strip() == "1"
        if has_pid and "%p" not in pattern:
            pattern += ".%p"
        start = Path("/" if pattern.startswith("/") else cwd)
        # The directory may be gone, or closed to us.
        with suppress(OSError):
            for path in start.glob(core_glob(pattern, pid).lstrip("/")):
                # An older one of the same name is not this process's.
                if path.stat().st_mtime >= self._since_s - _CLOCK_STEP_S:
                    return f"core dumped to {path}"
        return "core dumped"

    def _count_oom_kills(self) -> int:
        for path in self._counters:
            for line in _read(path).splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill" and value.strip().isdecimal():
                    return int(value)
        return 0

    def _kernel_line(self, pid: int) -> str:
        if self._kernel_fd is not None:
            self._kernel_lines += _read_kernel_log(self._kernel_fd)
            del self._kernel_lines[:-_MAX_KEPT_LINES]
        named = re.compile(rf"(\[|[Pp]rocess |pid[=:] ?){pid}\b")
        lines = [line for line in self._kernel_lines if named.search(line)]
        return lines[-1][:_MAX_KERNEL_TEXT] if lines else ""


def oom_counters(cgroups: str, mounts: str) -> list[str]:
    """Return the files that may count the kills of one's own control group."""
    counters: list[str] = []
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        words = place.split()
        root, mount = _unescaped(words[3]), _unescaped(words[4])
        is_v2 = kind.startswith("cgroup2 ")
        is_v1 = kind.startswith("cgroup ") and "memory" in kind.split()[-1].split(",")
        if not is_v1 and not is_v2:
            continue
        path = _own_path(cgroups, "" if is_v2 else "memory")
        name = "memory.events" if is_v2 else "memory.oom_control"
        below = path.removeprefix(root) if root != "/" else path
        # In a container the mount may begin at one's own group.
        counters += [f"{mount}{below.rstrip('/')}/{name}", f"{mount}/{name}"]
    return list(dict.fromkeys(counters))


def _own_path(cgroups: str, controller: str) -> str:
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _oom_counters_here() -> list[str]:
    own = oom_counters(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))
    # Where no group counts, the machine does.
    return [*own, "/proc/vmstat"]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _explain_shared_memory() -> str:
    try:
        room = os.statvfs(_MEMORY_DIR)
    except OSError:
        return ""
    size_mib = room.f_blocks * room.f_frsize >> 20
    free_mib = room.f_bavail * room.f_frsize >> 20
    # A process that is gone has given back what it had, so a small one is named too.
    if free_mib * 20 > size_mib > 1024:
        return ""
    return f"{_MEMORY_DIR} has {free_mib} of {size_mib} MiB free"


def core_glob(pattern: str, pid: int) -> str:
    """Return what matches the core file of a process, by the kernel's pattern."""
    known = {"%": "%", "p": str(pid)}
    matching = re.sub(r"%(.)", lambda found: known.get(found[1], "*"), pattern)
    # Two of them side by side mean something else to ``glob``, or nothing.
    return re.sub(r"\*+", "*", matching)


def _open_kernel_log() -> int | None:
    try:
        if str(Path("/proc/self/ns/pid").readlink()) != _FIRST_PID_NAMESPACE:
            return None
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return None
    return fd


def _read_kernel_log(fd: int) -> list[str]:
    """Return what came since the last time; each read is one line."""
    lines: list[str] = []
    while True:
        try:
            said = os.read(fd, _KMSG_BYTES)
        except BrokenPipeError:
            # Lines were overwritten before they were read.
            continue
        except OSError:
            return lines
        text = said.decode("utf-8", "backslashreplace").partition(";")[2]
        lines.append(text.partition("\n")[0])


class _Signals(NamedTuple):
    """What is known of the signal in one process, and in which threads."""

    blocked_in: frozenset[str]
    is_pending: bool
    is_caught: bool


class StackTaker:
    """Takes the stacks of one agent's ranks; a part of its loop."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._asked: dict[int, _StackRequest] = {}

    @property
    def due_s(self) -> float:
        """When ``take`` must be called at the latest, on the monotonic clock."""
        return time.monotonic() + _POLL_S if self._asked else float("inf")

    def environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which a rank can be asked."""
        try:
            fd = self._files[rank] = os.memfd_create("ronde-stacks", os.MFD_CLOEXEC)
        except OSError:
            return {}
        # Those of a launcher around this one, or of the host that this came from.
        place = _DIRECTORY.parts[-3:]
        paths = env.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in paths if path and Path(path).parts[-3:] != place]
        return {
            "RONDE_STACKS": f"{_SIGNAL},/proc/{os.getpid()}/fd/{fd}",
            "PYTHONPATH": os.pathsep.join([str(_DIRECTORY), *others]),
        }

    def ask(self, pids: Mapping[int, int]) -> None:
        table = read_processes()
        for rank, pid in pids.items():
            if rank not in self._asked and pid in table:
                processes = [table[pid], *descendants(pid, table=table)]
                self._asked[rank] = _StackRequest(processes, self._files.get(rank))

    def take(self) -> list[Stacks]:
        """Return what those say that have told all; call it again when it is due."""
        told = [
            Stacks(rank, tuple(asked.told))
            for rank, asked in self._asked.items()
            if asked.is_over()
        ]
        for each in told:
            del self._asked[each.rank]
        return told

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._asked.clear()


class _StackRequest:
    def __init__(self, processes: Sequence[ProcessStat], fd: int | None) -> None:
        self.told: list[ProcessStack] = []
        self._fd = fd
        self._waiting = [p for p in processes if not p.is_zombie][:_MAX_PROCESSES]
        self._now: ProcessStat | None = None
        self._before = _Signals(frozenset(), is_pending=False, is_caught=False)
        self._ends_at_s = time.monotonic() + _RANK_S
        self._due_s = 0.0

    def is_over(self) -> bool:
        while self._now is not None or self._waiting:
            if self._now is None:
                self._begin(self._waiting.pop(0))
            elif self._has_answered() or time.monotonic() > self._due_s:
                self._end(self._now)
            else:
                return False
        return True

    def _begin(self, process: ProcessStat) -> None:
        now_s = time.monotonic()
        self._before = _read_signals(process.pid)
        # Both: by default the signal would end a process.
        can_answer = self._before.is_caught and self._holds_file(process.pid)
        if not can_answer or now_s > self._ends_at_s or self._fd is None:
            self._tell(process, "")
            return
        os.ftruncate(self._fd, 0)
        self._now, self._due_s = process, now_s + _PROCESS_S
        signal_process(process, _SIGNAL)

    def _has_answered(self) -> bool:
        if self._now is None or self._fd is None or not os.fstat(self._fd).st_size:
            return False
        signals = _read_signals(self._now.pid)
        return not signals.is_pending and signals.blocked_in <= self._before.blocked_in

    def _end(self, process: ProcessStat) -> None:
        text = ""
        if self._fd is not None:
            text = os.pread(self._fd, _MAX_TEXT_BYTES, 0).decode(errors="replace")
        self._now = None
        self._tell(process, text)

    def _tell(self, process: ProcessStat, text: str) -> None:
        state = "" if text else _kernel_state(process.pid)
        self.told.append(ProcessStack(process.pid, process.name, state, text))

    def _holds_file(self, pid: int) -> bool:
        if self._fd is None:
            return False
        wanted = os.fstat(self._fd)
        try:
            return any(
                os.path.samestat(wanted, each.stat())
                for each in Path(f"/proc/{pid}/fd").iterdir()
            )
        except OSError:
            return False


def _read_signals(pid: int) -> _Signals:
    bit = 1 << (_SIGNAL - 1)
    blocked_in: set[str] = set()
    is_pending = is_caught = False
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = dict(
                line.split(":\t", 1)
                for line in (task / "status").read_text(errors="replace").splitlines()
                if line.startswith(("Sig", "ShdPnd"))
            )
            masks = {name: int(fields[name], 16) & bit for name in _MASKS}
            if masks["SigBlk"]:
                blocked_in.add(task.name)
            is_pending |= bool(masks["SigPnd"] or masks["ShdPnd"])
            is_caught |= bool(masks["SigCgt"])
    except (OSError, ValueError, KeyError):
        # It ends meanwhile: nothing is known, and nothing is waited for.
        return _Signals(frozenset(blocked_in), is_pending=False, is_caught=False)
    return _Signals(frozenset(blocked_in), is_pending, is_caught)


_MASKS = ("SigBlk", "SigPnd", "ShdPnd", "SigCgt")


_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel, not to be interrupted",
    "T": "is stopped",
    "t": "is traced",
    "Z": "has ended",
    "X": "has ended",
}


def _kernel_state(pid: int) -> str:
    process = read_process(pid)
    if process is None:
        return "has ended"
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    where = f" in {place}" if place not in ("", "0") else ""
    return _STATES.get(process.state, process.state) + where
