"""Collect the kernel's reports on a rank's end, and the stacks of running ranks.

Note [Stacks]: an agent gives each rank the path of a file in memory. A module on the
rank's ``PYTHONPATH`` (``startup/sitecustomize.py``) makes ``faulthandler`` write all
stacks to this file on a signal. That also works during a call into C, or while another
thread holds the interpreter. A process is signalled only if it has that file open and
catches the signal; for other processes the agent shows the kernel's state. See also
Note [One channel a rank] in ``world.environment``.
"""

import os
import re
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ronde.launch.wire.messages import ProcessStack, Stacks
from ronde.memory import list_groups
from ronde.processes import (
    ProcessStat,
    descendants,
    read_process,
    read_processes,
    read_text,
    signal_process,
    waits_in,
)
from ronde.topology.kernel_log import read_records

_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)
_PLAIN_ENDS = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_OOM_KILL = re.compile(r"oom-kill:|oom_reaper:|Killed process ")
_GPU_ERROR = "NVRM: Xid"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_MEMORY_DIR = "/dev/shm"  # noqa: S108 - only its size is read
_MAX_KERNEL_TEXT = 160
_MAX_KEPT_LINES = 256
ANSWER_S = 5.0  # for the agents of a job
_SIGNAL = signal.SIGURG  # ignored by default: harmless to a process that calls exec
_DIRECTORY = Path(__file__).parents[1] / "startup"
_PROCESS_S = 1.0
_RANK_S = 4.0
_POLL_S = 0.005
_MAX_PROCESSES = 16
_MAX_TEXT_BYTES = 64 << 10
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel, not to be interrupted",
    "T": "is stopped",
    "t": "is traced",
}


class KernelDiagnostics:
    """Reads the kernel's log and its count of OOM kills since the start of a job."""

    def __init__(self) -> None:
        names = ("memory.events", "memory.oom_control")
        groups = list_groups("", "memory")
        # If no control group has a counter, use the machine's.
        own = [f"{group}/{name}" for group in groups for name in names]
        self._counters = [*own, "/proc/vmstat"]
        self._num_oom_kills = self._count_oom_kills()
        self._kernel_lines: list[str] = []
        self._kernel_fd = _open_kernel_log()

    def explain(self, status: int, wait_status: int, pid: int, cwd: str) -> str:
        """Return the kernel's reason for an exit as a clause, "" if there is none."""
        if status in _PLAIN_ENDS:
            return ""
        kernel_line = self._kernel_line(pid)
        is_crash = -status in _CRASH_SIGNALS
        found = [_explain_core(pid, cwd)] if os.WCOREDUMP(wait_status) else []
        if _OOM_KILL.search(kernel_line):
            self._num_oom_kills += 1
            found.append("the kernel killed it for lack of memory (OOM)")
        elif self._count_oom_kills() > self._num_oom_kills and not is_crash:
            victim, seems = "a process of the job", ""
            if status == -signal.SIGKILL:
                self._num_oom_kills += 1
                victim, seems = "it", " (OOM), it seems"
            found.append(f"the kernel killed {victim} for lack of memory{seems}")
        elif kernel_line and (is_crash or _GPU_ERROR in kernel_line):
            found.append(f"kernel log: {kernel_line}")
        if status == -signal.SIGBUS:
            found.append(_explain_shared_memory())
        return "; ".join(filter(None, found))

    def close(self) -> None:
        if self._kernel_fd >= 0:
            os.close(self._kernel_fd)
            self._kernel_fd = -1

    def _count_oom_kills(self) -> int:
        for path in self._counters:
            if count := re.search(r"^oom_kill (\d+)$", read_text(path), re.MULTILINE):
                return int(count[1])
        return 0

    def _kernel_line(self, pid: int) -> str:
        if self._kernel_fd >= 0:
            with suppress(OSError):
                for record in read_records(self._kernel_fd):
                    text = record.decode("utf-8", "backslashreplace").partition(";")[2]
                    self._kernel_lines.append(text.partition("\n")[0])
            del self._kernel_lines[:-_MAX_KEPT_LINES]
        named = re.compile(rf"(\[|[Pp]rocess |pid[=:] ?){pid}\b")
        lines = [line for line in self._kernel_lines if named.search(line)]
        return lines[-1][:_MAX_KERNEL_TEXT] if lines else ""


def _explain_core(pid: int, cwd: str) -> str:
    pattern = read_text("/proc/sys/kernel/core_pattern").strip()
    if pattern.startswith("|"):
        program = pattern[1:].split()[0].rpartition("/")[2]
        is_systemd = program == "systemd-coredump"
        cure = f", see coredumpctl info {pid}" if is_systemd else ""
        return f"core dumped to {program}{cure}"
    if read_text("/proc/sys/kernel/core_uses_pid") == "1\n":
        pattern += "" if "%p" in pattern else ".%p"
    return f"core dumped to {os.path.join(cwd, core_file(pattern, pid))}"  # noqa: PTH118


