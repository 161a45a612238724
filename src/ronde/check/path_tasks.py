"""Tasks on paths, in processes that may hang: a mount that hangs holds up no other.

A thread would not do: while it hangs in the kernel, its process cannot end. Run as a
program it is one such process: tasks come in as JSON, and an answer a line goes out.
Many are started, so it imports little, and nothing but the standard library.
"""

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SAMPLE_BYTES = 64 << 10
# So many pieces of a large file are read, from its first byte to its last.
NUM_SAMPLES = 16
TYPE_CHECKING = False
if TYPE_CHECKING:
    # The module typing takes longer to import than most tasks take.
    from typing import Any

# ``do`` names a function below; the rest are its arguments.
Task = Mapping[str, object]
# What came of it. ``error`` is why nothing did, ``has_hung``: time was up.
TaskOutcome = dict[str, "Any"]
_PAUSE_S = 0.02
_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.check.path_tasks import main; main()"
)


def run_tasks(
    groups: Sequence[Sequence[Task]], deadline_s: float
) -> list[list[TaskOutcome]]:
    """Run tasks, those of a group one after the other, groups side by side.

    What lies on one mount belongs into one group. What is late has hung, and is killed.
    """
    # Imported here: the program does without.
    from ronde.check.probing import ENDED, run_programs

    words = ("-I", "-S", "-c", _BOOT, _PACKAGE_DIR)
    given = [json.dumps([*map(dict, group)]).encode() for group in groups]
    late = {"error": f"no answer within {deadline_s:g} s", "has_hung": True}
    found: list[list[TaskOutcome]] = []
    ended = run_programs([(words, each, deadline_s) for each in given])
    for group, each in zip(groups, ended, strict=True):
        # What follows the last end of a line was cut off.
        outcomes = [json.loads(line) for line in each.output.split(b"\n")[:-1]]
        is_late = each.failure and not each.failure.startswith(ENDED)
        lost = late if is_late else {"error": "it died"}
        found.append(outcomes + [lost] * (len(group) - len(outcomes)))
    return found


def main() -> None:
    for task in json.load(sys.stdin):
        try:
            outcome = _TASKS[str(task.pop("do"))](**task)
        except OSError as error:
            outcome = {"error": error.strerror or str(error)}
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


def look(path: str) -> TaskOutcome:
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


def sample(path: str) -> TaskOutcome:
    """Return a file's size and the beginning of a hash of it, or of samples of it."""
    # Imported where it is needed: it takes longer than most tasks.
    import hashlib

    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return {"error": "it is no file"}
        digest = hashlib.sha256()
        if size <= NUM_SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(NUM_SAMPLES):
                file.seek(number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return {"size_bytes": size, "digest": digest.hexdigest()[:16]}


def leave(path: str, name: str) -> TaskOutcome:
    """Leave a small file, so that it appears by a renaming."""
    part = Path(path, f"{name}.part")
    part.write_text(name, encoding="utf-8")
    part.replace(Path(path, name))
    return {}


def find(path: str, names: Sequence[str], patience_s: float) -> TaskOutcome:
    """Wait for files that others leave; return those that are seen."""
    begun_s = time.monotonic()
    Path(path).stat()
    while True:
        seen = [name for name in names if _holds(Path(path, name), name)]
        if len(seen) == len(names) or time.monotonic() - begun_s > patience_s:
            return {"seen": seen}
        time.sleep(_PAUSE_S)


def _holds(place: Path, text: str) -> bool:
    try:
        return place.read_bytes() == text.encode()
    except OSError:
        return False


def clear(path: str, names: Sequence[str]) -> TaskOutcome:
    """Remove files of ``leave``, whole or not; another host may do so as well."""
    for name in names:
        Path(path, f"{name}.part").unlink(missing_ok=True)
        Path(path, name).unlink(missing_ok=True)
    return {}


_TASKS: dict[str, Callable[..., TaskOutcome]] = {
    each.__name__: each for each in (look, sample, leave, find, clear)
}
