"""Pending collectives of Gloo and NCCL, from torch's flight recorder in this process.

Note [Reading the flight recorder]
    The counts of enqueued and complete calls take 12 us a second. All records of Gloo
    take 30 ms, with the interpreter's lock: they are read only if a call has been
    pending for a second, and then for at most 1 % of the time. Records of NCCL are
    never read, since that queries CUDA events: it may break a graph capture, or hang
    with the driver. So calls of NCCL have a number but no name.

    Source: torch 2.13, ``FlightRecorderDetail.hpp``; ``pg_config`` is empty for Gloo,
    whose calls stay ``scheduled`` for ever.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ronde.status.reporter import Part, add_source
from ronde.status.values import UNKNOWN, PendingCollective, name_group

_DUMP_SHARE = 0.01  # of the time, at most


@functools.cache
def watch_groups(distributed: Any, recorder: Any) -> "FlightRecorderSource":  # noqa: ANN401  modules
    """Report the collectives of this process's groups of Gloo and NCCL from now on.

    Args:
        distributed: The module ``torch.distributed.distributed_c10d``.
        recorder: ``torch._C._distributed_c10d``. This layer does not import torch.
    """
    return FlightRecorderSource(distributed, recorder)


class _Group(NamedTuple):
    name: str  # as of ``name_group``
    ranks: tuple[int, ...]


class _Pending(NamedTuple):
    """The oldest pending call of a group, by the recorder's number of the group."""

    group: int
    number: int  # among the calls of the group
    since_s: float  # the time when it was first seen


class FlightRecorderSource:
    """A source of a rank's status: the oldest pending call of each group."""

    def __init__(self, distributed: Any, recorder: Any) -> None:  # noqa: ANN401  modules
        self._distributed, self._recorder = distributed, recorder
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._calls: list[PendingCollective] = []  # of Gloo; the age is the begin
        self._read_for: list[_Pending] = []
        self._next_dump_s = 0.0
        add_source(self.report)

    def report(self) -> Part:
        gloo, nccl = self._find_groups("gloo"), [*self._find_groups("nccl").values()]
        now_s, calls = time.monotonic(), list[PendingCollective]()
        if gloo:
            self._read_gloo(gloo, self._find_stuck("_dump_fr_trace_json"))
            calls += [c._replace(age_s=max(0.0, now_s - c.age_s)) for c in self._calls]
        for found in self._find_stuck("_dump_nccl_trace_json") if nccl else ():
            is_known = found.group < len(nccl)
            group = nccl[found.group] if is_known else _Group("", (UNKNOWN,))
            age_s = now_s - found.since_s
            calls.append(_call("collective", group, found.number, age_s))
        return Part(calls)

    def _find_stuck(self, dump: str) -> list[_Pending]:
        """Return the calls that were pending a second ago, too."""
        found: list[_Pending] = []
        groups = self._dump(dump, includeCollectives=False)["pg_status"]
        for group, counts in groups.items():
            number = int(counts["last_completed_collective"]) + 1
            call = self._pending.pop((dump, group), None)
            if int(counts["last_enqueued_collective"]) < number:
                continue
            if call is not None and call.number == number:
                found.append(call)
            else:
                call = _Pending(int(group), number, time.monotonic())
            self._pending[dump, group] = call
        return found

    def _read_gloo(self, groups: Mapping[str, _Group], stuck: list[_Pending]) -> None:
        """Read the names of stuck calls unless they are known."""
        if stuck == self._read_for:
            return
        self._calls, now_s = [], time.monotonic()
        if stuck and now_s < self._next_dump_s:
            return
        self._read_for, names = stuck, set[str]()
        for entry in self._dump("_dump_fr_trace_json")["entries"] if stuck else ():
            name = entry["process_group"][0]
            if entry["retired"] or name not in groups or name in names:
                continue
            names.add(name)
            kind = entry["profiling_name"].rpartition(":")[2]
            begun_s = now_s - time.time() + entry["time_created_ns"] / 1e9
            number = int(entry["collective_seq_id"])
            self._calls.append(_call(kind, groups[name], number, begun_s))
        ended_s = time.monotonic()
        self._next_dump_s = ended_s + (ended_s - now_s) / _DUMP_SHARE

    def _dump(self, name: str, **options: bool) -> dict[str, Any]:
        dump: Callable[..., bytes] | None = getattr(self._recorder, name, None)
        return json.loads(dump(**options)) if dump else {"pg_status": {}, "entries": []}

    def _find_groups(self, backend: str) -> dict[str, _Group]:
        """Return the groups of this process that have a backend, in their order."""
        world = self._distributed._world  # noqa: SLF001  torch has no other list
        found: dict[str, _Group] = {}
        for group, name in list(world.pg_names.items()):
            if backend in world.pg_backend_config.get(group, ""):
                ranks = tuple(world.pg_group_ranks[group])
                is_all = len(ranks) == self._distributed.get_world_size()
                label = name_group(name, group.group_desc)
                found[name] = _Group(label, () if is_all else ranks)
        return found


def _call(kind: str, group: _Group, number: int, age_s: float) -> PendingCollective:
    return PendingCollective(kind, group.name, kind, number, 0, age_s, group.ranks)
