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
from contextlib import suppress
from pathlib import Path

SAMPLE_BYTES = 64 << 10
NUM_SAMPLES = 16
"""So many pieces of a large file are read, from its first byte to its last."""

SPARE_BYTES = 256 << 20
"""So much is to be left free where much is written: others write there, too."""

SMALL_BYTES = 4 << 10
"""What a small file has."""

_PIECE_BYTES = 1 << 20
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
        "is_enterable": os.access(path, os.X_OK),
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


def fill(
    path: str, name: str, num_bytes: int, num_files: int, patience_s: float
) -> dict[str, object]:
    """Write a file, flush it to disk, make small files; tell the seconds of each.

    All is in a folder that is new and taken away again. Nothing is begun where it would
    fill the file system. After ``patience_s`` no more small files are made.
    """
    refusal = _lacks_room(path, num_bytes, num_files)
    if refusal:
        return {"error": refusal, "is_cleared": True}
    own = f"{path}/{name}"
    # What is random can be neither compressed nor found twice.
    data = memoryview(os.urandom(num_bytes))
    os.mkdir(own, 0o700)  # noqa: PTH102 - many paths are made here, and timed
    try:
        write_s = _time_writing(f"{own}/data", data)
        num_made, files_s = _time_small_files(own, num_files, patience_s)
    finally:
        clear(path, [name])
    told = {"write_s": write_s, "num_files": num_made, "files_s": files_s}
    return {**told, "is_cleared": True}


def _lacks_room(path: str, num_bytes: int, num_files: int) -> str:
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    wanted = num_bytes + num_files * SMALL_BYTES + SPARE_BYTES
    # Some file systems have no size, or no limit on the number of files.
    if room.f_blocks and free < wanted:
        return f"it has {free >> 20}MiB free, and {wanted >> 20}MiB are wanted"
    if room.f_files and room.f_favail < 2 * num_files:
        return f"it has room for {room.f_favail} more files, not {2 * num_files}"
    return ""


def _time_writing(place: str, data: memoryview) -> float:
    begun_s = time.monotonic()
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for begin in range(0, len(data), _PIECE_BYTES):
            _write(fd, data[begin : begin + _PIECE_BYTES])
        os.fsync(fd)
    finally:
        # Some file systems write only now.
        os.close(fd)
    return time.monotonic() - begun_s


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _time_small_files(
    folder: str, num_files: int, patience_s: float
) -> tuple[int, float]:
    """Make files and take them away; return how many, and the seconds for all."""
    data = memoryview(os.urandom(SMALL_BYTES))
    num_made, begun_s = 0, time.monotonic()
    while num_made < num_files and time.monotonic() - begun_s < patience_s:
        place = f"{folder}/{num_made}"
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write(fd, data)
        finally:
            os.close(fd)
        num_made += 1
    for number in range(num_made):
        os.unlink(f"{folder}/{number}")  # noqa: PTH108 - see ``fill``
    return num_made, time.monotonic() - begun_s


def clear(path: str, names: Sequence[str]) -> dict[str, object]:
    """Take away folders with the files in them, where they still are; tell which."""
    found: list[str] = []
    for name in names:
        own = Path(path, name)
        # Another host may do the same at the same time.
        with suppress(FileNotFoundError):
            for place in list(own.iterdir()):
                place.unlink(missing_ok=True)
            own.rmdir()
            found.append(name)
    return {"found": found}


_ERRANDS: dict[str, Callable[..., dict[str, object]]] = {
    each.__name__: each for each in (look, sample, leave, find, remove, fill, clear)
}
