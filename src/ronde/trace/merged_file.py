"""A merged trace -> value; read line by line, for it may be larger than memory."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ronde.errors import UsageError
from ronde.timeline.events import Recorded
from ronde.timeline.lateness import Key, find_arrivals
from ronde.timeline.part import FORMAT
from ronde.trace.value import RankTrace, Trace


def read_merged(facts: Mapping[str, Any], lines: Iterable[str]) -> Trace:
    """Read a trace that ``ronde.timeline.chrome`` wrote.

    Args:
        facts: Its ``otherData``.
        lines: What follows them.

    Raises:
        UsageError: It is of another version.
        ValueError: A line is no event.
    """
    if facts["ronde_timeline"] != FORMAT:
        raise UsageError(
            f"timeline must be of version {FORMAT}, got {facts['ronde_timeline']!r}. "
            "Read it with the version of ronde that wrote it."
        )
    records: dict[int, list[tuple[Key, Recorded]]] = {}
    turns: Counter[tuple[int, int, int, int, str]] = Counter()
    for line in lines:
        if '"tensor"' not in line or '"fused"' not in line:
            continue
        event = json.loads(line.rstrip().rstrip(","))
        key, record = _record(event, turns)
        records.setdefault(event["pid"], []).append((key, record))
    ranks: dict[int, RankTrace] = {}
    for each in facts["ranks"]:
        # One entry for each recording; all operations come with the first.
        own = _rank(each, records)
        before = ranks.get(own.rank)
        ranks[own.rank] = (
            own if before is None else before.joined(replace(own, operations=()))
        )
    return Trace(
        size=max((each["size"] for each in facts["ranks"]), default=0),
        ranks=[ranks[rank] for rank in sorted(ranks)],
        arrivals=find_arrivals(records.items()),
        remarks=facts["remarks"],
    )


def _rank(
    facts: Mapping[str, Any], records: Mapping[int, list[tuple[Key, Recorded]]]
) -> RankTrace:
    return RankTrace(
        rank=facts["rank"],
        host=facts["host"],
        clock_error_us=facts["clock_error_us"],
        num_dropped=facts["dropped"],
        is_whole=facts["is_whole"],
        operations=records.get(facts["rank"], ()),
    )


def _record(
    event: Mapping[str, Any], turns: Counter[tuple[int, int, int, int, str]]
) -> tuple[Key, Recorded]:
    args = event["args"]
    begun_ns = _ns(event["ts"])
    name, set_id, sequence = args["tensor"], args["set"], args["sequence"]
    same = (event["pid"], args["session"], set_id, sequence, name)
    key = Key(args["session"], set_id, sequence, name, turns[same])
    turns[same] += 1
    return key, Recorded(
        set_id=set_id,
        sequence=sequence,
        name=name,
        kind=event["name"],
        submitted_ns=_before(begun_ns, args["submitted_us"]),
        agreed_ns=_before(begun_ns, args["agreed_us"]),
        begun_ns=begun_ns,
        ended_ns=begun_ns + _ns(event["dur"]),
        dtype=args["dtype"],
        shape=tuple(args["shape"]),
        num_fused=args["fused"],
    )


def _ns(time_us: float) -> int:
    return round(time_us * 1000)


def _before(begun_ns: int, since_us: float | None) -> int:
    """Return a time; 0 for what never was, so one at the very start is moved by 1."""
    return 0 if since_us is None else (begun_ns + _ns(since_us)) or 1
