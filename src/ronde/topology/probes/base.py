"""Common code of all readers of saved topologies: files, text, XML and errors."""

import codecs
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.parsers import expat

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import UNKNOWN, PciDevice, Topology
from ronde.topology.paths.speeds import as_running, gt_per_s

MAX_BYTES = 64 << 20
"""Maximum size of a file; the largest real files have a hundredth of it."""
_MAX_DEPTH = 256
"""Maximum depth of nested XML elements; real machines need about twenty."""
_MAX_ELEMENTS = 1 << 17
_MAX_NESTED = 4
_LOOKED_AT = 1 << 16
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_TAG = re.compile(rb"<([A-Za-z_][\w:.-]*)")
# Prefixes of launchers and loggers. The first differs from line to line.
_TAGS = (
    r"\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?(?:[ \t]|$)|>(?: |$)",
    r" {0,12}\d{1,6}:(?: |$)",
    r"[A-Za-z][\w.-]{0,253}:(?: |$)",
    r"\[[^\]\n]{1,300}\](?:<std(?:out|err)>)?:? ?",
)


class Saved(NamedTuple):
    """A file with the saved output of a tool, and its name for messages."""

    name: str  # For messages: its path as the user gave it.
    data: bytes

    @property
    def text(self) -> str:
        is_utf16 = self.data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        return self.data.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")


@dataclass(frozen=True, slots=True)
class Probe:
    """A reader of one format.

    ``recognises`` is quick, and also true for damaged files. Unusual but readable input
    becomes a remark about the host. For other input, ``read`` raises ``UsageError``
    with the position in the file.
    """

    format: str  # For output: ``NCCL topology file``.
    recognises: Callable[[Saved], bool]
    read: Callable[[Saved], Topology]


def has_line(pattern: re.Pattern[str]) -> Callable[[Saved], bool]:
    """Return a test for files with a pattern in one of their first lines."""
    return lambda saved: any(map(pattern.search, first_lines(saved.text)))


def has_root(tag: str) -> Callable[[Saved], bool]:
    """Return a test for XML files with this outermost element."""
    return lambda saved: outermost_tag(saved.data) == tag


def bad_value(origin: str, line: int, rule: str, got: object) -> UsageError:
    return UsageError(
        f"{origin}, line {line}: {rule}, got {shorten(got)}. The file may be truncated "
        "or altered."
    )


