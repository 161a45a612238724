"""A topology as JSON, and back."""

import json
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import cast

from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.topology.graph import HostTopology, NetworkSwitch, Topology

FORM = "ronde-topology"
VERSION = 1
"""Changes when a field changes its meaning or goes."""
_MAX_DEPTH = 256


def write_topology(topology: Topology) -> str:
    """Return the JSON of a topology, with its form and version."""
    plain = cast("dict[str, object]", to_plain(topology))
    return json.dumps({"form": FORM, "version": VERSION, **plain}, indent=1) + "\n"


def read_topology(data: bytes, origin: str) -> Topology:
    """Return the topology that JSON says.

    Args:
        data: A whole file.
        origin: What to call it in a message.

    Raises:
        UsageError: It is not what ``write_topology`` gives.
    """
    try:
        said: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{origin} must be JSON, got an error: {error}. Was it cut?"
        ) from None
    values = cast("dict[str, object]", said) if isinstance(said, dict) else {}
    found = values.pop("form", None), values.pop("version", None)
    if found != (FORM, VERSION):
        raise UsageError(
            f"{origin} must have form {FORM!r} and version {VERSION}, got "
            f"{shorten(found[0])} and {shorten(found[1])}. Write it with this version "
            "of ronde: ronde topo --json"
        )
    try:
        topology = from_plain(Topology, values, "topology")
        for host in topology.hosts:
            _require_order(host)
    except PlainValueError as error:
        raise UsageError(
            f"{origin}: {error} Write it with: ronde topo --json"
        ) from None
    require_tree(topology.switches, origin)
    return topology


def require_tree(switches: Sequence[NetworkSwitch], origin: str) -> None:
    """Refuse switches that are not below one another in an order that ends.

    Args:
        switches: All of them.
        origin: What to call their source in a message.

    Raises:
        UsageError: Two have one name, one is above itself, or too many are.
    """
    below = {switch.name: switch.switches for switch in switches}
    if len(below) != len(switches):
        raise UsageError(f"{origin} must name each switch once. Remove the others.")
    depths: dict[str, int] = {}
    try:
        for name in TopologicalSorter(below).static_order():
            depths[name] = 1 + max((depths[n] for n in below.get(name, ())), default=0)
    except CycleError as error:
        circle = shorten(" > ".join(str(name) for name in error.args[1]))
        raise UsageError(
            f"{origin} must have no switch above itself, got {circle}. Correct what is "
            "below them."
        ) from None
    if max(depths.values(), default=0) > _MAX_DEPTH:
        raise UsageError(
            f"{origin} must have at most {_MAX_DEPTH} switches above one another, got "
            f"{max(depths.values())}. Is it a network?"
        )


def _require_order(host: HostTopology) -> None:
    """Refuse devices that come twice, before what they are below, or far down."""
    listed = {device.bus_id for device in host.devices}
    depths: dict[str, int] = {}
    for device in host.devices:
        name, parent = device.bus_id, device.parent
        if name in depths or parent in listed - depths.keys():
            raise PlainValueError(
                f"devices must come once and after their parents, got {name!r}."
            )
        depths[name] = depths.get(parent, 0) + 1
        if depths[name] > _MAX_DEPTH:
            raise PlainValueError(
                f"devices must be at most {_MAX_DEPTH} below one another, got {name!r}."
            )
