"""The objects of hwloc's XML with what they inherit, and its spelling of numbers."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from ronde.topology.cpu_sets import parse_mask
from ronde.topology.graph import UNKNOWN
from ronde.topology.probes.pci_kinds import plain_address
from ronde.topology.probes.refusals import bad_value
from ronde.topology.xml_tree import Element

MAX_CPUS = 1 << 16
"""More hardware threads than this are no machine."""

PACKAGES = ("Package", "Socket")
"""What a processor is called, now and before version 1.11."""

_WORD = re.compile(r"(?:0x)?([0-9a-f]{0,8})", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,18}")


class HwlocObject(NamedTuple):
    """An object, and where it stands.

    Attributes:
        element: As written.
        depth: How many objects it is in.
        cpus: Its CPUs as bits, else those of the nearest object around it that tells.
        package: The package around it; none.
        bus_id: Address of the nearest PCI device or bridge around it; empty if none.
        origin: What to call the file in messages.
    """

    element: Element
    depth: int
    cpus: int
    package: "HwlocObject | None"
    bus_id: str
    origin: str

    @property
    def kind(self) -> str:
        """What it is, as hwloc calls it: ``NUMANode``, ``PCIDev``."""
        return self.element.attributes.get("type", "")

    def text(self, name: str) -> str:
        """Return an attribute; empty where there is none."""
        return self.element.attributes.get(name, "")

    def number(self, name: str) -> int:
        """Return an attribute that is a whole number; ``UNKNOWN`` if there is none.

        Raises:
            UsageError: It is something else.
        """
        return number_of(self.element, name, self.origin)

    def infos(self) -> dict[str, str]:
        """Return what is told besides attributes."""
        return infos_of(self.element)


def walk(machine: Element, origin: str) -> Iterator[HwlocObject]:
    """Yield all objects, parents before children, in the order of the file.

    Raises:
        UsageError: A set of CPUs or an address cannot be read.
    """
    waiting = [HwlocObject(machine, 0, 0, None, "", origin)]
    while waiting:
        each = _own(waiting.pop())
        yield each
        package = each if each.kind in PACKAGES else each.package
        address = _address(each) or each.bus_id
        waiting += [
            HwlocObject(child, each.depth + 1, each.cpus, package, address, origin)
            for child in reversed(each.element.named("object"))
        ]


def infos_of(element: Element) -> dict[str, str]:
    """Return the pairs of name and value that stand in an element."""
    return {
        info.attributes.get("name", ""): info.attributes.get("value", "")
        for info in element.named("info")
    }


def number_of(element: Element, name: str, origin: str) -> int:
    """Return an attribute that is a whole number; ``UNKNOWN`` if there is none.

    Raises:
        UsageError: It is something else.
    """
    text = element.attributes.get(name)
    if text is None:
        return UNKNOWN
    if not _NUMBER.fullmatch(text):
        raise bad_value(origin, element.line, f"{name} must be a whole number", text)
    return int(text)


def decimal_of(text: str) -> float:
    """Return a number that is finite and not negative; ``nan`` for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 <= value < math.inf else math.nan


def cpus_of(element: Element, origin: str) -> int:
    """Return an element's ``cpuset`` as bits; empty where there is none.

    Words of 32 bits stand between commas, the highest first, without their zeros.

    Raises:
        UsageError: It is no such set, or one of more than ``MAX_CPUS``.
    """
    text = element.attributes.get("cpuset", "")
    words = [_WORD.fullmatch(word) for word in text.split(",", MAX_CPUS // 32)]
    if not all(words):
        raise bad_value(
            origin,
            element.line,
            f"cpuset must be words of hexadecimal digits for at most {MAX_CPUS} CPUs",
            text,
        )
    return parse_mask("".join(word[1].zfill(8) for word in words if word))


def _own(each: HwlocObject) -> HwlocObject:
    """Return an object with its own CPUs, where it tells them."""
    if "cpuset" not in each.element.attributes:
        return each
    return each._replace(cpus=cpus_of(each.element, each.origin))


def _address(each: HwlocObject) -> str:
    text = each.text("pci_busid")
    address = plain_address(text)
    if text and not address:
        raise bad_value(
            each.origin,
            each.element.line,
            "pci_busid must be an address such as 0000:1b:00.0",
            text,
        )
    return address
