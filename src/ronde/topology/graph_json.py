"""A topology as JSON, and back."""

import json
from typing import cast

from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.topology.graph import Topology

FORM = "ronde-topology"
VERSION = 1
"""Changes when a field changes its meaning or goes."""


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
        return from_plain(Topology, values, "topology")
    except PlainValueError as error:
        raise UsageError(
            f"{origin}: {error} Write it with: ronde topo --json"
        ) from None
