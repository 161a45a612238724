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
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.launch.messages import ProcessStack, Stacks
from ronde.launch.process_tree import (
    ProcessStat,
    descendants,
    read_process,
    read_processes,
    read_text,
    signal_process,
    waits_in,
)

_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)
_PLAIN_ENDS = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_OOM_KILL = re.compile(r"oom-kill:|oom_reaper:|Killed process ")
_GPU_ERROR = "NVRM: Xid"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_CLOCK_STEP_S = 1.0
_OTHER = "a process of the job"
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
    """Looks at the machine now, to report later what changed."""

    def __init__(self) -> None:
        self._since_s = time.time()
        own = oom_counters(
            read_text("/proc/self/cgroup"), read_text("/proc/self/mountinfo")
        )
        # Where no group counts, the machine does.
        self._counters = [*own, "/proc/vmstat"]
        self._num_oom_kills = self._count_oom_kills()
        self._kernel_lines: list[str] = []
        self._kernel_fd = _open_kernel_log()

    def explain(self, status: int, wait_status: int, pid: int, cwd: str) -> str:
        """Return in half a sentence what the kernel knows of an end, or nothing."""
        if status in _PLAIN_ENDS:
            return ""
        kernel_line = self._kernel_line(pid)
        is_crash = -status in _CRASH_SIGNALS
        found = [self._explain_core(wait_status, pid, cwd)] if status < 0 else []
        if _OOM_KILL.search(kernel_line):
            self._num_oom_kills += 1
            found.append("the kernel killed it for lack of memory (OOM)")
        elif self._count_oom_kills() > self._num_oom_kills and not is_crash:
            is_own = status == -signal.SIGKILL
            self._num_oom_kills += is_own
            victim, seems = ("it", " (OOM), it seems") if is_own else (_OTHER, "")
            found.append(f"the kernel killed {victim} for lack of memory{seems}")
        elif kernel_line and (is_crash or _GPU_ERROR in kernel_line):
            found.append(f"kernel log: {kernel_line}")
        if status == -signal.SIGBUS:
            found.append(_explain_shared_memory())
        return "; ".join(filter(None, found))

    def close(self) -> None:
        if self._kernel_fd is not None:
            os.close(self._kernel_fd)
            self._kernel_fd = None

    def _explain_core(self, wait_status: int, pid: int, cwd: str) -> str:
        if not os.WCOREDUMP(wait_status):
            return ""
        pattern = read_text("/proc/sys/kernel/core_pattern").rstrip("\n")
        if pattern.startswith("|"):
            taker = pattern[1:].split()[0].rpartition("/")[2]
            is_systemd = taker == "systemd-coredump"
            cure = f", see coredumpctl info {pid}" if is_systemd else ""
            return f"core dumped to {taker}{cure}"
        has_pid = read_text("/proc/sys/kernel/core_uses_pid").strip() == "1"
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
            for line in read_text(path).splitlines():
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
    entries = (line.split(":", 2) for line in cgroups.splitlines())
    own = (path for _, names, path in entries if controller in names.split(","))
    return next(own, "/")


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


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
    known = {"%": "%", "p": str(pid)}
    matching = re.sub(r"%(.)", lambda found: known.get(found[1], "*"), pattern)
    # Two of them side by side mean something else to ``glob``, or nothing.
    return re.sub(r"\*+", "*", matching)


def _open_kernel_log() -> int | None:
    with suppress(OSError):
        if os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE:  # noqa: PTH115
            fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(fd, 0, os.SEEK_END)
            return fd
    return None


def _read_kernel_log(fd: int) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            record = os.read(fd, _KMSG_BYTES)
        except BrokenPipeError:
            # Lines were overwritten before they were read.
            continue
        except OSError:
            return lines
        text = record.decode("utf-8", "backslashreplace").partition(";")[2]
        lines.append(text.partition("\n")[0])


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


class _Signals(NamedTuple):
    """What is known of the signal in one process, and in which threads."""

    blocked_in: frozenset[str]
    is_pending: bool
    is_caught: bool


class StackTaker:
    """Takes the stacks of one agent's ranks; a part of its loop."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._asked: dict[int, Generator[None, None, tuple[ProcessStack, ...]]] = {}

    @property
    def due_s(self) -> float:
        """When ``take`` must be called at the latest, on the monotonic clock."""
        return time.monotonic() + _POLL_S if self._asked else float("inf")

    def environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
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
                alive = [p for p in processes if not p.is_zombie][:_MAX_PROCESSES]
                self._asked[rank] = _take_stacks(alive, self._files.get(rank))

    def take(self) -> list[Stacks]:
        taken: list[Stacks] = []
        for rank, steps in list(self._asked.items()):
            try:
                next(steps)
            except StopIteration as end:
                taken.append(Stacks(rank, end.value))
                del self._asked[rank]
        return taken

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._asked.clear()


def _take_stacks(
    processes: Sequence[ProcessStat], fd: int | None
) -> Generator[None, None, tuple[ProcessStack, ...]]:
    """Ask a rank's processes one after the other; yield while one has not answered."""
    ends_at_s = time.monotonic() + _RANK_S
    taken: list[ProcessStack] = []
    for process in processes:
        pid, text = process.pid, ""
        before = _read_signals(pid)
        # Both: by default the signal would end a process.
        can_answer = before.is_caught and fd is not None and _holds_file(pid, fd)
        if can_answer and fd is not None and time.monotonic() <= ends_at_s:
            os.ftruncate(fd, 0)
            due_s = time.monotonic() + _PROCESS_S
            signal_process(process, _SIGNAL)
            while not _has_answered(pid, fd, before) and time.monotonic() <= due_s:
                yield
            text = os.pread(fd, _MAX_TEXT_BYTES, 0).decode(errors="replace")
        state = "" if text else _kernel_state(pid)
        taken.append(ProcessStack(pid, process.name, state, text))
    return tuple(taken)


def _has_answered(pid: int, fd: int, before: _Signals) -> bool:
    """Whether the handler has run to its end: it blocks its own signal."""
    if not os.fstat(fd).st_size:
        return False
    signals = _read_signals(pid)
    return not signals.is_pending and signals.blocked_in <= before.blocked_in


def _holds_file(pid: int, fd: int) -> bool:
    wanted = os.fstat(fd)
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
            text = (task / "status").read_text(errors="replace")
            fields = dict(re.findall(r"^(Sig\w+|ShdPnd):\t(\w+)$", text, re.MULTILINE))
            masks = {name: int(fields[name], 16) & bit for name in _MASKS}
            if masks["SigBlk"]:
                blocked_in.add(task.name)
            is_pending |= bool(masks["SigPnd"] or masks["ShdPnd"])
            is_caught |= bool(masks["SigCgt"])
    except (OSError, ValueError, KeyError):
        # It ends meanwhile: nothing is known, and nothing is waited for.
        return _Signals(frozenset(blocked_in), is_pending=False, is_caught=False)
    return _Signals(frozenset(blocked_in), is_pending, is_caught)


def _kernel_state(pid: int) -> str:
    process = read_process(pid)
    if process is None:
        return "has ended"
    return _STATES.get(process.state, process.state) + waits_in(process)
