"""Room in ``/dev/shm``, and files that ended jobs have left there."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ronde.check.facts import Reading, Value
from ronde.topology.pci import read_link

_OF_TRAINING = re.compile(
    r"nccl-\w+|torch_(?P<torch_pid>\d+)_.*|ronde-mpi-\d+-(?P<agent_pid>\d+)|ronde.*"
)
_DIRECTORY = "/dev/shm"  # noqa: S108 - it is looked at only
_MAX_NAMES = 8


def read_shared_memory(reading: Reading, root: str) -> None:
    """Take down how much room there is, and what nobody uses any more.

    Args:
        reading: Where to.
        root: Where ``dev`` and ``proc`` are; empty for this machine.
    """
    directory = Path(f"{root}{_DIRECTORY}")
    with reading.reading("host.shm_size_bytes", "host.shm_free_bytes"):
        size_bytes, free_bytes = _room(directory)
        reading.values["host.shm_size_bytes"] = size_bytes
        reading.values["host.shm_free_bytes"] = free_bytes
    reading.keep(
        "host.is_shm_writable", lambda: os.access(directory, os.W_OK | os.X_OK)
    )
    reading.keep("host.shm_stale", lambda: _stale(directory, root))


def _room(directory: Path) -> tuple[int, int]:
    """Return the size and what is free; without the directory there is no room."""
    try:
        room = os.statvfs(directory)
    except FileNotFoundError:
        return 0, 0
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _stale(directory: Path, root: str) -> Value:
    """Return the names, number and size of this user's files that no process has."""
    if not directory.is_dir():
        return {"names": [], "count": 0, "bytes": 0}
    with os.scandir(directory) as entries:
        found = {
            entry.name: entry.stat(follow_symlinks=False)
            for entry in entries
            if _is_abandoned(entry.name, root)
        }
    own = {name for name, stat in found.items() if stat.st_uid == os.geteuid()}
    # Looking at all processes takes long, and mostly there is nothing to look for.
    stale = sorted(own - set(_used(own, root))) if own else []
    size_bytes = sum(found[name].st_blocks * 512 for name in stale)
    return {"names": stale[:_MAX_NAMES], "count": len(stale), "bytes": size_bytes}


def _is_abandoned(name: str, root: str) -> bool:
    """Say whether a name is given in training, and by no process that still runs."""
    match = _OF_TRAINING.fullmatch(name)
    if match is None:
        return False
    pid = match["torch_pid"] or match["agent_pid"]
    # Nobody need have it open: what is in a directory may be looked up by its name.
    return not pid or not os.path.exists(f"{root}/proc/{pid}")  # noqa: PTH110


def _used(names: set[str], root: str) -> Iterator[str]:
    """Yield those of the files that a process has open or in its memory."""
    for process in Path(f"{root}/proc").glob("[0-9]*"):
        # One that ends meanwhile has none; another user's cannot have this one's.
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield from names & {_name(line)}
        with suppress(OSError):
            for fd in (process / "fd").iterdir():
                yield from names & {_name(read_link(str(fd)))}


def _name(text: str) -> str:
    """Return what a path in shared memory begins with there; of others nothing."""
    return text.partition(f"{_DIRECTORY}/")[2].partition("/")[0]
