"""Memory of a host: shared, free, swapped out; and what ended jobs left in it."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    Family,
    Problem,
    each_host,
)
from ronde.check.facts import Fleet, Reading, UnreadableError, Value, Values
from ronde.memory import available_memory
from ronde.topology.kernel_files import read_text
from ronde.topology.machine import list_groups
from ronde.topology.pci import read_link
from ronde.units import format_size

SHARED = "/dev/shm"  # noqa: S108 - it is looked at only
MIN_SHARED_BYTES, GOOD_SHARED_BYTES = 64 << 20, 8 << 30
USUAL_SHARED_SHARE = 0.4
"""Of the memory that may be taken; Linux gives /dev/shm a half, some of it in use."""

MAX_STALE_SHARE = 0.1
MIN_RANK_BYTES, GOOD_RANK_BYTES = 256 << 20, 1 << 30
MAX_SWAP_BYTES = 1 << 30

_SIZE, _FREE, _STALE = "host.shm_size_bytes", "host.shm_free_bytes", "host.shm_stale"
_TOTAL, _LEFT = "host.memory_bytes", "host.memory_available_bytes"
_SWAP, _KILLS = "host.swap_used_bytes", "host.oom_kills"
_WRITABLE = "host.is_shm_writable"

_OF_TRAINING = re.compile(
    r"nccl-\w+|torch_(?P<torch_pid>\d+)_.*|ronde-mpi-\d+-(?P<agent_pid>\d+)|ronde.*"
)
_MAX_NAMES = 8


def read(reading: Reading) -> None:
    """Read how much memory there is, and what nobody uses any more."""
    root = reading.root
    shared, meminfo = Path(f"{root}{SHARED}"), Path(f"{root}/proc/meminfo")
    with reading.reading(_SIZE, _FREE):
        sizes = _read_room(shared)
        reading.values |= dict(zip((_SIZE, _FREE), sizes, strict=True))
    reading.keep(_WRITABLE, lambda: os.access(shared, os.W_OK | os.X_OK))
    reading.keep(_STALE, lambda: _find_stale(shared, root))
    with reading.reading(_TOTAL, _SWAP):
        sizes = parse_meminfo(meminfo.read_text())
        reading.values |= dict(zip((_TOTAL, _SWAP), sizes, strict=True))
    reading.keep(_LEFT, lambda: _read_left(root))
    reading.keep(_KILLS, lambda: _count_oom_kills(root))


def parse_meminfo(text: str) -> tuple[int, int]:
    """Return of ``/proc/meminfo`` all memory and the swap in use, in bytes."""
    rows = [line.split() for line in text.splitlines()]
    fields = {r[0]: int(r[1]) for r in rows if len(r) > 1 and r[1].isdecimal()}
    swap_kib = fields.get("SwapTotal:", 0) - fields.get("SwapFree:", 0)
    return fields["MemTotal:"] * 1024, swap_kib * 1024


def _read_left(root: str) -> int:
    if "MemAvailable:" not in read_text(f"{root}/proc/meminfo"):
        # Which is not to say that it has none.
        raise UnreadableError("/proc/meminfo has no MemAvailable")
    return available_memory(Path(f"{root}/")).num_bytes


def _count_oom_kills(root: str) -> int:
    """Return how often the kernel killed in this group for lack of memory."""
    for group in list_groups(root, "memory"):
        # The group of the whole machine, which alone has this file, says nothing of
        # this job. Version 2 has no count there.
        if os.path.exists(f"{group}/cgroup.sane_behavior"):  # noqa: PTH110 - see read_text
            continue
        for file in ("memory.events", "memory.oom_control"):
            for line in read_text(f"{group}/{file}").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def _read_room(directory: Path) -> tuple[int, int]:
    """Return the size and what is free; without the directory there is no room."""
    try:
        room = os.statvfs(directory)
    except FileNotFoundError:
        return 0, 0
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _find_stale(directory: Path, root: str) -> Value:
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
    stale = sorted(own - set(_find_used(own, root))) if own else []
    size_bytes = sum(found[name].st_blocks * 512 for name in stale)
    return {"names": stale[:_MAX_NAMES], "count": len(stale), "bytes": size_bytes}


def _is_abandoned(name: str, root: str) -> bool:
    """Say whether a name is given in training, and by no process that still runs."""
    match = _OF_TRAINING.fullmatch(name)
    pid = match and (match["torch_pid"] or match["agent_pid"])
    # Nobody need have it open: what is in a directory may be looked up by its name.
    is_used = pid and os.path.exists(f"{root}/proc/{pid}")  # noqa: PTH110
    return match is not None and not is_used


def _find_used(names: set[str], root: str) -> Iterator[str]:
    """Yield those of the files that a process has open or in its memory."""
    for process in Path(f"{root}/proc").glob("[0-9]*"):
        # One that ends meanwhile has none; another user's cannot have this one's.
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield from names & {_name_of(line)}
        with suppress(OSError):
            for fd in (process / "fd").iterdir():
                yield from names & {_name_of(read_link(str(fd)))}


def _name_of(text: str) -> str:
    """Return what a path in shared memory begins with there; of others nothing."""
    return text.partition(f"{SHARED}/")[2].partition("/")[0]


@each_host(
    Family.HOST,
    FAIL,
    f"""shared-memory: {SHARED} has room
    reads: size and free room of /dev/shm, and whether it may be written to
    threshold: more than 64MiB; a warning below 8GiB, or below 40 % of the memory that
        may be taken where that is less
    source: Docker gives 64MiB by default; AMD's Primus asks for 8GiB
    fix: docker run --shm-size 8g, or --ipc=host; in Kubernetes an emptyDir with medium
        Memory at /dev/shm; else mount -o remount,size=8g /dev/shm
    why: Data loaders hand batches over there, and NCCL its buffers: a rank ends with a
        bus error.
    """,
    _SIZE,
    _FREE,
    _TOTAL,
    _LEFT,
)
def _shared_memory(values: Values, _: Fleet) -> Iterator[Problem]:
    size, free = values[_SIZE], values[_FREE]
    # Half of a small machine's memory, or of a small container's, is not little there.
    usual = min(values[_TOTAL], values[_LEFT]) * USUAL_SHARED_SHARE
    if size == 0:
        yield Problem("there is no /dev/shm")
    elif not values.get(_WRITABLE, True):
        fix = f"As root: mount -o remount,rw {SHARED} && chmod 1777 {SHARED}"
        yield Problem(f"nothing may be written to {SHARED}", fix=fix)
    elif free <= MIN_SHARED_BYTES or free < min(GOOD_SHARED_BYTES, usual):
        what = f"{SHARED} has {format_size(free)} free of {format_size(size)}"
        yield Problem(what, FAIL if free <= MIN_SHARED_BYTES else WARN)


@each_host(
    Family.HOST,
    WARN,
    """shared-memory-leftovers: ended jobs left nothing in /dev/shm
    reads: your files nccl-*, torch_* and ronde* in /dev/shm that no visible process has
        open, or has its number in the name
    threshold: none; a warning above a tenth of /dev/shm
    source: ronde's own
    fix: rm -r them, if no container that shares /dev/shm uses them
    why: They take memory until the host restarts.
    """,
    _STALE,
    _SIZE,
)
def _leftovers(values: Values, _: Fleet) -> Iterator[Problem]:
    stale, count = values[_STALE], values[_STALE]["count"]
    if count:
        files = f"{count} files of ended jobs take"
        files = "1 file of an ended job takes" if count == 1 else files
        names = shlex.join(f"{SHARED}/{name}" for name in stale["names"])
        yield Problem(
            f"{files} {format_size(stale['bytes'])} of /dev/shm",
            WARN if stale["bytes"] > MAX_STALE_SHARE * values[_SIZE] else INFORM,
            fix=f"If no container that shares /dev/shm uses them: rm -r {names}",
        )


@each_host(
    Family.HOST,
    FAIL,
    """memory-left: there is memory for the ranks
    reads: MemAvailable, and the limits of the control groups less what they use
    threshold: 1GiB for each rank; a failure below 256MiB
    source: ronde's own: a process that has imported torch holds 200 to 500MiB
    fix: End what takes it (ps aux --sort -rss), run fewer ranks, or raise the limit of
        the container or job
    why: The kernel kills the rank that asks for one page too many.
    """,
    _LEFT,
)
def _memory_left(values: Values, fleet: Fleet) -> Iterator[Problem]:
    left, wanted = values[_LEFT], fleet.num_ranks
    if left < GOOD_RANK_BYTES * wanted:
        ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
        severity = FAIL if left < MIN_RANK_BYTES * wanted else WARN
        yield Problem(f"{format_size(left)} of memory is free, for {ranks}", severity)


@each_host(
    Family.HOST,
    WARN,
    """oom-kills: nothing was killed here for lack of memory
    reads: oom_kill in memory.events (memory.oom_control) of the control group
    threshold: none since the group began
    source: the kernel's documentation of control groups
    fix: Raise the limit of the container or job, or use less: a smaller batch, fewer
        workers
    why: What was killed once for lack of memory is killed again.
    """,
    _KILLS,
)
def _oom_kills(values: Values, _: Fleet) -> Iterator[Problem]:
    if count := values[_KILLS]:
        processes = "a process" if count == 1 else f"{count} processes"
        yield Problem(
            f"the kernel killed {processes} of this control group for lack of memory"
        )


@each_host(
    Family.HOST,
    WARN,
    """swap-used: little is swapped out
    reads: SwapTotal and SwapFree of /proc/meminfo
    threshold: 1GiB
    source: ronde's own
    fix: End what takes the memory, then as root: swapoff -a && swapon -a
    why: A rank that waits for a disk makes all others wait.
    """,
    _SWAP,
)
def _swap_used(values: Values, _: Fleet) -> Iterator[Problem]:
    if values[_SWAP] > MAX_SWAP_BYTES:
        yield Problem(f"{format_size(values[_SWAP])} of memory is swapped out")
