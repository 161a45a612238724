"""What is done with a path, in a process that may hang.

Run as a program it is one such process: errands come in as an argument, and an answer a
line goes out. Many are started, so it imports little, and nothing but the standard
library.
"""

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SAMPLE_BYTES = 64 << 10
NUM_SAMPLES = 16
"""So many pieces of a large file are read, from its first byte to its last."""

_PAUSE_S = 0.02


def main(errands: str) -> None:
    """Run errands; write what comes of each as soon as it does."""
    for errand in json.loads(errands):
        sys.stdout.write(json.dumps(_run(errand)) + "\n")
        sys.stdout.flush()


def _run(errand: dict[str, object]) -> dict[str, object]:
    do = _ERRANDS[str(errand.pop("do"))]
    try:
        return do(**errand)
    except OSError as error:
        return {"error": error.strerror or str(error)}


def look(path: str) -> dict[str, object]:
    """Tell about a directory: whether it is one, may be written to, and has room."""
    room = os.statvfs(path)
    return {
        "real_path": str(Path(path).resolve()),
        "is_directory": Path(path).is_dir(),
        "is_writable": os.access(path, os.W_OK | os.X_OK),
        "free_bytes": room.f_bavail * room.f_frsize,
        "size_bytes": room.f_blocks * room.f_frsize,
        "free_inodes": room.f_favail,
        "num_inodes": room.f_files,
    }


def sample(path: str) -> dict[str, object]:
    """Tell a file's size and the beginning of a hash of it.

    Of a file that is larger than all samples together, these are spread evenly from its
    beginning to its end.
    """
    # Imported where it is needed: it takes longer than most errands.
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


def leave(path: str, name: str) -> dict[str, object]:
    """Leave a small file, so that it appears by a renaming."""
    place = Path(path, name)
    part = Path(path, f"{name}.part")
    part.write_text(name, encoding="utf-8")
    part.replace(place)
    return {}


def find(path: str, names: Sequence[str], patience_s: float) -> dict[str, object]:
    """Wait for files that others leave; tell after how many seconds each is seen."""
    begun_s = time.monotonic()
    seen: dict[str, float] = {}
    Path(path).stat()
    while True:
        for name in names:
            if name not in seen and _holds(Path(path, name), name):
                seen[name] = time.monotonic() - begun_s
        if len(seen) == len(names) or time.monotonic() - begun_s > patience_s:
            return {"seen_s": seen}
        time.sleep(_PAUSE_S)


def _holds(place: Path, text: str) -> bool:
    try:
        return place.read_bytes() == text.encode()
    except OSError:
        return False


def remove(path: str, names: Sequence[str]) -> dict[str, object]:
    """Take away files that were left, where they still are."""
    for name in names:
        for place in (Path(path, name), Path(path, f"{name}.part")):
            place.unlink(missing_ok=True)
    return {}


_ERRANDS: dict[str, Callable[..., dict[str, object]]] = {
    each.__name__: each for each in (look, sample, leave, find, remove)
}
