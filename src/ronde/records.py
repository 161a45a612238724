"""Measurements as lines of JSON, with a schema version.

A file of records has one JSON object on each line:
``{"schema": 1, "kind": ..., "created_at": ..., "ronde": ..., "machine": ...,
"values": ...}``. Files are only appended to.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ronde import __version__
from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain

SCHEMA = 1
"""The version of the format."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The machine of a measurement, without the host's name."""

    num_cores: int  # that this process may use
    cpu: str  # the processor's model name; empty where it is unknown
    python: str  # version
    platform: str  # operating system and architecture

    @classmethod
    def here(cls) -> "MachineRecord":
        return cls(
            num_cores=len(os.sched_getaffinity(0)),
            cpu=_cpu_model(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        )


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line for line in text.splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement, with the machine and the time."""

    kind: str  # such as ``training``
    values: dict[str, Any]  # JSON's types only; names have their units
    created_at: str = field(default_factory=_now)  # UTC, ISO 8601
    ronde: str = __version__
    machine: MachineRecord = field(default_factory=MachineRecord.here)

    def to_json(self) -> str:
        """Return the record as one line of JSON; NaN is refused."""
        content = {
            "schema": SCHEMA,
            "kind": self.kind,
            "created_at": self.created_at,
            "ronde": self.ronde,
            "machine": asdict(self.machine),
            "values": self.values,
        }
        try:
            return json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"a record's values must have JSON types, got {self.values!r}: "
                f"{error}. Convert them to int, float, str, list or dict."
            ) from error

    @classmethod
    def from_json(cls, text: str) -> "Record":
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"a record must be JSON, got {text[:60]!r}.") from error
        if not isinstance(content, dict) or "schema" not in content:
            raise UsageError(f'a record must have a "schema", got {text[:60]!r}.')
        entries = cast("dict[str, Any]", content)
        if entries["schema"] != SCHEMA:
            raise UsageError(
                f"this record has schema {entries['schema']!r}, but this ronde reads "
                f"schema {SCHEMA}. Read it with the version of ronde that wrote it."
            )
        del entries["schema"]
        try:
            return from_plain(cls, entries, "a record")
        except PlainValueError as error:
            raise UsageError(str(error)) from error


def append_record(path: Path, record: Record, *, is_private: bool = False) -> None:
    """Append one line to ``path``; lines of concurrent writers do not mix."""
    line = f"{record.to_json()}\n".encode()
    mode = 0o600 if is_private else 0o644
    # One write to a file opened for appending: the kernel keeps lines whole.
    with open(path, "ab", 0, opener=lambda p, flags: os.open(p, flags, mode)) as file:
        while line:
            line = line[file.write(line) or 0 :]


def read_records(path: Path, kind: str | None = None) -> list[Record]:
    """Read the records of a file in order, or only those of one ``kind``."""
    records: list[Record] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                records += [Record.from_json(line)] if line.strip() else []
            except UsageError as error:
                raise UsageError(f"{path}:{number}: {error}") from error
    return [record for record in records if kind in (None, record.kind)]
