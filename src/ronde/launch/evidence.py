"""What the kernel says of a process's end: a core file, a lack of memory."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

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


class Evidence:
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

        Args:
            status: Exit code, or minus the number of the signal.
            wait_status: What ``waitpid`` said.
            pid: The process, which was reaped.
            cwd: The directory that it was started in, in full; it may be gone.
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
        """Look no more."""
        if self._kernel_fd is not None:
            os.close(self._kernel_fd)
            self._kernel_fd = None

    def _explain_oom_kill(self, *, is_own: bool) -> str:
        """Tell of a kill that no line of the kernel's names."""
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
        """Return the last that the kernel logged of this process since the start."""
        if self._kernel_fd is not None:
            self._kernel_lines += _read_kernel_log(self._kernel_fd)
            del self._kernel_lines[:-_MAX_KEPT_LINES]
        named = re.compile(rf"(\[|[Pp]rocess |pid[=:] ?){pid}\b")
        lines = [line for line in self._kernel_lines if named.search(line)]
        return lines[-1][:_MAX_KERNEL_TEXT] if lines else ""


def oom_counters(cgroups: str, mounts: str) -> list[str]:
    """Return the files that may count the kills of one's own control group.

    Args:
        cgroups: What ``/proc/self/cgroup`` says.
        mounts: What ``/proc/self/mountinfo`` says.
    """
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
    """Return a file of the kernel's, empty where that is not to be had."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _explain_shared_memory() -> str:
    """Say how full shared memory is, where that may be why."""
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
    """Open the kernel's log behind all that it holds, where that is allowed.

    In a container its process numbers are not ours, and might be a neighbour's.
    """
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