def core_file(pattern: str, pid: int) -> str:
    """Expand the kernel's pattern for core files, with ``*`` for unknown parts."""
    known = {"%": "%", "p": str(pid)}
    return re.sub(r"%(.)", lambda found: known.get(found[1], "*"), pattern)


def _explain_shared_memory() -> str:
    try:
        room = os.statvfs(_MEMORY_DIR)
    except OSError:
        return ""
    size_mib = room.f_blocks * room.f_frsize >> 20
    free_mib = room.f_bavail * room.f_frsize >> 20
    # A dead process has freed its memory, so a small file system is named too.
    if free_mib * 20 > size_mib > 1024:
        return ""
    return f"{_MEMORY_DIR} has {free_mib} of {size_mib} MiB free"


def _open_kernel_log() -> int:
    with suppress(OSError):
        if os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE:  # noqa: PTH115
            fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(fd, 0, os.SEEK_END)
            return fd
    return -1


class StackTaker:
    """Collects the stacks of an agent's workers; the agent's loop polls it."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._running: dict[int, Generator[None, None, tuple[ProcessStack, ...]]] = {}

    @property
    def due_s(self) -> float:
        return time.monotonic() + _POLL_S if self._running else float("inf")

    def environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        try:
            fd = self._files[rank] = os.memfd_create("ronde-stacks", os.MFD_CLOEXEC)
        except OSError:
            return {}
        # Leave out such directories of an outer launcher or the controller's host.
        own = _DIRECTORY.parts[-3:]
        paths = env.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in paths if path and Path(path).parts[-3:] != own]
        return {
            "RONDE_STACKS": f"{_SIGNAL},/proc/{os.getpid()}/fd/{fd}",
            "PYTHONPATH": os.pathsep.join([str(_DIRECTORY), *others]),
        }

    def ask(self, pids: Mapping[int, int]) -> None:
        table = read_processes()
        for rank, pid in pids.items():
            if rank not in self._running and pid in table:
                processes = [table[pid], *descendants(pid, table=table)]
                alive = [p for p in processes if not p.is_zombie][:_MAX_PROCESSES]
                self._running[rank] = read_stacks(alive, self._files.get(rank, -1))

    def collect(self) -> list[Stacks]:
        done: list[Stacks] = []
        for rank, steps in list(self._running.items()):
            try:
                next(steps)
            except StopIteration as end:
                done.append(Stacks(rank, end.value))
                del self._running[rank]
        return done

    def forget(self, rank: int) -> None:
        self._running.pop(rank, None)
        if rank in self._files:
            os.close(self._files.pop(rank))

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._running.clear()


def read_stacks(
    processes: Sequence[ProcessStat], fd: int
) -> Generator[None, None, tuple[ProcessStack, ...]]:
    """Collect the stacks of a worker's processes in turn; yield while waiting."""
    ends_at_s = time.monotonic() + _RANK_S
    found: list[ProcessStack] = []
    for process in processes:
        pid, text = process.pid, ""
        # Only such a process writes its stacks to the file.
        can_answer = _threads_with(pid, "SigCgt") and _holds_file(pid, fd)
        if can_answer and time.monotonic() <= ends_at_s:
            blocked_before = _threads_with(pid, "SigBlk")
            os.ftruncate(fd, 0)
            due_s = time.monotonic() + _PROCESS_S
            signal_process(process, _SIGNAL)
            while time.monotonic() <= due_s and not (
                os.fstat(fd).st_size
                # While the handler runs it blocks its own signal.
                and not _threads_with(pid, "SigPnd", "ShdPnd")
                and _threads_with(pid, "SigBlk") <= blocked_before
            ):
                yield
            text = os.pread(fd, _MAX_TEXT_BYTES, 0).decode(errors="replace")
        state = "" if text else _kernel_state(pid)
        found.append(ProcessStack(pid, process.name, state, text))
    return tuple(found)


def _threads_with(pid: int, *masks: str) -> set[str]:
    wanted = re.compile(rf"^(?:{'|'.join(masks)}):\t(\w+)$", re.MULTILINE)
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:  # it has ended
        return set()
    found = {
        t: wanted.findall(read_text(f"/proc/{pid}/task/{t}/status")) for t in threads
    }
    bit = 1 << (_SIGNAL - 1)
    return {t for t, values in found.items() if any(int(v, 16) & bit for v in values)}


def _holds_file(pid: int, fd: int) -> bool:
    try:
        wanted = os.fstat(fd)
        return any(
            os.path.samestat(wanted, each.stat())
            for each in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:
        return False


def _kernel_state(pid: int) -> str:
    process = read_process(pid)
    if process is None or process.state not in _STATES:
        return "has ended"
    return _STATES[process.state] + waits_in(process)
