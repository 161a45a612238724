"""Read RDMA ports from the output of ``ibstat``, ``ibstatus`` and ``ibv_devinfo``."""

import re
from collections.abc import Mapping
from typing import Any

from ronde.errors import UsageError
from ronde.topology.machine import parse_rate
from ronde.topology.probes.base import Saved, has_line, lines_of_one

_DEVICE = re.compile(
    r"^\s*(?:(?:CA|iWARP RNIC):? '|hca_id:\s*|Infiniband device ')([\w.-]+)"
    r"(?:'? port (\d+) status:|')?\s*$"
)
is_rdma_text = has_line(_DEVICE)
_FIELD = re.compile(r"\s*([A-Za-z][\w ]*?)[ \t]*(\d+)?:\s*(.*?)\s*")
_FIELDS = {
    "ca_type": "model",
    "vendor_part_id": "model",
    "physical_state": "phys_state",
}
_SPELLED = {"INITIALIZING": "INIT", "LINK_UP": "LinkUp"}


def read_rdma_ports(saved: Saved) -> dict[str, dict[str, Any]]:
    """Return ports by names such as ``mlx5_0:1``, in the kernel's words.

    Each has ``state`` (``ACTIVE``), ``physical_state`` (``LinkUp``), ``mbit_per_s``,
    ``layer`` (``InfiniBand``), ``model`` (``MT4129``), and ``link`` (``4X``; ``DOWN,
    Polling``). Values are empty or 0 if unknown.
    """
    adapter = ""
    own = device = dict[str, str]()
    fields: dict[str, dict[str, str]] = {}
    for line in lines_of_one(saved.text.splitlines(), saved.name):
        number = ""
        if match := _DEVICE.match(line):
            adapter, number = match[1], match[2]
            own = device = {}
        elif match := _FIELD.fullmatch(line):
            name = match[1].lower().replace(" ", "_")
            number = (match[2] or match[3]) if name == "port" else ""
            own[_FIELDS.get(name, name)] = match[3]
        if number and adapter:
            own = fields[f"{adapter}:{number}"] = dict(device)
    if not fields:
        raise UsageError(
            f"{saved.name} lists no ports of RDMA adapters. Write it with: ibstat"
        )
    return {name: _port(own) for name, own in fields.items()}


def _port(fields: Mapping[str, str]) -> dict[str, Any]:
    state, physical = (_word(fields.get(n, "")) for n in ("state", "phys_state"))
    lanes = fields.get("active_width", "").partition(" ")[0]
    num_lanes = re.match(r"\d{1,2}", lanes)
    rate, of_lane = (parse_rate(fields.get(n, "")) for n in ("rate", "active_speed"))
    return {
        "state": state.upper(),
        # ibv_devinfo prints it with -v alone.
        "physical_state": physical or ("LinkUp" if state == "Active" else "unknown"),
        "mbit_per_s": rate or int(num_lanes[0] if num_lanes else 1) * of_lane,
        "layer": fields.get("link_layer", ""),
        "model": fields.get("model", ""),
        "link": lanes
        if state == "Active"
        else f"{state.upper()}, {physical}".rstrip(", "),
    }


def _word(text: str) -> str:
    """Convert ``4: ACTIVE`` or ``PORT_ACTIVE (4)`` to ``Active``."""
    word = text.rpartition(": ")[2].partition(" (")[0].removeprefix("PORT_")
    word = _SPELLED.get(word.upper(), word)
    return word.capitalize() if word.isupper() else word