def untag(lines: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return lines without launchers' tags, and the hosts or ranks in the tags."""
    plain: list[str] = list(lines)
    origins: tuple[str, ...] = ()
    for _ in range(_MAX_NESTED):
        for form in _TAGS:
            if any(tags := _tags(plain, form)):
                pairs = zip(plain, tags, strict=True)
                plain = [line.removeprefix(tag) for line, tag in pairs]
                own = {tag.strip(" :") for tag in tags if tag}
                if form != _TAGS[0] and len(own) > len(origins):
                    origins = tuple(sorted(own))
                break
        else:
            break
    return plain, origins


def _tags(lines: Sequence[str], form: str) -> list[str]:
    pattern = re.compile(form)
    tags: list[str] = []
    for line in lines:
        match = pattern.match(line)
        if match is None and line.strip():
            return []  # most texts have no tags, as their first line shows
        tags.append(match[0] if match else "")
    return tags


def first_lines(text: str) -> list[str]:
    """Return the first lines of a text, without tags."""
    head = text[:_LOOKED_AT]
    # A cut line may have lost its tag.
    whole = head if len(text) <= _LOOKED_AT else head.rpartition("\n")[0] or head
    return untag(whole.splitlines())[0]


def lines_of_one(lines: Sequence[str], origin: str) -> list[str]:
    """Return lines without tags; refuse those of several hosts or ranks."""
    plain, origins = untag(lines)
    if len(origins) > 1:
        raise UsageError(
            f"{origin} has output from {len(origins)} hosts or ranks: "
            f"{shorten(', '.join(origins))}. Give the lines of one: grep -F "
            f"{shorten(origins[0])} {origin}"
        )
    return plain


def keep_lower_ends(
    devices: Mapping[str, PciDevice], ends: Iterable[str]
) -> tuple[PciDevice, ...]:
    """Return the devices at ``ends`` and those above them, one device per link.

    The source lists both ends of a link: a device, and the port above it. As in NCCL,
    only the lower end is kept, with the speed and width that both ends support. A PCI
    switch, which has a port above other ports, becomes one device.
    """
    kept: dict[str, PciDevice] = {}
    redirecting: defaultdict[str, set[str]] = defaultdict(set)
    for end in ends:
        chain: dict[str, PciDevice] = {}
        address = end
        while address in devices and address not in kept and address not in chain:
            device = devices[address]
            port = devices.get(device.parent)
            chain[address] = _with_both_ends(device, port)
            address = port.parent if port else ""
            chain[device.bus_id] = chain[device.bus_id]._replace(parent=address)
            if port and port.is_redirecting:
                redirecting[address].add(port.bus_id)
        kept |= dict(reversed(chain.items()))
    return tuple(
        device._replace(
            is_redirecting=device.bus_id in redirecting,
            redirecting_ports=tuple(sorted(redirecting[device.bus_id])),
        )
        for device in kept.values()
    )


def _with_both_ends(device: PciDevice, port: PciDevice | None) -> PciDevice:
    """Return a device with its link set to the best that both of its ends support."""
    if port is None or not (port.speed or port.width > 0 or port.gb_per_s):
        # The slot's maximum is unknown, so the link's current state may be its best.
        return as_running(device)
    ends = device, port
    rates = [each.gb_per_s for each in ends if each.gb_per_s > 0]
    widths = [each.width for each in ends if each.width >= 0]
    speeds = [each.speed for each in ends if gt_per_s(each.speed)]
    return device._replace(
        speed=min(speeds, key=gt_per_s, default=""),
        width=min([width for width in widths if width] or widths, default=UNKNOWN),
        gb_per_s=min(rates, default=0.0),
    )


def small_number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else UNKNOWN


class Element(NamedTuple):
    """An XML element with its position in the file."""

    tag: str
    attributes: dict[str, str]
    line: int  # Where it begins, from 1.
    origin: str  # Its file, for messages.
    children: "list[Element]"
    pieces: list[str]  # Of the text directly in it.

    def named(self, *tags: str) -> "list[Element]":
        return [child for child in self.children if child.tag in tags]

    def get(self, name: str) -> str:
        """Return an attribute, or ""."""
        return self.attributes.get(name, "")

    def bad(self, rule: str, got: object) -> UsageError:
        return bad_value(self.origin, self.line, rule, got)


def outermost_tag(data: bytes) -> str:
    """Return the name of the first XML element in the first 64 KiB, or ""."""
    # Without NULs, UTF-16 reads the same.
    head = _COMMENT.sub(b"", data[:_LOOKED_AT].replace(b"\0", b""))
    found = _TAG.search(head)
    return found[1].decode() if found else ""


def parse_xml(data: bytes, origin: str, tag: str) -> Element:
    """Return the outermost element; refuse other tags, entities and deep nesting."""
    # Each open element is inside the previous one; the first contains the outermost.
    opened = [Element("", {}, 0, origin, [], [])]
    num_elements = 0
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal num_elements
        num_elements += 1
        line = parser.CurrentLineNumber
        if len(opened) > _MAX_DEPTH or num_elements > _MAX_ELEMENTS:
            raise UsageError(
                f"{origin} is not a topology: at line {line} it exceeds {_MAX_DEPTH} "
                f"nested elements or {_MAX_ELEMENTS} elements in all."
            )
        element = Element(tag, attributes, line, origin, [], [])
        opened[-1].children.append(element)
        opened.append(element)

    def on_text(text: str) -> None:
        opened[-1].pieces.append(text)

    def refuse_entity(name: str, *_: object) -> None:
        raise UsageError(
            f"{origin} defines the XML entity {name!r} at line "
            f"{parser.CurrentLineNumber}. No program writes such a topology: do not "
            "trust it."
        )

    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: opened.pop()
    parser.CharacterDataHandler = on_text
    parser.EntityDeclHandler = refuse_entity
    try:
        parser.Parse(data, True)  # noqa: FBT003 - it takes no names
    except UsageError:
        raise
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise UsageError(
            f"cannot read {origin}: not well-formed XML: {error}. The file may be "
            "truncated or altered."
        ) from None
    # Without an outermost element there was an error.
    root = opened[0].children[0]
    if root.tag != tag:
        raise UsageError(
            f"{origin} is another kind of XML file: the first element must be {tag}, "
            f"got {root.tag} at line {root.line}."
        )
    return root
