"""Slurm's ``topology.conf`` and ``topology.yaml``: switches, or blocks, between hosts.

``scontrol show topology`` prints the first in almost the same words. The second has
names, values and lists, and no more of YAML: it is read without a library.
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
_TOPOLOGY = re.compile(r"(?m)^[ \t]*- +topology:")
_YAML_LINE = re.compile(r"\s*(?:- +)?(?:(\w+) *:(?: +|$))?([^{}&*|>:]*)")
_RECORDS = {"switch": _SWITCH, "block": _BLOCK}
_BELOW = {"children": "switches", "nodes": "nodes"}
_SECTIONS = ("tree", "switches", "block", "blocks", "block_sizes")
_OTHERS = (*_SECTIONS, "flat", "cluster_default")
_MAX_ENTRIES = 1 << 18
_LOOKED_AT = 1 << 16


def _recognises(saved: Saved) -> bool:
    head = saved.text[:_LOOKED_AT]
    return bool(_NAMED.search(head) or _TOPOLOGY.search(head))


def _read(saved: Saved) -> Topology:
    found: dict[str, NetworkSwitch] = {}
    places: dict[str, str] = {}
    num_entries = 0
    is_yaml = _TOPOLOGY.search(saved.text) is not None
    for line, text in _yaml_lines(saved) if is_yaml else _lines(saved.text):
        place = f"{saved.name}, line {line}"
        switch = _read_switch(text, place)
        if switch is None:
            continue
        name = switch.name
        if name in found:
            line_before = places[name].rpartition(", ")[2]
            rule = f"{name} must be defined once, as it is in {line_before}"
            raise _refusal(place, rule, "it again")
        found[name], places[name] = switch, place
        num_entries += len(switch.switches) + len(switch.hosts)
        if num_entries > _MAX_ENTRIES:
            rule = f"switches must have at most {_MAX_ENTRIES} names below them"
            raise _refusal(place, f"{rule} in all", num_entries)
    if not found:
        raise UsageError(
            f"{saved.name} must define switches or blocks as Slurm's topology.conf "
            "does, got none. Is it the right file?"
        )
    switches = tuple(found.values())
    for each in switches:
        for child in (name for name in each.switches if name not in found):
            rule = f"switches below {each.name} must be defined"
            raise _refusal(places[each.name], rule, child)
    require_tree(switches, saved.name)
    return Topology(switches=switches)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines that are not empty, joined with those that continue them."""
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


def _yaml_lines(saved: Saved) -> Iterator[tuple[int, str]]:
    """Yield the records of the default topology, else of the first, as conf's lines."""
    found: dict[str, dict[int, str]] = {}
    own: dict[int, str] = {}
    default, record, is_set = "", 0, False
    for number, line in enumerate(saved.text.splitlines(), 1):
        match = _YAML_LINE.fullmatch(line.partition("#")[0].removeprefix("---"))
        name, value = (match[1] or "", match[2] or "") if match else ("?", "")
        value = value.strip("'\" \r").replace(", ", ",")
        if name == "topology":
            own = found[value] = {}
            default = default or value
        elif name == "cluster_default" and value.lower() == "true" and not is_set:
            default, is_set = next(n for n in found if found[n] is own), True
        elif name in _RECORDS and value:
            own[number], record = f"{_RECORDS[name]}={value}", number
        elif name in _BELOW and value and record in own:
            own[record] += f" {_BELOW[name]}={value}"
        elif name not in _OTHERS and (name or not value.isdecimal()) and name + value:
            rule = "a line must be of a tree or block topology, as in nodes: n[01-04]"
            raise _refusal(f"{saved.name}, line {number}", rule, line.strip())
    yield from found[default].items()


def _read_switch(text: str, place: str) -> NetworkSwitch | None:
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None or match[1].lower() in values:
            rule = "a line must be names with a value each, as in Nodes=n[01-04]"
            raise _refusal(place, rule, text[at:].strip())
        values[match[1].lower()] = match[2].strip('"')
        at = match.end()
    kind = next((name for name in _ALLOWED if name in values), "")
    if not kind or not values.keys() <= _ALLOWED[kind]:
        rule = "a line must have SwitchName with Switches, Nodes and LinkSpeed, or "
        raise _refusal(place, f"{rule}BlockName with Nodes", text)
    if kind == _SIZES:
        return None
    # Of a level above others scontrol prints all hosts below, and not its own.
    is_above = "level" in values and "switches" in values
    hosts = "" if is_above else values.get("nodes", "")
    listed = values.get("switches", ""), hosts
    below = [tuple(expand_list(names, place)) for names in listed]
    for names in below:
        if twice := [each for each, count in Counter(names).items() if count > 1]:
            rule = f"{values[kind]} must have each name once"
            raise _refusal(place, rule, twice[0])
    return NetworkSwitch(values[kind], *below, speed=values.get("linkspeed", ""))


def _refusal(place: str, rule: str, got: object) -> UsageError:
    return UsageError(
        f"{place}: {rule}, got {shorten(got)}. See Slurm's manual of topology.conf."
    )


# Of topology/tree and topology/block; a block is a switch with its hosts.
SLURM_TOPOLOGY = Probe("Slurm topology.conf", _recognises, _read)
