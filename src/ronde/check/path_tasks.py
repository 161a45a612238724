"""Run file tasks in processes, so that a hanging mount blocks only its own tasks.

Threads would not work: a process cannot exit while a thread is blocked in the kernel.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.check.probing import ENDED, FactReader, ProbeEntry, run_probes

WHOLE_BYTES = 1 << 30  # larger files are sampled
SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 64  # of a larger file, from its first byte to its last
# ``do`` names a function below; the rest are its arguments.
Task = Mapping[str, object]
# The result of the function, or ``error``; ``has_hung`` after a timeout.
TaskOutcome = dict[str, Any]
_PAUSE_S = 0.02


def run_tasks(
    groups: Sequence[Sequence[Task]], deadline_s: float
) -> list[list[TaskOutcome]]:
    """Run groups of tasks concurrently, and the tasks of a group in sequence.

    Put the tasks of one mount into one group: if one of them hangs, the whole group
    counts as hung.
    """
    entries = {
        str(number): ProbeEntry((__name__,), deadline_s, "", {"tasks": group})
        for number, group in enumerate(groups)
    }
    found: list[list[TaskOutcome]] = []
    for group, ran in zip(groups, run_probes(entries, {}).values(), strict=True):
        lost: TaskOutcome = {"error": "it died"}
        if not ran.failure.startswith(ENDED):
            lost = {"error": f"no answer within {deadline_s:g} s", "has_hung": True}
        found.append(ran.values.get("outcomes", [lost] * len(group)))
    return found


def read(reader: FactReader) -> None:
    outcomes: list[TaskOutcome] = []
    for task in reader.settings["tasks"]:
        try:
            outcomes.append(_TASKS[task.pop("do")](**task))
        except OSError as error:
            outcomes.append({"error": error.strerror or str(error)})
    reader.values["outcomes"] = outcomes


def inspect(path: str) -> TaskOutcome:
    room = os.statvfs(path)
    return {
        "real_path": str(Path(path).resolve()),
        "is_directory": Path(path).is_dir(),
        "is_enterable": os.access(path, os.X_OK),
        "is_writable": os.access(path, os.W_OK | os.X_OK),
        "free_bytes": room.f_bavail * room.f_frsize,
        "size_bytes": room.f_blocks * room.f_frsize,
        "free_inodes": room.f_favail,
        "num_inodes": room.f_files,
    }


def digest(path: str) -> TaskOutcome:
    """Return a file's size, the first digits of its SHA-256, and the bytes hashed."""
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return {"error": "it is not a regular file"}
        if size <= WHOLE_BYTES:
            found, num_read = hashlib.file_digest(file, "sha256"), size
        else:
            found, num_read = hashlib.sha256(), NUM_SAMPLES * SAMPLE_BYTES
            for number in range(NUM_SAMPLES):
                file.seek(number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    first = found.hexdigest()[:16]
    return {"size_bytes": size, "digest": first, "read_bytes": num_read}


def mark(path: str, name: str) -> TaskOutcome:
    """Write a file that contains its own name, for ``find`` on other hosts."""
    Path(path, name).write_text(name, encoding="utf-8")
    return {}


def find(path: str, names: Sequence[str], patience_s: float) -> TaskOutcome:
    """Wait for files that other hosts write, and return the names that appeared."""
    begun_s = time.monotonic()
    Path(path).stat()
    while True:
        seen = [name for name in names if _is_complete(Path(path, name))]
        if len(seen) == len(names) or time.monotonic() - begun_s > patience_s:
            return {"seen": seen}
        time.sleep(_PAUSE_S)


def _is_complete(path: Path) -> bool:
    try:
        return path.read_bytes() == path.name.encode()
    except OSError:
        return False


def remove(path: str, names: Sequence[str]) -> TaskOutcome:
    """Remove files of ``mark``, which other hosts may remove at the same time."""
    for name in names:
        Path(path, name).unlink(missing_ok=True)
    return {}


_TASKS: dict[str, Callable[..., TaskOutcome]] = {
    each.__name__: each for each in (inspect, digest, mark, find, remove)
}
