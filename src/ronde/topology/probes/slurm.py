"""Slurm's ``topology.conf``: switches, or blocks, between hosts.

``scontrol show topology`` prints it in almost the same words.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import NetworkSwitch, Topology
from ronde.topology.probes.base import Saved
from ronde.world.host_lists import expand_list

_SWITCH, _BLOCK, _SIZES = "switchname", "blockname", "blocksizes"
_LEVEL = "level"
_ALLOWED = {
    _SWITCH: {_SWITCH, "switches", "nodes", "linkspeed", _LEVEL},
    _BLOCK: {_BLOCK, "nodes", "blockindex", "blocksize"},
    _SIZES: {_SIZES},
}
_PAIR = re.compile(r'\s*([A-Za-z]\w*)\s*=\s*("[^"]*"|[^\s"]+)(?=\s|$)')
_NAMED = re.compile(rf"(?im)^[ \t]*(?:{_SWITCH}|{_BLOCK})[ \t]*=")
_MAX_ENTRIES = 1 << 18
_LOOKED_AT = 1 << 16


class _Definition(NamedTuple):
    """A switch, and the line where it is defined."""

    line: int
    switch: NetworkSwitch


class SlurmTopologyProbe:
    """Reads ``topology.conf`` of the plugins topology/tree and topology/block.

    A block is a switch with its hosts. What ``scontrol show topology`` prints is read,
    too.
    """

    format = "Slurm topology.conf"

    def recognises(self, saved: Saved) -> bool:
        """Return whether switches or blocks are named near the beginning."""
        return _NAMED.search(saved.text[:_LOOKED_AT]) is not None

    def read(self, saved: Saved) -> Topology:
        """Return the switches, in the order of the file.

        Raises:
            UsageError: A line is not what Slurm reads, a switch is defined twice or not
                at all, or is below itself.
        """
        found: dict[str, _Definition] = {}
        num_entries = 0
        for each in _definitions(saved):
            name = each.switch.name
            if name in found:
                rule = f"{name} must be defined once, as it is in line"
                raise _refusal(
                    saved, each.line, f"{rule} {found[name].line}", "it again"
                )
            num_entries += len(each.switch.switches) + len(each.switch.hosts)
            if num_entries > _MAX_ENTRIES:
                rule = (
                    f"switches must have at most {_MAX_ENTRIES} names below them in all"
                )
                raise _refusal(saved, each.line, rule, num_entries)
            found[name] = each
        if not found:
            raise UsageError(
                f"{saved.name} must define switches or blocks as Slurm's topology.conf "
                "does, got none. Is it the right file?"
            )
        _check_children(found, saved)
        return Topology(switches=tuple(each.switch for each in found.values()))


def _definitions(saved: Saved) -> Iterator[_Definition]:
    """Yield the switches and blocks of the lines."""
    for line, text in _lines(saved):
        values = _values(saved, line, text)
        kind = next((name for name in _ALLOWED if name in values), "")
        if not values.keys() <= _ALLOWED.get(kind, set()):
            rule = (
                "a line must have SwitchName with Switches, Nodes and LinkSpeed, or "
                "BlockName with Nodes"
            )
            raise _refusal(saved, line, rule, text.strip())
        if _LEVEL in values and "switches" in values:
            # scontrol tells all hosts below a switch, and not its own.
            values.pop("nodes", None)
        if kind in (_SWITCH, _BLOCK):
            yield _Definition(line, _switch(values[kind], values, saved, line))


def _lines(saved: Saved) -> Iterator[tuple[int, str]]:
    """Yield each line that is not empty, joined with those that continue it.

    The number is that of the first.
    """
    pieces: list[str] = []
    first = 0
    for number, line in enumerate(saved.text.splitlines(), 1):
        text = line.partition("#")[0].rstrip()
        first = first if pieces else number
        pieces.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            if joined := " ".join(pieces).strip():
                yield first, joined
            pieces = []
    if joined := " ".join(pieces).strip():
        yield first, joined


def _values(saved: Saved, line: int, text: str) -> dict[str, str]:
    """Return the values of a line by their names in lower case."""
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None or match[1].lower() in values:
            rule = "a line must be names with a value each, as in Nodes=n[01-04]"
            raise _refusal(saved, line, rule, text[at:].strip())
        values[match[1].lower()] = match[2].strip('"')
        at = match.end()
    return values


def _switch(
    name: str, values: Mapping[str, str], saved: Saved, line: int
) -> NetworkSwitch:
    said_by = f"{saved.name}, line {line}"
    below = [
        tuple(expand_list(values.get(kind, ""), said_by))
        for kind in ("switches", "nodes")
    ]
    for names in below:
        if len(set(names)) != len(names):
            twice = next(iter(Counter(names) - Counter(set(names))))
            raise _refusal(saved, line, f"{name} must have each name once", twice)
    return NetworkSwitch(name, *below, speed=values.get("linkspeed", ""))


def _check_children(found: Mapping[str, _Definition], saved: Saved) -> None:
    """Check that switches below switches are defined, and none is below itself."""
    for each in found.values():
        for child in each.switch.switches:
            if child not in found:
                rule = f"switches below {each.switch.name} must be defined"
                raise _refusal(saved, each.line, rule, child)
    # Those without switches below them go, then those above them, and so on: a circle
    # stays.
    waiting = {name: len(each.switch.switches) for name, each in found.items()}
    above: defaultdict[str, list[str]] = defaultdict(list)
    for name, each in found.items():
        for child in each.switch.switches:
            above[child].append(name)
    free = [name for name, count in waiting.items() if not count]
    while free:
        child = free.pop()
        del waiting[child]
        for name in above[child]:
            waiting[name] -= 1
            if not waiting[name]:
                free.append(name)
    if waiting:
        circle = _circle(found, waiting)
        rule = "no switch must be below itself"
        raise _refusal(saved, found[circle[0]].line, rule, " > ".join(circle))


def _circle(found: Mapping[str, _Definition], waiting: Container[str]) -> list[str]:
    """Return the switches of a circle, with the first again at the end."""
    name = next(name for name in found if name in waiting)
    places: dict[str, int] = {}
    while name not in places:
        places[name] = len(places)
        name = next(each for each in found[name].switch.switches if each in waiting)
    return [*list(places)[places[name] :], name]


def _refusal(saved: Saved, line: int, rule: str, got: object) -> UsageError:
    return UsageError(
        f"{saved.name}, line {line}: {rule}, got {shorten(got)}. Slurm's manual of "
        "topology.conf says what goes."
    )
