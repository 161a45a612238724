"""XML from anywhere as a tree of elements, with no way for it to do harm.

Document type declarations are let pass unread; entities of its own, elements below one
another without end, and files too large for a topology are refused.
"""

import re
from typing import NamedTuple, cast
from xml.parsers import expat

from ronde.errors import UsageError

MAX_BYTES = 64 << 20
"""Of a file; the largest real ones are a hundredth of that."""
MAX_DEPTH = 256
"""Of elements inside one another; real machines need about twenty."""
_MAX_ELEMENTS = 1 << 17
_HEAD_BYTES = 64 << 10
_NAME = re.compile(rb"[A-Za-z_][\w:.-]*")


class Element(NamedTuple):
    """One element of XML."""

    tag: str  # Its name.
    attributes: dict[str, str]  # Names to values, in the order of the file.
    children: "tuple[Element, ...]"  # The elements in it, in the order of the file.
    text: str  # What stands directly in it, without blanks at its ends.
    line: int  # Where it begins, from 1.

    def named(self, *tags: str) -> "tuple[Element, ...]":
        """Return the children of these names."""
        return tuple(child for child in self.children if child.tag in tags)


def parse_xml(data: bytes, origin: str) -> Element:
    """Return the outermost element.

    Raises:
        UsageError: It is no well-formed XML, or not of this world.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{origin} must be at most {MAX_BYTES >> 20} MiB of XML, got "
            f"{len(data) >> 20} MiB. Give the topology alone."
        )
    builder = _Builder(origin)
    try:
        return builder.build(data)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{origin} must be well-formed XML, got an error: {error}. Was it cut, or "
            "changed on its way?"
        ) from None


def outermost_tag(data: bytes) -> str:
    """Return the name of the first element, in damaged files too; empty if none.

    It stands in the first 64 KiB, or is not found.
    """
    # Without NULs, what is UTF-16 reads the same.
    head = data[:_HEAD_BYTES].replace(b"\0", b"")
    at = head.find(b"<")
    while at >= 0:
        if found := _NAME.match(head, at + 1):
            return found[0].decode()
        is_comment = head.startswith(b"<!--", at)
        end = head.find(b"-->", at) if is_comment else at + 1
        at = head.find(b"<", end) if end >= 0 else -1
    return ""


class _Builder:
    """Makes the tree from what the parser tells."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        # Of each open element: name, attributes, line, children, pieces of text.
        self._open: list[tuple[str, dict[str, str], int, list[Element], list[str]]] = []
        self._num_elements = 0
        self._root: Element | None = None
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._take_text
        self._parser.EntityDeclHandler = self._refuse_entity

    def build(self, data: bytes) -> Element:
        self._parser.Parse(data, True)  # noqa: FBT003 - it takes no names
        # Without an outermost element there was an error.
        return cast("Element", self._root)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        line = self._parser.CurrentLineNumber
        self._num_elements += 1
        if len(self._open) >= MAX_DEPTH or self._num_elements > _MAX_ELEMENTS:
            raise UsageError(
                f"{self._origin} must have at most {MAX_DEPTH} elements inside one "
                f"another and {_MAX_ELEMENTS} in all, got more at line {line}. Is it a "
                "topology?"
            )
        self._open.append((tag, attributes, line, [], []))

    def _end(self, _tag: str) -> None:
        tag, attributes, line, children, pieces = self._open.pop()
        text = "".join(pieces).strip()
        element = Element(tag, attributes, tuple(children), text, line)
        if self._open:
            self._open[-1][3].append(element)
        else:
            self._root = element

    def _take_text(self, text: str) -> None:
        self._open[-1][4].append(text)

    def _refuse_entity(self, name: str, *_: object) -> None:
        raise UsageError(
            f"{self._origin} must define no entities, got {name!r} at line "
            f"{self._parser.CurrentLineNumber}. No program writes such a topology: do "
            "not trust it."
        )
