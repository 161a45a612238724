"""Attributes of NCCL's XML as numbers; what cannot be read becomes a remark."""

import math
import re

from ronde.plain_values import shorten
from ronde.topology import cpu_sets
from ronde.topology.graph import NVSWITCH, UNKNOWN
from ronde.topology.probes.pci_kinds import plain_address
from ronde.topology.xml_tree import Element

MAX_REMARKS = 100
"""More about one file help nobody."""

_INTEGER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})\s*")
_CODE = re.compile(r"\s*(?:0[xX])?([0-9a-fA-F]{1,15})\s*")
_UNSEEN = "fffffff:"
_MASK = re.compile(r"[0-9a-fA-F]{0,8}(,[0-9a-fA-F]{0,8}){0,255}")


def parse_affinity(text: str) -> tuple[int, ...]:
    """Return the CPUs of words of 32 bits, highest first.

    Raises:
        ValueError: It is no such mask, or one of more than 8192 CPUs.
    """
    if not _MASK.fullmatch(text):
        raise ValueError(text)
    # NCCL lets words be shorter than the kernel writes them.
    words = ",".join(word.zfill(8) for word in text.split(","))
    return tuple(cpu_sets.members(cpu_sets.parse_mask(words)))


class AttributeReader:
    """Reads attributes of elements.

    What is missing though it is needed, and what is there and cannot be read, stands
    as a sentence in ``remarks`` and is ``UNKNOWN`` or empty.
    """

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def remark(self, element: Element, what: str) -> None:
        """Note what is odd about an element: ``has no busid``."""
        if len(self.remarks) < MAX_REMARKS:
            self.remarks.append(f"Line {element.line}: {element.tag} {what}.")
        elif len(self.remarks) == MAX_REMARKS:
            self.remarks.append(f"More than these {MAX_REMARKS} things are odd.")

    def text(self, element: Element, name: str) -> str:
        """Return an attribute that is needed, as written."""
        if name not in element.attributes:
            self.remark(element, f"has no {name}")
        return element.attributes.get(name, "")

    def integer(
        self,
        element: Element,
        name: str,
        *,
        is_needed: bool = False,
        default: int = UNKNOWN,
    ) -> int:
        """Return a number, decimal or after 0x, or the default."""
        text = self._told(element, name, is_needed=is_needed)
        found = _INTEGER.fullmatch(text) if text is not None else None
        if found:
            sign, digits = found.groups()
            value = int(digits, 16) if digits[1:2] in ("x", "X") else int(digits)
            return -value if sign == "-" else value
        self._remark_unread(element, name, text)
        return default

    def code(self, element: Element, name: str, *, is_needed: bool = False) -> int:
        """Return a hexadecimal number, with or without 0x."""
        text = self._told(element, name, is_needed=is_needed)
        if text is not None and (found := _CODE.fullmatch(text)):
            return int(found[1], 16)
        self._remark_unread(element, name, text)
        return UNKNOWN

    def number(self, element: Element, name: str) -> float:
        """Return a number with a fraction; 0 where there is none."""
        text = self._told(element, name, is_needed=False)
        try:
            value = float(text or "nan")
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
        self._remark_unread(element, name, text)
        return 0.0

    def cpus(self, element: Element, name: str) -> tuple[int, ...]:
        """Return the CPUs of a mask."""
        text = self._told(element, name, is_needed=True)
        try:
            return parse_affinity(text or "")
        except ValueError:
            self._remark_unread(element, name, text)
            return ()

    def bus_id(self, element: Element, name: str) -> str:
        """Return a PCI bus address; empty where there is none."""
        text = self._told(element, name, is_needed=True)
        bus_id = plain_address((text or "").strip())
        if not bus_id:
            self._remark_unread(element, name, text)
        return bus_id

    def target(self, element: Element) -> str:
        """Return what a link leads to; empty where that is not told."""
        # NCCL's name for a switch that a virtual machine does not see.
        if element.attributes.get("target", "").lower().startswith(_UNSEEN):
            return NVSWITCH
        return self.bus_id(element, "target")

    def _told(self, element: Element, name: str, *, is_needed: bool) -> str | None:
        text = element.attributes.get(name)
        if text is None and is_needed:
            self.remark(element, f"has no {name}")
        return text

    def _remark_unread(self, element: Element, name: str, text: str | None) -> None:
        if text is not None:
            self.remark(element, f"has {name}={shorten(text)}, which cannot be read")
