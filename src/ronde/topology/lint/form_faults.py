"""Kinds of what NCCL's reader of topology files does not take as XML means it."""

from enum import Enum
from typing import NamedTuple

from ronde.topology.findings import Finding, Severity

_FAILS = (
    "NCCL's reader fails at it, and with it every job that names the file in "
    "NCCL_TOPO_FILE."
)
_PRINT = "Write the file as NCCL does: one element a line, blanks in front of it."


class _Kind(NamedTuple):
    """One kind of fault: what is seen, what comes of it, what to do."""

    severity: Severity
    what: str
    consequence: str
    remedy: str


class FaultKind(Enum):
    """All kinds; their names are the rules'."""

    DECLARATION = _Kind(
        Severity.ERROR,
        "A declaration or instruction in <? ?> stands there",
        _FAILS,
        "Take the line out: the file begins with <system.",
    )
    DOCUMENT_TYPE = _Kind(
        Severity.ERROR,
        "A document type declaration stands there",
        _FAILS,
        "Take it out.",
    )
    BYTE_ORDER_MARK = _Kind(
        Severity.ERROR,
        "The file begins with a byte order mark",
        _FAILS,
        "Save it as UTF-8 without one.",
    )
    WIDE_CHARACTERS = _Kind(
        Severity.ERROR,
        "Its characters are of two or four bytes",
        _FAILS,
        "Save it as UTF-8.",
    )
    TEXT = _Kind(
        Severity.ERROR,
        "Text stands between elements",
        _FAILS,
        "Make it a comment, or take it out.",
    )
    TAB_BETWEEN_ELEMENTS = _Kind(
        Severity.ERROR,
        "A tab stands between elements",
        _FAILS,
        "Put blanks in place of tabs.",
    )
    BREAK_IN_TAG = _Kind(
        Severity.ERROR, "A tag goes over more than one line", _FAILS, _PRINT
    )
    TAB_IN_TAG = _Kind(
        Severity.ERROR,
        "A tab stands inside a tag",
        "NCCL's reader fails at it, or takes it for part of an attribute's name.",
        "Put one blank in place of it.",
    )
    BLANK_AT_EQUALS = _Kind(
        Severity.ERROR,
        "A blank stands beside an equals sign",
        "NCCL's reader fails at it, or loses the value.",
        'Write name="value".',
    )
    BLANK_IN_END_TAG = _Kind(
        Severity.ERROR, "A blank stands inside a closing tag", _FAILS, _PRINT
    )
    SURPLUS_BLANK = _Kind(
        Severity.NOTE,
        "A blank too many stands inside a tag",
        "NCCL makes an attribute without a name of it, one of the 16 it keeps.",
        "Leave one blank between attributes and none at the end.",
    )
    SINGLE_QUOTE = _Kind(
        Severity.WARNING,
        "A value stands between single quotes",
        "NCCL before 2.27 fails at it.",
        "Use double quotes.",
    )
    LONG_TEXT = _Kind(
        Severity.ERROR,
        "A name or value has more than 253 characters",
        _FAILS,
        "Shorten it.",
    )
    ENTITY_IN_VALUE = _Kind(
        Severity.WARNING,
        "A value holds an ampersand",
        "NCCL takes the letters as they stand, and not what they mean in XML.",
        "Do without them.",
    )
    MANY_ATTRIBUTES = _Kind(
        Severity.WARNING,
        "An element has more than 16 attributes, surplus blanks counted",
        "NCCL keeps the first 16 and drops the others.",
        "Drop those that NCCL does not read, and surplus blanks.",
    )
    EQUALS_IN_COMMENT = _Kind(
        Severity.ERROR,
        "The first word of a comment has an equals sign or is very long",
        _FAILS,
        "Begin the comment with a blank: <!-- ...",
    )
    WRONG_VERSION = _Kind(
        Severity.ERROR,
        "The version of system is not what its reader needs",
        _FAILS,
        'Write version="1", and version="2" for AMD\'s.',
    )
    UNKNOWN_ELEMENT = _Kind(
        Severity.WARNING,
        "An element stands where NCCL knows none such",
        "NCCL ignores it with all that is in it.",
        "Put it where it belongs, or take it out.",
    )
    DEVICE_BELOW_DEVICE = _Kind(
        Severity.WARNING,
        "A PCI device stands below one that NCCL takes for no bridge",
        "NCCL ignores it with all that is in it.",
        "Put it below a bridge: one of class 0x060400, without a nic of its own.",
    )
    MANY_CHILDREN = _Kind(
        Severity.ERROR,
        "An element has more children than the reader takes",
        _FAILS,
        "Leave out devices that no job uses.",
    )
    QUITE_MANY_CHILDREN = _Kind(
        Severity.WARNING,
        "An element has more than 128 children",
        "NCCL before 2.29.7 fails at it.",
        "Leave out devices that no job uses.",
    )
    MANY_ELEMENTS = _Kind(
        Severity.ERROR,
        "The file has more elements than the reader takes",
        _FAILS,
        "Leave out devices that no job uses.",
    )
    MISSING_ATTRIBUTE = _Kind(
        Severity.ERROR,
        "An element lacks an attribute that NCCL needs",
        "NCCL fails at it in every job that uses the device.",
        "Add it.",
    )
    GPU_WITHOUT_RANK = _Kind(
        Severity.NOTE,
        "A GPU has no rank",
        "NCCL leaves it out, unless a rank of the job runs on it.",
        "Nothing, where ranks are given to GPUs at run time.",
    )
    NET_WITHOUT_DEV = _Kind(
        Severity.NOTE,
        "A network adapter has no dev",
        "NCCL leaves it out, unless it finds an adapter of that name.",
        "Nothing, where NCCL finds its adapters at run time.",
    )

    @property
    def rule(self) -> str:
        """Its name in findings."""
        return self.name.lower().replace("_", "-")


class Fault(NamedTuple):
    """One place where a file is not as NCCL's reader takes it.

    Attributes:
        line: From 1.
        kind: What is wrong there.
        detail: Of what: ``cpu``; empty where the kind says it all.
    """

    line: int
    kind: FaultKind
    detail: str = ""


def to_finding(kind: FaultKind, faults: list[Fault]) -> Finding:
    """Return one finding for all faults of a kind, ascending by line."""
    severity, what, consequence, remedy = kind.value
    lines = list(dict.fromkeys(fault.line for fault in faults))
    detail = f": {faults[0].detail}" if faults[0].detail else ""
    return Finding(
        rule=kind.rule,
        severity=severity,
        element=f"line {lines[0]}",
        what=f"{what}{detail}{_others(lines[1:])}.",
        consequence=consequence,
        remedy=remedy,
    )


def _others(lines: list[int]) -> str:
    """Return where else it is so, for the end of a sentence."""
    if not lines:
        return ""
    shown = ", ".join(str(line) for line in lines[:5])
    more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
    return f", and so at line{'s' if len(lines) > 1 else ''} {shown}{more}"
