"""Probes, each in a process of its own: a driver that hangs takes nothing with it.

Run as a program it is one probe: settings come in as JSON, facts go out as JSON.
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
from types import MappingProxyType
from typing import Any, NamedTuple

from ronde.check.fleet import Value

FAILED = "probe.failed"  # fact: by the name of each probe that gave none, why
# How the failure begins of a probe that ended by itself; any other one hung.
ENDED = "it ended with code"
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.check.probing import main; main(sys.argv[2:])"
)
_WORDS = ("-c", _BOOT, __file__.rpartition("/ronde/check/")[0])
_KILLED_S = 1.0
_MAX_REASON_CHARS = 300


class UnreadableError(Exception):
    """A fact cannot be read; the message is the reason, without a subject."""


class FactReader:
    """Facts as a probe finds them, and why others cannot be read."""

    def __init__(self, settings: dict[str, Value]) -> None:
        self.settings = settings
        # Where proc and sys are; empty for this machine.
        self.root = str(settings.get("root", "/")).rstrip("/")
        self.values: dict[str, Value] = {}
        self.unreadable: dict[str, str] = {}

    def keep(self, name: str, read: Callable[[], Value]) -> None:
        with self.reading(name):
            self.values[name] = read()

    def keep_each(
        self, names: Sequence[str], read: Callable[[], Iterable[Value]]
    ) -> None:
        with self.reading(*names):
            self.values |= zip(names, read(), strict=True)

    @contextmanager
    def reading(self, *names: str) -> Generator[None]:
        """Store these facts as unreadable if the block cannot read them."""
        try:
            yield
        except UnreadableError as error:
            reason = str(error)
        except PermissionError as error:
            reason = f"{error.filename or error}: permission denied; root would help"
        except OSError as error:
            reason = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            reason = f"its form is unknown: {error!r}"
        else:
            return
        self.unreadable |= dict.fromkeys(names, reason)


class Ended(NamedTuple):
    """A program that is over."""

    output: bytes
    failure: str  # how it failed, or hung; empty where it ran to its end
    seconds: float


def run_programs(
    programs: Sequence[tuple[Sequence[str], bytes, float]],
) -> list[Ended]:
    """Run Python with some words, an input and a deadline, side by side.

    What is late has hung: it is killed, and holds up no other.
    """
    # Imported here: probes, whose program this is too, do without.
    from concurrent.futures import ThreadPoolExecutor

    begun_s, pipe = time.monotonic(), subprocess.PIPE
    running = [
        subprocess.Popen(
            [sys.executable, *words],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # A group of its own, so that what it has started ends with it.
            start_new_session=True,
        )
        for words, _, _ in programs
    ]

    def collect(number: int) -> Ended:
        process, (_, given, deadline_s) = running[number], programs[number]
        output: bytes
        failure, left_s = "", max(0.0, begun_s + deadline_s - time.monotonic())
        try:
            output, complaint = process.communicate(given, timeout=left_s)
            if process.returncode or not output:
                last = complaint.decode(errors="replace").strip().splitlines()[-1:]
                failure = f"{ENDED} {process.returncode}: {''.join(last)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            what = "was killed"
            try:
                output, _ = process.communicate(timeout=_KILLED_S)
            except subprocess.TimeoutExpired as error:
                # What hangs in the kernel dies when that lets go of it.
                what, output = "cannot even be killed", error.output or b""
            failure = f"it hung and {what} after {deadline_s:g} s"
        seconds = time.monotonic() - begun_s
        return Ended(output, failure[:_MAX_REASON_CHARS], seconds)

    # One after the other, those behind one that hangs would be taken to hang too.
    with ThreadPoolExecutor(len(programs) or 1) as pool:
        return list(pool.map(collect, range(len(programs))))


class ProbeEntry(NamedTuple):
    """A probe."""

    # Each has ``read(reader: FactReader) -> None``; they run in turn.
    modules: tuple[str, ...]
    deadline_s: float  # when it is killed
    facts: str  # how the names of its facts begin, such as ``host.``
    settings: Mapping[str, Value] = MappingProxyType({})  # for it alone


class ProbeOutcome(NamedTuple):
    """The facts of a probe, and those that it could not read, with the reason."""

    values: dict[str, Value]
    unreadable: dict[str, str]
    failure: str  # why it gave none; empty where it ran to its end
    seconds: float


def run_probes(
    entries: Mapping[str, ProbeEntry], settings: dict[str, Value]
) -> dict[str, ProbeOutcome]:
    given = [json.dumps({**settings, **e.settings}).encode() for e in entries.values()]
    ended = run_programs(
        [
            ((*_WORDS, *entry.modules), text, entry.deadline_s)
            for entry, text in zip(entries.values(), given, strict=True)
        ]
    )
    found: dict[str, ProbeOutcome] = {}
    for name, (output, failure, seconds) in zip(entries, ended, strict=True):
        facts: Any = {} if failure else json.loads(output)
        values, unreadable = facts.get("values", {}), facts.get("unreadable", {})
        found[name] = ProbeOutcome(values, unreadable, failure, seconds)
    return found


def run_probe(
    module: str, deadline_s: float, settings: Mapping[str, Value]
) -> ProbeOutcome:
    """Run what a module reads in a process of its own."""
    return run_probes({"": ProbeEntry((module,), deadline_s, "", settings)}, {})[""]


def main(modules: Sequence[str]) -> None:
    reader = FactReader(json.loads(sys.stdin.buffer.read()))
    # What libraries print must not be taken for facts.
    facts_fd = os.dup(1)
    os.dup2(2, 1)
    for module in modules:
        import_module(module).read(reader)
    answer = {"values": reader.values, "unreadable": reader.unreadable}
    with open(facts_fd, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
        json.dump(answer, out)
