"""Slurm's ``topology.conf``: switches, or blocks, between hosts.

``scontrol show topology`` prints it in almost the same words.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import NetworkSwitch, Topology, find_circle
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


class SlurmTopologyProbe:
    """Reads ``topology.conf`` of the plugins topology/tree and topology/block.

    A block is a switch with its hosts.
    """

    format = "Slurm topology.conf"

    def recognises(self, saved: Saved) -> bool:
        return _NAMED.search(saved.text[:_LOOKED_AT]) is not None

    def read(self, saved: Saved) -> Topology:
        """Return the switches, in the order of the file.

        Raises:
            UsageError: A line is not what Slurm reads, a switch is defined twice or not
                at all, or is below itself.
        """
        found: dict[str, NetworkSwitch] = {}
        lines: dict[str, int] = {}
        num_entries = 0
        for line, switch in _switches(saved):
            if switch.name in found:
                rule = f"{switch.name} must be defined once, as it is in line"
                rule += f" {lines[switch.name]}"
                raise _refusal(saved, line, rule, "it again")
            num_entries += len(switch.switches) + len(switch.hosts)
            if num_entries > _MAX_ENTRIES:
                rule = (
                    f"switches must have at most {_MAX_ENTRIES} names below them in all"
                )
                raise _refusal(saved, line, rule, num_entries)
            found[switch.name], lines[switch.name] = switch, line
        if not found:
            raise UsageError(
                f"{saved.name} must define switches or blocks as Slurm's topology.conf "
                "does, got none. Is it the right file?"
            )
        for name, switch in found.items():
            for child in switch.switches:
                if child not in found:
                    rule = f"switches below {name} must be defined"
                    raise _refusal(saved, lines[name], rule, child)
        if circle := find_circle(tuple(found.values())):
            rule = "no switch must be below itself"
            raise _refusal(saved, lines[circle[0]], rule, " > ".join(circle))
        return Topology(switches=tuple(found.values()))


def _switches(saved: Saved) -> Iterator[tuple[int, NetworkSwitch]]:
    for line, text in _lines(saved.text):
        values = _values(saved, line, text)
        kind = next((name for name in _ALLOWED if name in values), "")
        if not values.keys() <= _ALLOWED.get(kind, set()):
            rule = (
                "a line must have SwitchName with Switches, Nodes and LinkSpeed, or "
                "BlockName with Nodes"
            )
            raise _refusal(saved, line, rule, text.strip())
        if _LEVEL in values and "switches" in values:
            # scontrol prints all hosts below a switch, and not its own.
            values.pop("nodes", None)
        if kind in (_SWITCH, _BLOCK):
            yield line, _switch(values[kind], values, saved, line)


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
    place = f"{saved.name}, line {line}"
    below = [
        tuple(expand_list(values.get(kind, ""), place))
        for kind in ("switches", "nodes")
    ]
    for names in below:
        if len(set(names)) != len(names):
            twice = next(iter(Counter(names) - Counter(set(names))))
            raise _refusal(saved, line, f"{name} must have each name once", twice)
    return NetworkSwitch(name, *below, speed=values.get("linkspeed", ""))


def _refusal(saved: Saved, line: int, rule: str, got: object) -> UsageError:
    return UsageError(
        f"{saved.name}, line {line}: {rule}, got {shorten(got)}. See Slurm's manual "
        "of topology.conf."
    )
