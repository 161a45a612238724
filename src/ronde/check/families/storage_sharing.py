"""Which hosts share a folder, by which files of the others each of them sees."""

from collections.abc import Iterator, Mapping, Sequence

from ronde.check.check import Finding, Severity
from ronde.check.fleet import MIN_MAJORITY, Fleet

LATE_S = 1.0
"""A file that another host has written is to be seen by then."""

_MAX_NAMED = 4

Sight = Mapping[str, Mapping[str, bool]]
"""Of each host: whether it sees the file of each other host that left one."""


def judge_shared(fleet: Fleet) -> Iterator[Finding]:
    """Find the hosts whose folder is not the one that most hosts share."""
    for path, sight in _by_path(fleet).items():
        if not any(sight.values()):
            for host in sight if len(sight) > 1 else ():
                what = f"cannot tell whether {path} is shared: no host can write there"
                yield Finding("shared-folder", Severity.INFORM, host, what)
            continue
        for host, usual in _outside(group(sight)):
            seen = [other for other, is_seen in sight[host].items() if is_seen]
            sees = f"files of {_name(seen)} only" if seen else "no other host's files"
            what = f"{path} shows {sees}"
            yield Finding("shared-folder", Severity.FAIL, host, what, usual)


def judge_late(fleet: Fleet) -> Iterator[Finding]:
    """Find the hosts that see late, or not yet, what those write who share a folder."""
    seconds = {
        each.host: each.values["storage.shared_s"]
        for each in fleet.having("storage.shared", "storage.shared_s")
    }
    for path, sight in _by_path(fleet).items():
        for own in group(sight):
            for host in own:
                missing = [other for other in own if not sight[host].get(other, True)]
                late_s = seconds.get(host, {}).get(path, 0.0)
                if missing:
                    what = f"{path} does not show yet what {_name(missing)} wrote"
                elif late_s > LATE_S:
                    what = f"{path} shows what others wrote after {late_s:.1f} s"
                else:
                    continue
                yield Finding("shared-folder-late", Severity.WARN, host, what)


def group(sight: Sight) -> list[list[str]]:
    """Return groups of hosts that share a folder, the largest first.

    Two hosts share it if each sees what the other left there, as far as it left
    something; and so do two that share it with a third.
    """
    left = list(sight)
    groups: list[list[str]] = []
    while left:
        members = [left.pop(0)]
        for member in members:
            near = [other for other in left if _share(sight, member, other)]
            members += near
            left = [other for other in left if other not in near]
        groups.append([host for host in sight if host in members])
    return sorted(groups, key=len, reverse=True)


def _share(sight: Sight, one: str, other: str) -> bool:
    seen = [sight[one].get(other), sight[other].get(one)]
    return False not in seen and True in seen


def _outside(groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield each host to blame, and what most others have; of a draw, all."""
    if len(groups) < 2:
        return
    first, second = groups[:2]
    is_draw = len(first) == len(second) or sum(map(len, groups)) < MIN_MAJORITY
    for each in groups:
        others = [other for other in groups if other is not each]
        if is_draw:
            shares = [_name(other) for other in others if len(other) > 1]
            usual = (
                f"shared by {' and by '.join(shares)}" if shares else "shared by none"
            )
        else:
            usual = f"shared by {_name(first)}"
        if is_draw or each is not first:
            for host in each:
                yield host, usual


def _by_path(fleet: Fleet) -> dict[str, dict[str, Mapping[str, bool]]]:
    """Return the sight of all hosts, by path."""
    by_path: dict[str, dict[str, Mapping[str, bool]]] = {}
    for facts in fleet.having("storage.shared"):
        for path, seen in facts.values["storage.shared"].items():
            by_path.setdefault(path, {})[facts.host] = seen
    return by_path


def _name(hosts: Sequence[str]) -> str:
    named = ", ".join(hosts[:_MAX_NAMED])
    num_more = len(hosts) - _MAX_NAMED
    return f"{named} and {num_more} more" if num_more > 0 else named
