"""What was known of hosts, kept in a file of records; and what has changed since."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ronde.check.check import Finding
from ronde.check.fleet import HostFacts, Value
from ronde.check.majority import spell
from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, to_plain
from ronde.records import Record, append_record, read_records

KIND = "check"  # of the records; one is one run of ``ronde check`` with all its hosts
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
"""By fact, the part that is another the next moment; empty for all of it."""

# Whole numbers from here on, such as free memory, have changed by more than a tenth.
_SMALL = 1 << 20
_SHARE = 0.1


class Kept(NamedTuple):
    """One run: facts of the hosts that could be asked, findings, ids of its checks."""

    hosts: tuple[HostFacts, ...]
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]


class Earlier(NamedTuple):
    """A run that was kept."""

    created_at: str  # UTC, ISO 8601
    kept: Kept


class Change(NamedTuple):
    """A fact of a host that is not what it was; the values are for people."""

    host: str
    fact: str  # the fact's name, and in it the place: ``network.interfaces[eth0].mtu``
    before: str
    after: str


class Changes(NamedTuple):
    """What has changed from one run to another."""

    facts: tuple[Change, ...]  # of hosts that could be asked both times
    # Findings that were not there, of checks that were made both times.
    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    new_hosts: tuple[str, ...]
    gone_hosts: tuple[str, ...]  # hosts that were asked one time alone


def save(path: Path, kept: Kept) -> None:
    plain: Any = to_plain(kept)
    append_record(path, Record(KIND, plain), is_private=True)


def load_last(path: Path) -> Earlier:
    """Return the last run in a file of records, or raise ``UsageError``."""
    try:
        records = read_records(path, KIND)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--since must be a file that can be read, got {path}: {error}. "
            "Check the path."
        ) from None
    if not records:
        raise UsageError(
            f"--since must be a file that ronde check --save wrote, got {path}, which "
            "has no run. Type: ronde check --save FILE"
        )
    try:
        kept = from_plain(Kept, records[-1].values, f"{path}: run")
    except PlainValueError as error:
        raise UsageError(f"{error} Was it written by ronde check --save?") from None
    return Earlier(records[-1].created_at, kept)


def compare(before: Kept, after: Kept) -> Changes:
    """Return what has changed, without what changes all the time."""
    old = {facts.host: facts.values for facts in before.hosts}
    new = {facts.host: facts.values for facts in after.hosts}
    asked = {finding.host for finding in before.findings} | old.keys()
    known = {finding.host for finding in after.findings} | new.keys()
    both = [host for host in new if host in old]
    return Changes(
        tuple(each for host in both for each in _changes(host, old[host], new[host])),
        _beyond(after.findings, before, asked),
        _beyond(before.findings, after, known),
        tuple(host for host in new if host not in asked),
        tuple(host for host in old if host not in known),
    )


def _beyond(
    findings: Sequence[Finding], other: Kept, hosts: set[str]
) -> tuple[Finding, ...]:
    """Return findings that another run, which tried these hosts, does not have."""
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
        is_of_its_moment = part is not None and name.endswith(part)
        # What could not be read is no change of what it is.
        if is_of_its_moment or top not in before or top not in after:
            continue
        if name not in old or name not in new or _differs(old[name], new[name]):
            was, is_now = (
                spell(d[name]) if name in d else "(none)" for d in (old, new)
            )
            yield Change(host, name, was, is_now)


def _differs(before: Value, after: Value) -> bool:
    # What a number with a fraction means is in the findings.
    if isinstance(before, float) or isinstance(after, float):
        return False
    if isinstance(before, int) and isinstance(after, int):
        most = max(abs(before), abs(after))
        return abs(before - after) > (most * _SHARE if most >= _SMALL else 0)
    return before != after


def _leaves(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    """Yield what is no object, by its place; lists of objects by their items."""
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
