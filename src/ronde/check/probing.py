"""Run probes in separate processes, so that a hanging driver blocks only one probe.

``main`` is the program of a probe. It reads settings and writes facts as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ronde.check.fleet import Value
from ronde.processes import read_stat

FAILED = "probe.failed"  # fact: the failure of each probe that returned no facts
# Prefix of the failure if the probe exited; otherwise it hung.
ENDED = "it ended with code"
_BOOT = (
    # Remove the current directory: ranks have their script's directory instead.
    "import sys; sys.path[:] = filter(None, [*sys.path, sys.argv[1]]); "
    "from ronde.check.probing import main; main(sys.argv[2:])"
)
_WORDS = ("-c", _BOOT, __file__.rpartition("/ronde/check/")[0])
_KILLED_S = 1.0
_POLL_S = 0.25
MOST_WAIT_S = 120.0
"""A probe that still waits for a CPU is killed this long after its deadline."""
_MAX_REASON_CHARS = 300


class UnreadableError(Exception):
    """Raised if a fact cannot be read; the message is the reason."""


class FactReader:
    """The facts that a probe has read, and the reason for each unreadable fact."""

    def __init__(self, settings: dict[str, Value]) -> None:
        self.settings = settings
        # The folder with proc and sys; empty on this machine.
        self.root = str(settings.get("root", "/")).rstrip("/")
        self.values: dict[str, Value] = {}
        self.unreadable: dict[str, str] = {}

    def store(self, name: str, read: Callable[[], Value]) -> None:
        with self.reading(name):
            self.values[name] = read()

    def store_each(
        self, names: Sequence[str], read: Callable[[], Iterable[Value]]
    ) -> None:
        with self.reading(*names):
            self.values |= zip(names, read(), strict=True)

    @contextmanager
    def reading(self, *names: str) -> Generator[None]:
        """Record these facts as unreadable if the block raises an error."""
        try:
            yield
        except UnreadableError as error:
            reason = str(error)
        except PermissionError as error:
            reason = f"{error.filename or error}: permission denied; root would help"
        except OSError as error:
            reason = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            reason = f"unknown format: {error!r}"
        else:
            return
        self.unreadable |= dict.fromkeys(names, reason)


class ProbeEntry(NamedTuple):
    """A probe: modules with a function ``read(reader)``, which share a process."""

    modules: tuple[str, ...]
    deadline_s: float  # it is killed then, unless it waits for a processor
    facts: str  # prefix of its facts, such as ``host.``
    settings: Mapping[str, Value] = MappingProxyType({})  # in addition to the common


class ProbeOutcome(NamedTuple):
    """The facts of a finished probe, or its failure."""

    values: dict[str, Value]
    unreadable: dict[str, str]  # the reason, by fact
    failure: str  # the reason if the probe did not finish, else empty
    seconds: float


def run_probes(
    entries: Mapping[str, ProbeEntry], settings: Mapping[str, Value]
) -> dict[str, ProbeOutcome]:
    """Run probes concurrently.

    Past its deadline, a probe is killed once it is idle at two looks in a row: no
    thread of it or of the processes below it is runnable, and none used CPU time since
    the look before. A runnable one waits for a CPU that a quota or other programs take.
    It is killed, too, if it has used more CPU time than the deadline, or after
    ``MOST_WAIT_S``.
    """
    # Imported here, because probes import this module and do not need it.
    from concurrent.futures import ThreadPoolExecutor

    begun_s, pipe = time.monotonic(), subprocess.PIPE
    running = {
        name: subprocess.Popen(
            [sys.executable, *_WORDS, *entry.modules],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # Its own process group, so that its children can be killed as well.
            start_new_session=True,
        )
        for name, entry in entries.items()
    }

    def collect(name: str) -> ProbeOutcome:
        process, entry, failure = running[name], entries[name], ""
        given = json.dumps({**settings, **entry.settings}).encode()
        facts: Any = {}
        try:
            output, complaint = _output_of(process, given, begun_s, entry.deadline_s)
            if process.returncode or not output:
                last = complaint.decode(errors="replace").strip().splitlines()[-1:]
                failure = f"{ENDED} {process.returncode}: {''.join(last)}"
            else:
                facts = json.loads(output)
        except subprocess.TimeoutExpired:
            took_s = round(time.monotonic() - begun_s)
            failure = f"it hung and {_kill(process)} after {took_s} s"
        values, unreadable = facts.get("values", {}), facts.get("unreadable", {})
        seconds = time.monotonic() - begun_s
        return ProbeOutcome(values, unreadable, failure[:_MAX_REASON_CHARS], seconds)

    # One by one, probes behind a hanging probe would seem to hang as well.
    with ThreadPoolExecutor(len(running) or 1) as pool:
        return dict(zip(running, pool.map(collect, running), strict=True))


def _output_of(
    process: "subprocess.Popen[bytes]", given: bytes, begun_s: float, deadline_s: float
) -> tuple[bytes, bytes]:
    """Return the output of a probe; raise ``TimeoutExpired`` if it hangs."""
    sent: bytes | None = given
    timeout_s = max(0.0, begun_s + deadline_s - 2 * _POLL_S - time.monotonic())
    used_s, num_idle = 0.0, 0
    while True:
        try:
            return process.communicate(sent, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            before_s, (used_s, is_ready) = used_s, _processor_use(process.pid)
            took_s = time.monotonic() - begun_s
            is_late = took_s >= deadline_s
            num_idle = 0 if is_ready or used_s > before_s else num_idle + 1
            is_over = used_s >= deadline_s or took_s >= deadline_s + MOST_WAIT_S
            if is_late and process.poll() is not None:
                # This process had too little CPU time to read the output.
                return process.communicate(timeout=deadline_s)
            if is_late and (num_idle > 1 or is_over):
                raise
            sent, timeout_s = None, _POLL_S


def _processor_use(pid: int) -> tuple[float, bool]:
    """Return the CPU seconds of a process and all below it, and if one is runnable.

    Those below may have sessions of their own. Only their files are read, as a scan of
    all processes would take much of a small CPU quota.
    """
    used_s, is_ready = 0.0, False
    try:
        used_s = sum(map(int, read_stat(pid)[12:16])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            is_ready |= read_stat(int(thread.name))[1] == "R"
            for child in (thread / "children").read_text().split():
                below_s, is_below_ready = _processor_use(int(child))
                used_s, is_ready = used_s + below_s, is_ready or is_below_ready
    except OSError:
        return used_s, True  # one has just ended
    return used_s, is_ready


def _kill(process: "subprocess.Popen[bytes]") -> str:
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=_KILLED_S)
    except subprocess.TimeoutExpired:
        # It is blocked in the kernel, and dies once the system call returns.
        return "cannot even be killed"
    return "was killed"


def run_probe(
    module: str, deadline_s: float, settings: Mapping[str, Value]
) -> ProbeOutcome:
    return run_probes({"": ProbeEntry((module,), deadline_s, "", settings)}, {})[""]


def read_facts(reader: FactReader, modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module).read(reader)


def main(modules: Sequence[str]) -> None:
    reader = FactReader(json.loads(sys.stdin.buffer.read()))
    # Keep the output of libraries apart from the facts.
    facts_fd = os.dup(1)
    os.dup2(2, 1)
    read_facts(reader, modules)
    answer = {"values": reader.values, "unreadable": reader.unreadable}
    with open(facts_fd, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
        json.dump(answer, out)
