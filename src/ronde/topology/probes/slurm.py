"""Slurm's ``topology.conf``: switches, or blocks, between hosts.

``scontrol show topology`` prints it in almost the same words.
"""

import re
from collections import Counter
from collections.abc import Iterator

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import NetworkSwitch, Topology, find_circle
from ronde.topology.probes.base import Saved
from ronde.world.host_lists import expand_list

_SWITCH, _BLOCK, _SIZES = "switchname", "blockname", "blocksizes"
_ALLOWED = {
    _SWITCH: {_SWITCH, "switches", "nodes", "linkspeed", "level"},
    _BLOCK: {_BLOCK, "nodes", "blockindex", "blocksize"},
    _SIZES: {_SIZES},
}
_PAIR = re.compile(r'\s*([A-Za-z]\w*)\s*=\s*("[^"]*"|[^\s"]+)(?=\s|$)')
_NAMED = re.compile(rf"(?im)^[ \t]*(?:{_SWITCH}|{_BLOCK})[ \t]*=")
_MAX_ENTRIES = 1 << 18
_LOOKED_AT = 1 << 16


class SlurmTopologyProbe:
    """Reads ``topology.conf`` of the plugins topology/tree and topology/block.

    A block is a switch with its hosts.
    """

    format = "Slurm topology.conf"

    def recognises(self, saved: Saved) -> bool:
        return _NAMED.search(saved.text[:_LOOKED_AT]) is not None

    def read(self, saved: Saved) -> Topology:
        """Return the switches, in the order of the file."""
        found: dict[str, NetworkSwitch] = {}
        lines: dict[str, int] = {}
        num_entries = 0
        for line, text in _lines(saved.text):
            place = f"{saved.name}, line {line}"
            values = _values(text, place)
            kind = next((name for name in _ALLOWED if name in values), "")
            if not kind or not values.keys() <= _ALLOWED[kind]:
                rule = (
                    "a line must have SwitchName with Switches, Nodes and LinkSpeed, "
                    "or BlockName with Nodes"
                )
                raise _refusal(place, rule, text)
            if kind == _SIZES:
                continue
            name = values[kind]
            if name in found:
                rule = f"{name} must be defined once, as it is in line {lines[name]}"
                raise _refusal(place, rule, "it again")
            found[name], lines[name] = _switch(name, values, place), line
            num_entries += len(found[name].switches) + len(found[name].hosts)
            if num_entries > _MAX_ENTRIES:
                rule = f"switches must have at most {_MAX_ENTRIES} names below them"
                raise _refusal(place, f"{rule} in all", num_entries)
        if not found:
            raise UsageError(
                f"{saved.name} must define switches or blocks as Slurm's topology.conf "
                "does, got none. Is it the right file?"
            )
        _require_tree(found, lines, saved.name)
        return Topology(switches=tuple(found.values()))


def _require_tree(
    found: dict[str, NetworkSwitch], lines: dict[str, int], origin: str
) -> None:
    for name, switch in found.items():
        for child in switch.switches:
            if child not in found:
                place = f"{origin}, line {lines[name]}"
                rule = f"switches below {name} must be defined"
                raise _refusal(place, rule, child)
    if circle := find_circle(tuple(found.values())):
        place = f"{origin}, line {lines[circle[0]]}"
        raise _refusal(place, "no switch must be below itself", " > ".join(circle))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is not empty, joined with those that continue it.

    The number is that of the first.
    """
    pieces: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        code = line.partition("#")[0].rstrip()
        first = first if pieces else number
        pieces.append(code.removesuffix("\\"))
        if not code.endswith("\\"):
            if joined := " ".join(pieces).strip():
                yield first, joined
            pieces = []


def _values(text: str, place: str) -> dict[str, str]:
    """Return the values of a line by their names in lower case."""
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None or match[1].lower() in values:
            rule = "a line must be names with a value each, as in Nodes=n[01-04]"
            raise _refusal(place, rule, text[at:].strip())
        values[match[1].lower()] = match[2].strip('"')
        at = match.end()
    return values


def _switch(name: str, values: dict[str, str], place: str) -> NetworkSwitch:
    # Of a level above others scontrol prints all hosts below, and not its own.
    is_above = "level" in values and "switches" in values
    hosts = "" if is_above else values.get("nodes", "")
    switches = values.get("switches", "")
    below = [tuple(expand_list(names, place)) for names in (switches, hosts)]
    for names in below:
        if twice := [each for each, count in Counter(names).items() if count > 1]:
            raise _refusal(place, f"{name} must have each name once", twice[0])
    return NetworkSwitch(name, *below, speed=values.get("linkspeed", ""))


def _refusal(place: str, rule: str, got: object) -> UsageError:
    return UsageError(
        f"{place}: {rule}, got {shorten(got)}. See Slurm's manual of topology.conf."
    )
