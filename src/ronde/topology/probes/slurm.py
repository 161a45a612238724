"""Read Slurm's ``topology.conf``: the switches or blocks between hosts.

The output of ``scontrol show topology`` has almost the same format.
"""

import re
from collections import Counter
from collections.abc import Iterator

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import NetworkSwitch, Topology, require_tree
from ronde.topology.probes.base import Probe, Saved
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


def _recognises(saved: Saved) -> bool:
    return bool(_NAMED.search(saved.text[:_LOOKED_AT]))


def _read(saved: Saved) -> Topology:
    found: dict[str, NetworkSwitch] = {}
    origins: dict[str, str] = {}
    num_entries = 0
    for line, text in _lines(saved.text):
        origin = f"{saved.name}, line {line}"
        switch = _read_switch(text, origin)
        if switch is None:
            continue
        name = switch.name
        if name in found:
            line_before = origins[name].rpartition(", ")[2]
            rule = f"{name} must be defined once, as it is in {line_before}"
            raise _refusal(origin, rule, "it again")
        found[name], origins[name] = switch, origin
        num_entries += len(switch.switches) + len(switch.hosts)
        if num_entries > _MAX_ENTRIES:
            rule = f"switches must have at most {_MAX_ENTRIES} names below them"
            raise _refusal(origin, f"{rule} in all", num_entries)
    if not found:
        raise UsageError(
            f"{saved.name} defines no switches and no blocks. Give the topology.conf "
            "of Slurm."
        )
    switches = tuple(found.values())
    for each in switches:
        for child in (name for name in each.switches if name not in found):
            rule = f"switches below {each.name} must be defined"
            raise _refusal(origins[each.name], rule, child)
    require_tree(switches, saved.name)
    return Topology(switches=switches)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines that are not empty, joined with their continuations."""
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


def _read_switch(text: str, origin: str) -> NetworkSwitch | None:
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None or match[1].lower() in values:
            rule = "a line must be names with a value each, as in Nodes=n[01-04]"
            raise _refusal(origin, rule, text[at:].strip())
        values[match[1].lower()] = match[2].strip('"')
        at = match.end()
    kind = next((name for name in _ALLOWED if name in values), "")
    if not kind or not values.keys() <= _ALLOWED[kind]:
        rule = "a line must have SwitchName with Switches, Nodes and LinkSpeed, or "
        raise _refusal(origin, f"{rule}BlockName with Nodes", text)
    if kind == _SIZES:
        return None
    # For upper levels scontrol prints all hosts below.
    is_above = "level" in values and "switches" in values
    hosts = "" if is_above else values.get("nodes", "")
    listed = values.get("switches", ""), hosts
    below = [tuple(expand_list(names, origin)) for names in listed]
    for names in below:
        if twice := [each for each, count in Counter(names).items() if count > 1]:
            rule = f"{values[kind]} must have each name once"
            raise _refusal(origin, rule, twice[0])
    return NetworkSwitch(values[kind], *below, speed=values.get("linkspeed", ""))


def _refusal(origin: str, rule: str, got: object) -> UsageError:
    return UsageError(
        f"{origin}: {rule}, got {shorten(got)}. See Slurm's manual of topology.conf."
    )


# Of topology/tree and topology/block; a block is a switch with its hosts.
SLURM_TOPOLOGY = Probe("Slurm topology.conf", _recognises, _read)
