"""The verdict on a job that has ended, from dumps of torch's flight recorder.

Source: torch 2.13, ``torch/distributed/flight_recorder`` and ``FlightRecorder.hpp``.
Calls are matched by group and sequence number, not by the number of the record, which
counts the records of one rank only. A call of Gloo stays ``scheduled`` for ever;
``retired`` says that it is complete.
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ronde.errors import UsageError
from ronde.monitor.inspection import make_frame
from ronde.monitor.verdict import Fault, Verdict, Wait, find_conflicts
from ronde.status.values import PendingCollective, name_group

_RANK = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")
# The sizes of these may differ between ranks.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "coalesced")


class RecordedCall(NamedTuple):
    """One collective of one rank."""

    sequence: int
    operation: str  # with its size and type
    is_complete: bool
    line: str  # `` at FILE:LINE``, or no text


_Group = tuple[str, str, tuple[int, ...]]
"""Name, description and ranks of a group; the ranks are empty if unknown."""


class Dump(NamedTuple):
    """The calls of one rank, by group."""

    rank: int
    calls: dict[_Group, list[RecordedCall]]
    completed: dict[_Group, int]  # number of the last complete call


class _DataUnpickler(pickle.Unpickler):
    """Unpickler of containers, numbers and strings only, so that no file runs code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


def read_dumps(paths: Iterable[str]) -> list[Dump]:
    """Read the dumps of a job, one file for each rank.

    Raises:
        UsageError: A file cannot be read or is no dump, or a rank has two files.
    """
    dumps: dict[int, Dump] = {}
    for path in map(Path, paths):
        found = _RANK.search(path.name)
        if found is None:
            raise UsageError(
                f"the name of a dump must end with its rank, got {path.name!r}."
            )
        rank = int(found[1])
        if rank in dumps:
            raise UsageError(f"each rank must have one dump, got a second of {rank}.")
        try:
            dumps[rank] = _parse(rank, _load(path))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}.") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{path} is no dump of torch's flight recorder: "
                f"{type(error).__name__} {error}."
            ) from None
    return [dumps[rank] for rank in sorted(dumps)]


def _load(path: Path) -> Mapping[str, Any]:
    data = path.read_bytes()
    if data[:1] == b"{":
        return json.loads(data)
    try:
        return _DataUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, IndexError) as error:
        raise ValueError(error) from None


def _parse(rank: int, plain: Mapping[str, Any]) -> Dump:
    configs: Mapping[str, Any] = plain.get("pg_config") or {}
    members = {
        name: tuple(sorted(json.loads(config["ranks"])))
        for name, config in configs.items()
        if config.get("ranks")
    }
    ends: Mapping[str, Any] = plain.get("pg_status") or {}
    calls: dict[_Group, list[RecordedCall]] = defaultdict(list)
    completed: dict[_Group, int] = {}
    for entry in plain["entries"]:
        if entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        group = name, description, members.get(name, ())
        end = ends.get(str(entry.get("pg_id")), {}).get("last_completed_collective", -1)
        completed[group] = int(end)
        number = int(entry["collective_seq_id"])
        is_retired = bool(entry.get("retired"))
        is_complete = entry["state"] == "completed" or is_retired or number <= int(end)
        call = RecordedCall(
            number,
            _name_operation(entry),
            is_complete,
            _find_line(entry.get("frames") or ()),
        )
        calls[group].append(call)
    return Dump(rank, dict(calls), completed)


def _name_operation(entry: Mapping[str, Any]) -> str:
    kind = entry["profiling_name"].rpartition(":")[2]
    shapes = ["x".join(map(str, shape)) or "1" for shape in entry["input_sizes"]]
    if not shapes or any(word in kind.lower() for word in _UNEVEN):
        return kind
    types = dict.fromkeys(entry.get("input_dtypes") or ())
    return f"{kind} of {', '.join(shapes)} {', '.join(types)}".rstrip()


def _find_line(frames: Sequence[Mapping[str, Any]]) -> str:
    made = [make_frame(f["name"], f["filename"], int(f["line"])) for f in frames]
    own = next((frame for frame in made if frame.is_user), None)
    return f" at {own.file}:{own.line}" if own else ""


def explain_dumps(dumps: Sequence[Dump]) -> Verdict:
    """Find the faults of a job from the dumps of its ranks."""
    by_rank = {dump.rank: dump for dump in dumps}
    waits: list[Wait] = []
    lines: dict[int, str] = {}
    for group in dict.fromkeys(group for dump in dumps for group in dump.calls):
        ranks = group[2] or tuple(d.rank for d in dumps if group in d.calls)
        waits += _find_frontier(by_rank, group, ranks, lines)
    waiting = {rank for wait in waits for rank in wait.ranks}
    faults = [
        _describe(by_rank, rank, wait)
        for wait in waits
        for rank in wait.missing
        if rank not in waiting
    ]
    unique = list({fault.ranks: fault for fault in reversed(faults)}.values())[::-1]
    conflicts = find_conflicts(waits, lambda rank: lines.get(rank, ""))
    return Verdict((*unique, *conflicts), tuple(waits))


def _find_frontier(
    by_rank: Mapping[int, Dump],
    group: _Group,
    ranks: Sequence[int],
    lines: dict[int, str],
) -> list[Wait]:
    """Return the waits in the first call that not all ranks have made alike.

    There is one wait for each operation. A call that all ranks have made is skipped if
    one of them has completed it: the others are late, or have not noticed yet.
    """
    calls = {
        rank: {call.sequence: call for call in by_rank[rank].calls.get(group, ())}
        for rank in ranks
        if rank in by_rank
    }
    for number in sorted({number for own in calls.values() for number in own}):
        found = {rank: own[number] for rank, own in calls.items() if number in own}
        missing = [
            rank
            for rank in ranks
            if rank not in found and not _is_past(by_rank.get(rank), group, number)
        ]
        by_operation: dict[str, list[int]] = defaultdict(list)
        for rank, call in found.items():
            by_operation[call.operation].append(rank)
        is_complete = any(call.is_complete for call in found.values())
        if is_complete:
            # A rank without a dump was in it; the root of a broadcast is done early.
            missing = [rank for rank in missing if rank in by_rank]
        if not missing and (is_complete or len(by_operation) == 1):
            continue
        lines |= {rank: call.line for rank, call in found.items()}
        label = name_group(group[0], group[1])
        members = sorted([*found, *missing])
        return [
            Wait(
                PendingCollective(name, label, name, number, 0, 0.0, tuple(ranks)),
                tuple(own),
                tuple(rank for rank in members if rank not in own),
                (),
                0.0,
            )
            for name, own in by_operation.items()
        ]
    return []


def _is_past(dump: Dump | None, group: _Group, number: int) -> bool:
    """Return True if a rank has completed a call, or its buffer begins after it."""
    if dump is None or group not in dump.calls:
        return False
    first = min(call.sequence for call in dump.calls[group])
    return number <= dump.completed[group] or number < first


def _describe(by_rank: Mapping[int, Dump], rank: int, wait: Wait) -> Fault:
    name = f"call {wait.collective.sequence} of {wait.collective.group}"
    call = f"{name} ({wait.collective.name})"
    if rank not in by_rank:
        text = f"Rank {rank} has left no dump; {call} waits for it."
        return Fault("dead", (rank,), text)
    return Fault("missing", (rank,), f"Rank {rank} has not called {call}.")
