"""Run one part: with a time limit, in processes of its own that all end with it."""

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from scripts.gpu_machine.parts import Part

SKIPPED = 77
"""The exit code of a part that found out that it cannot run here."""
MAX_LOG_BYTES = 1 << 20
"""What is kept of a part's output: its end."""
_GRACE_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36


class Result(StrEnum):
    """The end of a part."""

    PASSED = "passed"
    FAILED = "failed"
    RAN_OVER = "ran over"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One part's result.

    Attributes:
        name: Of the part.
        result: How it ended.
        seconds: How long it took.
        words: Of one that did not pass, why: the last line of its output.
    """

    name: str
    result: Result
    seconds: float
    words: str = ""

    def __str__(self) -> str:
        """Return it as a line."""
        line = f"{self.result:9}{self.seconds:6.1f} s  {self.name}"
        return f"{line}: {self.words}" if self.words else line


class Runner:
    """Runs parts, one at a time.

    Args:
        root: The repository, in which parts run.
        python: Their interpreter.
        folder: Where logs go.
    """

    def __init__(self, root: Path, python: Path, folder: Path) -> None:
        self._root = root
        self._python = python
        self._folder = folder
        self._env = {
            name: value
            for name, value in os.environ.items()  # noqa: TID251
            if name not in ("PYTHONPATH", "PYTHONHOME")
        }
        self._env |= {
            "PATH": f"{python.parent}:{self._env.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            # What else the machine has installed takes no part in the tests.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            # Asked in the usual way whether there is a GPU, a process can fork none
            # that uses it.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        # What a part leaves behind comes to this process, which ends it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, part: Part, limit_s: float) -> Outcome:
        """Run a part for at most ``limit_s``, and a little to clean up in."""
        started_s = time.monotonic()
        log_path = self._folder / f"{part.log}.log"
        with log_path.open("ab") as log:
            begun_at = log.tell()
            log.write(f"\n==== {part.name}: {' '.join(part.words)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [str(self._python), *part.words],
                cwd=self._root,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            is_over = False
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                is_over = True
            finally:
                _end(process)
        seconds = time.monotonic() - started_s
        result = _result(part, process.returncode, is_over=is_over)
        words = "" if result is Result.PASSED else _last_line(log_path, begun_at)
        if is_over:
            words = f"killed after {limit_s:.0f} s; {words}"
        elif process.returncode:
            words = f"exit code {process.returncode}; {words}".rstrip("; ")
        outcome = Outcome(part.name, result, round(seconds, 1), words)
        _close_log(log_path, begun_at, str(outcome))
        return outcome


def _result(part: Part, code: int, *, is_over: bool) -> Result:
    if is_over:
        return Result.RAN_OVER
    if code == SKIPPED:
        return Result.SKIPPED
    return Result.PASSED if code in part.passing else Result.FAILED


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, its group, and all processes that it left.

    What the kernel does not let go of, as where a driver hangs, is not waited for.
    """
    if process.poll() is None:
        process.terminate()  # a launcher ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    end_s = time.monotonic() + _GRACE_S
    while (children := _children()) and time.monotonic() < end_s:
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        os.sched_yield()


def _children() -> list[int]:
    """Return this process's children: those of a part that is over come here, too."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _last_line(path: Path, begun_at: int) -> str:
    with path.open("rb") as log:
        log.seek(max(begun_at, log.seek(0, os.SEEK_END) - 4096))
        lines = log.read().decode(errors="replace").splitlines()
    said = [line.strip() for line in lines[1:] if line.strip()]
    return said[-1][:300] if said else "no output"


def _close_log(path: Path, begun_at: int, line: str) -> None:
    """Cut a part's output to its last lines, and return the part's end."""
    with path.open("r+b") as log:
        size = log.seek(0, os.SEEK_END) - begun_at
        if size > MAX_LOG_BYTES:
            log.seek(-MAX_LOG_BYTES, os.SEEK_END)
            kept = log.read()
            log.seek(begun_at)
            log.truncate()
            log.write(f"\n... {size - MAX_LOG_BYTES} bytes are left out\n".encode())
            log.write(kept)
        log.write(f"\n==== {line}\n".encode())
