"""How much memory this process may take: the machine's, or its control group's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """The tighter of what the machine has and what the control groups allow.

    Attributes:
        num_bytes: How much may still be taken; never negative.
        source: Whose word it is, with the figure's name.
        remedy: What a person can do to have more.
    """

    num_bytes: int
    source: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Where one version of control groups keeps its figures."""

    mount: str
    limit: str
    usage: str
    reclaimable: str


_VERSIONS: Mapping[str, _GroupFiles] = {
    "": _GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": _GroupFiles(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}
"""By the controllers' names in ``/proc/self/cgroup``; version 2 has an empty one."""


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """Return how much memory this process and its children may still take.

    Args:
        root: Directory that holds ``proc`` and ``sys``, for other machines' snapshots.
    """
    found = [_of_machine(root), *_of_groups(root)]
    return min(found, key=lambda each: each.num_bytes)


def _of_machine(root: Path) -> AvailableMemory:
    fields = _fields(root / "proc/meminfo")
    return AvailableMemory(
        fields.get("MemAvailable:", 0) * 1024,
        "MemAvailable of this machine",
        "Use fewer ranks, a smaller model, or a machine with more memory.",
    )


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    """Return what each limited group allows that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            files = _VERSIONS.get(name)
            if files is not None:
                yield from _of_path(root / files.mount, path, files)


def _of_path(mount: Path, path: str, files: _GroupFiles) -> Iterator[AvailableMemory]:
    # A group is bound by those above it too. In a container the path may be the host's,
    # of which only the last group is mounted, at the root.
    own = PurePosixPath(path.lstrip("/"))
    for each in (own, *own.parents):
        folder = mount / each
        try:
            limit = int((folder / files.limit).read_text())
            usage = int((folder / files.usage).read_text())
        except (OSError, ValueError):  # not mounted, or "max"
            continue
        if limit >= _UNLIMITED:
            continue
        reclaimable = _fields(folder / "memory.stat").get(files.reclaimable, 0)
        yield AvailableMemory(
            max(0, limit - usage + reclaimable),
            f"{files.limit} {limit} of the control group",
            "Use fewer ranks or a smaller model, or raise the memory limit of the "
            "container or job (docker run --memory, sbatch --mem, resources.limits).",
        )


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}
