"""Markup of a topology file as NCCL's own reader goes through it, byte by byte.

The reader is not one of XML: between elements it knows blanks and line breaks, inside a
tag a single blank before each attribute, and nothing else.
"""

import re
from collections.abc import Iterator

from ronde.topology.lint.form_faults import Fault, FaultKind

MAX_LENGTH = 253
MAX_ATTRIBUTES = 16

_PIECE = re.compile(
    r"<!--.*?-->"
    r"|<\?.*?\?>"
    r"|<!\[CDATA\[.*?\]\]>"
    r"|<!(?:[^\[\"'>]|\"[^\"]*\"|'[^']*'|\[.*?\])*+>"
    r"|<(?:[^\"'>]|\"[^\"]*\"|'[^']*')*+>",
    re.DOTALL,
)
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_NO_TEXT = re.compile(r"[ \t\r\n]*")
_FIRST_WORD = re.compile(r"[^ >/\n\r]*")
_EQUALS_APART = re.compile(r" =|= ")
_UTF8_MARK = "\xef\xbb\xbf"


def find_markup_faults(data: bytes) -> Iterator[Fault]:
    """Yield what the reader does not take as it is meant, in the order of the file.

    Args:
        data: A file that is well-formed XML.
    """
    if b"\0" in data:
        yield Fault(1, FaultKind.WIDE_CHARACTERS)
        return
    # One character a byte, as NCCL counts them.
    text = data.decode("latin-1")
    if text.startswith(_UTF8_MARK):
        yield Fault(1, FaultKind.BYTE_ORDER_MARK)
        text = text[len(_UTF8_MARK) :]
    line, end = 1, 0
    for piece in _PIECE.finditer(text):
        yield from _gap_faults(text[end : piece.start()], line)
        line += text.count("\n", end, piece.start())
        yield from _piece_faults(piece[0], line)
        line += piece[0].count("\n")
        end = piece.end()
    yield from _gap_faults(text[end:], line)


def _gap_faults(gap: str, line: int) -> Iterator[Fault]:
    """Yield what is wrong between two pieces of markup."""
    tab = gap.find("\t")
    if tab >= 0:
        at = line + gap.count("\n", 0, tab)
        yield Fault(at, FaultKind.TAB_BETWEEN_ELEMENTS)
    blank = _NO_TEXT.match(gap)
    if blank and blank.end() < len(gap):
        at = line + blank[0].count("\n")
        yield Fault(at, FaultKind.TEXT, repr(gap[blank.end() :][:20]))


def _piece_faults(piece: str, line: int) -> Iterator[Fault]:
    if piece.startswith("<!--"):
        # The reader takes the beginning for the name of an element at first.
        word = _FIRST_WORD.match(piece, 1)
        if word and ("=" in word[0] or len(word[0]) > MAX_LENGTH):
            yield Fault(line, FaultKind.EQUALS_IN_COMMENT)
    elif piece.startswith("<?"):
        yield Fault(line, FaultKind.DECLARATION)
    elif piece.startswith("<![CDATA["):
        yield Fault(line, FaultKind.TEXT, repr(piece[:20]))
    elif piece.startswith("<!"):
        yield Fault(line, FaultKind.DOCUMENT_TYPE)
    elif piece.startswith("</"):
        if piece[:-1].rstrip() != piece[:-1]:
            yield Fault(line, FaultKind.BLANK_IN_END_TAG)
    else:
        yield from _tag_faults(piece, line)


def _tag_faults(tag: str, line: int) -> Iterator[Fault]:
    """Yield what is wrong with the start of an element."""
    outside = _QUOTED.sub('""', tag)
    if "\n" in outside or "\r" in outside:
        yield Fault(line, FaultKind.BREAK_IN_TAG)
    if "\t" in outside:
        yield Fault(line, FaultKind.TAB_IN_TAG)
    if _EQUALS_APART.search(outside):
        yield Fault(line, FaultKind.BLANK_AT_EQUALS)
    elif "  " in outside or outside.removesuffix(">").removesuffix("/").endswith(" "):
        yield Fault(line, FaultKind.SURPLUS_BLANK)
    # Each blank begins an attribute.
    if outside.count(" ") > MAX_ATTRIBUTES:
        yield Fault(line, FaultKind.MANY_ATTRIBUTES)
    names = re.split(r"[ \t\r\n=<>/\"]+", outside)
    values = [value[0] for value in _QUOTED.finditer(tag)]
    if max(map(len, [*names, *(value[1:-1] for value in values)])) > MAX_LENGTH:
        yield Fault(line, FaultKind.LONG_TEXT)
    if any(value.startswith("'") for value in values):
        yield Fault(line, FaultKind.SINGLE_QUOTE)
    if any("&" in value for value in values):
        yield Fault(line, FaultKind.ENTITY_IN_VALUE)
