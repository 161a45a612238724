"""Probes, each in a process of its own: a driver that hangs takes nothing with it.

Run as a program it is one probe: settings come in as JSON, facts go out as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from ronde.check.facts import Reading, Value

_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.check.probing import main; main(sys.argv[2:])"
)
ENDED = "it ended with code"
"""How the failure begins of a probe that ended by itself; any other one hung."""

_KILLED_S = 1.0
_MAX_SAID_CHARS = 300


class ProbeEntry(NamedTuple):
    """A probe that there is.

    Attributes:
        modules: Each has ``read(reading: Reading) -> None``; they run in turn.
        deadline_s: What it may take; it is killed then.
        facts: How the names of its facts begin, such as ``host.``.
        settings: For it alone, beside those of all.
    """

    modules: tuple[str, ...]
    deadline_s: float
    facts: str
    settings: Mapping[str, Value] = MappingProxyType({})


class ProbeOutcome(NamedTuple):
    """What came of a probe.

    Attributes:
        values: Its facts.
        unreadable: Facts that it could not read, with the reason.
        failure: Why it gave none; empty where it ran to its end.
        seconds: How long it took.
    """

    values: dict[str, Value]
    unreadable: dict[str, str]
    failure: str
    seconds: float


def run_probes(
    entries: Mapping[str, ProbeEntry], settings: dict[str, Value]
) -> dict[str, ProbeOutcome]:
    """Run probes side by side; return what each found, by its name.

    Args:
        entries: By name.
        settings: For ``Reading.settings``.
    """
    # Imported here: probes, whose program this is too, do without.
    from concurrent.futures import ThreadPoolExecutor

    begun_s = time.monotonic()
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", _BOOT, _PACKAGE_DIR, *entry.modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group of its own, so that what it has started ends with it.
            start_new_session=True,
        )
        for name, entry in entries.items()
    }
    given = {
        name: json.dumps({**settings, **entry.settings}).encode()
        for name, entry in entries.items()
    }
    # One after the other, those behind a probe that hangs would be taken to hang too.
    with ThreadPoolExecutor(len(entries) or 1) as pool:
        collected = {
            name: pool.submit(
                _collect, process, given[name], begun_s, entries[name].deadline_s
            )
            for name, process in running.items()
        }
        return {name: each.result() for name, each in collected.items()}


def _collect(
    process: "subprocess.Popen[bytes]", given: bytes, begun_s: float, deadline_s: float
) -> ProbeOutcome:
    left_s = max(0.0, begun_s + deadline_s - time.monotonic())
    try:
        said, complaint = process.communicate(given, timeout=left_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.communicate(timeout=_KILLED_S)
            how = "was killed"
        except subprocess.TimeoutExpired:
            # What hangs in the kernel dies when that lets go of it.
            how = "cannot even be killed"
        seconds = time.monotonic() - begun_s
        return ProbeOutcome(
            {}, {}, f"it hung and {how} after {deadline_s:g} s", seconds
        )
    seconds = time.monotonic() - begun_s
    try:
        told: Any = json.loads(said)
        return ProbeOutcome(told["values"], told["unreadable"], "", seconds)
    except (ValueError, KeyError, TypeError):
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        reason = f"{ENDED} {process.returncode}: {''.join(last)}"
        return ProbeOutcome({}, {}, reason[:_MAX_SAID_CHARS], seconds)


def main(modules: Sequence[str]) -> None:
    """Be one probe: read settings, write facts."""
    settings: Any = json.loads(sys.stdin.buffer.read())
    reading = Reading(settings)
    # What libraries print must not be taken for facts.
    facts_fd = os.dup(1)
    os.dup2(2, 1)
    for module in modules:
        import_module(module).read(reading)
    answer = {"values": reading.values, "unreadable": reading.unreadable}
    with open(facts_fd, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
        json.dump(answer, out)
