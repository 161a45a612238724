"""What every reader of a saved topology uses: the file, its text, XML and errors."""

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from xml.parsers import expat

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import Topology

MAX_BYTES = 64 << 20
"""Of a file; the largest real ones are a hundredth of that."""
_MAX_DEPTH = 256
"""Of XML's elements inside one another; real machines need about twenty."""
_MAX_ELEMENTS = 1 << 17
_MAX_NESTED = 4
_LOOKED_AT = 1 << 16
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_TAG = re.compile(rb"<([A-Za-z_][\w:.-]*)")
# What launchers and loggers put before a line. The first differs from line to line.
_TAGS = (
    r"\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?(?:[ \t]|$)|>(?: |$)",
    r" {0,12}\d{1,6}:(?: |$)",
    r"[A-Za-z][\w.-]{0,253}:(?: |$)",
    r"\[[^\]\n]{1,300}\](?:<std(?:out|err)>)?:? ?",
)


class Saved(NamedTuple):
    """A saved file."""

    name: str  # For messages: its path as the user gave it.
    data: bytes

    @property
    def text(self) -> str:
        is_utf16 = self.data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        return self.data.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")


class Probe(Protocol):
    """Reads one form of topology.

    ``recognises`` is quick, and true for damaged files, too. What is odd and can be
    read is a remark of the host; else ``read`` raises ``UsageError`` with the place in
    the file. Nothing is guessed.
    """

    @property
    def format(self) -> str: ...  # For people: ``NCCL topology file``.
    def recognises(self, saved: Saved) -> bool: ...
    def read(self, saved: Saved, /) -> Topology: ...


@dataclass(frozen=True, slots=True)
class TextProbe:
    """A reader of text that has a pattern in one of its first lines."""

    format: str
    pattern: re.Pattern[str]
    read: Callable[[Saved], Topology]

    def recognises(self, saved: Saved) -> bool:
        return any(map(self.pattern.search, first_lines(saved.text)))


def bad_value(origin: str, line: int, rule: str, got: object) -> UsageError:
    """Return the error for a value that breaks a rule; raise it."""
    return UsageError(
        f"{origin}, line {line}: {rule}, got {shorten(got)}. Was it cut, or changed on "
        "its way?"
    )


def untag(lines: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return lines without what each has in front, and the places named there."""
    plain: list[str] = list(lines)
    places: tuple[str, ...] = ()
    for _ in range(_MAX_NESTED):
        for form in _TAGS:
            if any(tags := _tags(plain, form)):
                plain = [
                    line.removeprefix(tag)
                    for line, tag in zip(plain, tags, strict=True)
                ]
                own = {tag.strip(" :") for tag in tags if tag}
                if form != _TAGS[0] and len(own) > len(places):
                    places = tuple(sorted(own))
                break
        else:
            break
    return plain, places


def _tags(lines: Sequence[str], form: str) -> list[str]:
    """Return what each line begins with; nothing where a line does not."""
    pattern = re.compile(form)
    tags: list[str] = []
    for line in lines:
        match = pattern.match(line)
        if match is None and line.strip():
            return []  # most texts have none, and their first line shows it
        tags.append(match[0] if match else "")
    return tags


def first_lines(text: str) -> list[str]:
    """Return the first lines of a text without tags, to recognise it."""
    head = text[:_LOOKED_AT]
    # A line that is cut may have lost its tag.
    whole = head if len(text) <= _LOOKED_AT else head.rpartition("\n")[0] or head
    return untag(whole.splitlines())[0]


def lines_of_one(lines: Sequence[str], origin: str) -> list[str]:
    """Return lines without tags; refuse those of several hosts or ranks."""
    plain, places = untag(lines)
    if len(places) > 1:
        raise UsageError(
            f"{origin} must be of one host, got lines of {len(places)}: "
            f"{shorten(', '.join(places))}. Give those of one alone: grep -F "
            f"{shorten(places[0])} {origin}"
        )
    return plain


class Element(NamedTuple):
    """One element of XML."""

    tag: str
    attributes: dict[str, str]
    line: int  # Where it begins, from 1.
    origin: str  # Its file, for messages.
    children: "list[Element]"
    pieces: list[str]  # Of the text directly in it.

    def named(self, *tags: str) -> "list[Element]":
        return [child for child in self.children if child.tag in tags]

    def get(self, name: str) -> str:
        """Return an attribute; empty if it is not there."""
        return self.attributes.get(name, "")

    def bad(self, rule: str, got: object) -> UsageError:
        return bad_value(self.origin, self.line, rule, got)


def outermost_tag(data: bytes) -> str:
    """Return the name of the first element, in damaged files too; empty if none.

    It stands in the first 64 KiB, or is not found.
    """
    # Without NULs, what is UTF-16 reads the same.
    head = _COMMENT.sub(b"", data[:_LOOKED_AT].replace(b"\0", b""))
    found = _TAG.search(head)
    return found[1].decode() if found else ""


def parse_xml(data: bytes, origin: str) -> Element:
    """Return the outermost element; refuse entities and endless nesting."""
    # Each open element is in the one before; the first is around the outermost.
    opened = [Element("", {}, 0, origin, [], [])]
    num_elements = 0
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal num_elements
        num_elements += 1
        line = parser.CurrentLineNumber
        if len(opened) > _MAX_DEPTH or num_elements > _MAX_ELEMENTS:
            raise UsageError(
                f"{origin} must have at most {_MAX_DEPTH} elements inside one another "
                f"and {_MAX_ELEMENTS} in all, got more at line {line}. Is it a "
                "topology?"
            )
        element = Element(tag, attributes, line, origin, [], [])
        opened[-1].children.append(element)
        opened.append(element)

    def take_text(text: str) -> None:
        opened[-1].pieces.append(text)

    def refuse_entity(name: str, *_: object) -> None:
        raise UsageError(
            f"{origin} must define no entities, got {name!r} at line "
            f"{parser.CurrentLineNumber}. No program writes such a topology: do not "
            "trust it."
        )

    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: opened.pop()
    parser.CharacterDataHandler = take_text
    parser.EntityDeclHandler = refuse_entity
    try:
        parser.Parse(data, True)  # noqa: FBT003 - it takes no names
    except UsageError:
        raise
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise UsageError(
            f"{origin} must be well-formed XML, got an error: {error}. Was it cut, or "
            "changed on its way?"
        ) from None
    # Without an outermost element there was an error.
    return opened[0].children[0]
