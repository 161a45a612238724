"""One value from what several sources say of an element, and where they disagree."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import GpuDevice, NetPort, NumaNode, PciDevice, Relation

_LEADING_NUMBER = re.compile(r"\d+(\.\d+)?")


class Told(NamedTuple):
    """What a source says of an element.

    Attributes:
        by: The source, for people.
        element: As it says.
    """

    by: str
    element: Any


def _same(value: Any) -> object:  # noqa: ANN401 - a field is of any type
    return value


def _speed(value: str) -> object:
    """Return what "16 GT/s" and "16.0 GT/s PCIe" have in common."""
    match = _LEADING_NUMBER.match(value)
    return float(match[0]) if match else value


def _class(value: int) -> object:
    # Not all sources tell the interface.
    return value >> 8


def _bus(value: str) -> object:
    # NCCL lists all functions of an adapter under the first.
    return value.rpartition(":")[0]


# What sources must agree on, and what of it. The rest depends on when or by whom it was
# counted or spelt.
_COMPARED: dict[type, dict[str, Callable[[Any], object]]] = {
    NumaNode: dict.fromkeys(
        ("cpus", "package", "arch", "vendor", "family", "model"), _same
    ),
    PciDevice: {
        "parent": _same,
        "node": _same,
        "class_code": _class,
        "vendor": _same,
        "device": _same,
        "subsystem_vendor": _same,
        "subsystem_device": _same,
        "speed": _speed,
        "width": _same,
    },
    GpuDevice: dict.fromkeys(("sm", "gcn", "uuid"), _same),
    NetPort: {"bus_id": _bus, "mbit_per_s": _same},
    Relation: {"path": _same, "peer": _same},
}
_WORDS = {
    "cpus": "CPUs",
    "sm": "compute capability",
    "class_code": "class",
    "bus_id": "bus address",
    "mbit_per_s": "Mbit/s",
}
_HEX_DIGITS = {
    "class_code": 6,
    "vendor": 4,
    "device": 4,
    "subsystem_vendor": 4,
    "subsystem_device": 4,
}
# Of these, sources write 0 and less for what they do not know.
_POSITIVE = ("width", "mbit_per_s")


def merge_told(told: Sequence[Told], name: str, remarks: list[str]) -> Any:  # noqa: ANN401
    """Return an element with each field from the first source that tells it.

    Args:
        told: What sources say of it, the most trusted first; all of one class.
        name: What to call the element.
        remarks: Gets a sentence for each field on which they disagree.
    """
    first = told[0].element
    if len(told) == 1:
        return first
    kind = cast("type[Any]", type(first))
    changed: dict[str, object] = {}
    for field, default in kind._field_defaults.items():
        values = [(each.by, getattr(each.element, field)) for each in told]
        known = [(by, v) for by, v in values if _is_told(field, v, default)]
        # Where none tells it, some say so in another way than others.
        rest = (value for _, value in values if value != default)
        changed[field] = known[0][1] if known else next(rest, default)
        common = _COMPARED[kind].get(field)
        if common and known:
            _compare(name, field, known, common, remarks)
    return first._replace(**changed)


def disagree(name: str, what: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    """Return the remark that two sources disagree, of whom the first is believed.

    Args:
        name: Of an element.
        what: On what they disagree.
        one: What the first says, and who it is.
        other: The same of the second.
    """
    return f"{name}: {what} {one[0]} by {one[1]}, but {other[0]} by {other[1]}."


def _compare(
    name: str,
    field: str,
    known: Sequence[tuple[str, Any]],
    common: Callable[[Any], object],
    remarks: list[str],
) -> None:
    by, believed = known[0]
    for other, value in known[1:]:
        if common(value) != common(believed):
            said, instead = _spell(field, believed), _spell(field, value)
            what = _WORDS.get(field, field.replace("_", " "))
            remarks.append(disagree(name, what, (said, by), (instead, other)))


def _is_told(field: str, value: object, default: object) -> bool:
    return value != default and not (field in _POSITIVE and cast("int", value) <= 0)


def _spell(field: str, value: Any) -> str:  # noqa: ANN401 - a field is of any type
    if field == "cpus":
        return format_list(value)
    if field in _HEX_DIGITS and isinstance(value, int):
        return f"0x{value:0{_HEX_DIGITS[field]}x}"
    return str(value)
