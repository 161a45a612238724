"""Saved runs of ``ronde check``, and the changes since a saved run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ronde.check.check import Finding
from ronde.check.fleet import HostFacts, Value
from ronde.check.majority import spell
from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, to_plain
from ronde.records import Record, append_record, read_records

KIND = "check"  # of the records
_MEASURED = {
    "host.pids_left": "",
    "gpu.busy_percent": "",
    "gpu.clock_events": "",
    "gpu.margin_celsius": "",
    "gpu.memory_bytes": "[used]",
    "gpu.pcie": "[generation]",
    "gpu.processes": "",
    "storage.paths": "[free_inodes]",
    "cluster.products": "[num_products]",
}
"""Facts that always change, with the key of the changing part; "" is the whole fact."""

# Changes of integers this large, such as free memory, count only from a tenth on.
_SMALL = 1 << 20
_SHARE = 0.1


class SavedRun(NamedTuple):
    """One run of ``ronde check``, as saved in a file."""

    hosts: tuple[HostFacts, ...]
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]  # ids


class Change(NamedTuple):
    """A fact that changed since the saved run, with both values as text."""

    host: str
    fact: str  # with the keys: ``network.interfaces[eth0][mtu]``
    before: str
    after: str


class Changes(NamedTuple):
    """Differences between two runs."""

    facts: tuple[Change, ...]  # of hosts that answered both times
    # Findings of checks that were made both times.
    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    new_hosts: tuple[str, ...]
    gone_hosts: tuple[str, ...]


def save(path: Path, kept: SavedRun) -> None:
    plain: Any = to_plain(kept)
    append_record(path, Record(KIND, plain), is_private=True)


def load_last(path: Path) -> tuple[str, SavedRun]:
    """Return the time (UTC in ISO 8601) and the data of the last run in a file."""
    try:
        records = read_records(path, KIND)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the --since file: {error}. Check the path."
        ) from None
    if not records:
        raise UsageError(
            f"{path} contains no saved run. Give --since a file written by ronde check "
            "--save."
        )
    try:
        kept = from_plain(SavedRun, records[-1].values, f"{path}: run")
    except PlainValueError as error:
        raise UsageError(
            f"cannot parse the saved run: {error} Was it written by ronde check --save?"
        ) from None
    return records[-1].created_at, kept


def compare(before: SavedRun, after: SavedRun) -> Changes:
    old = {facts.host: facts.values for facts in before.hosts}
    new = {facts.host: facts.values for facts in after.hosts}
    asked = {finding.host for finding in before.findings} | old.keys()
    known = {finding.host for finding in after.findings} | new.keys()
    both = [host for host in new if host in old]
    return Changes(
        tuple(each for host in both for each in _changes(host, old[host], new[host])),
        _not_in(before, after.findings, asked),
        _not_in(after, before.findings, known),
        tuple(host for host in new if host not in asked),
        tuple(host for host in old if host not in known),
    )


def _not_in(
    other: SavedRun, findings: Sequence[Finding], hosts: set[str]
) -> tuple[Finding, ...]:
    """Return findings on ``hosts`` that ``other`` lacks although it made the check."""
    known = {finding[:3] for finding in other.findings}
    return tuple(
        each
        for each in findings
        if hosts.issuperset(each.hosts)
        and each.check in other.checks
        and each[:3] not in known
    )


def _changes(
    host: str, before: Mapping[str, Value], after: Mapping[str, Value]
) -> Iterator[Change]:
    old, new = dict(_leaves("", before)), dict(_leaves("", after))
    for name in dict.fromkeys((*old, *new)):
        top = name.partition("[")[0]
        part = _MEASURED.get(top)
        is_fleeting = part is not None and name.endswith(part)
        # A fact that could not be read one time has not changed.
        if is_fleeting or top not in before or top not in after:
            continue
        if name not in old or name not in new or _differs(old[name], new[name]):
            was, is_now = (
                spell(d[name]) if name in d else "(none)" for d in (old, new)
            )
            yield Change(host, name, was, is_now)


def _differs(before: Value, after: Value) -> bool:
    # Findings show measurements that matter.
    if isinstance(before, float) or isinstance(after, float):
        return False
    if isinstance(before, int) and isinstance(after, int):
        most = max(abs(before), abs(after))
        return abs(before - after) > (most * _SHARE if most >= _SMALL else 0)
    return before != after


def _leaves(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the path and the value of each leaf; a list without objects is a leaf."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Value]", value)
        for key, each in entries.items():
            yield from _leaves(f"{name}[{key}]" if name else key, each)
        return
    items = cast("list[Value]", value) if isinstance(value, list) else []
    if any(isinstance(each, dict) for each in items):
        for number, each in enumerate(items):
            yield from _leaves(f"{name}[{number}]", each)
    else:
        yield name, value
