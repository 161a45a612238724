"""What every reader of a saved topology uses: the file, its text and its errors."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ronde.errors import UsageError
from ronde.plain_values import shorten
from ronde.topology.graph import Topology


class Saved(NamedTuple):
    """A file as it lies there."""

    name: str  # What to call it in messages: its path as the user gave it.
    data: bytes  # All its bytes.

    @property
    def text(self) -> str:
        """The bytes as text; what is no UTF-8 stands as replacement characters."""
        return self.data.decode(errors="replace")


class Probe(Protocol):
    """Reads one form of topology."""

    @property
    def format(self) -> str:
        """The form, for people: ``NCCL topology file``."""
        ...

    def recognises(self, saved: Saved) -> bool:
        """Return whether a file is of this form; quick, and true for damaged ones."""
        ...

    def read(self, saved: Saved) -> Topology:
        """Return what a file says.

        What is odd and can be read is a remark of the host. Nothing is guessed.

        Raises:
            UsageError: The file cannot be read, with the place in it.
        """
        ...


def bad_value(origin: str, line: int, rule: str, got: object) -> UsageError:
    """Return the error for a value that breaks a rule; raise it."""
    return UsageError(
        f"{origin}, line {line}: {rule}, got {shorten(got)}. Was it cut, or changed on "
        "its way?"
    )


_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?(?:[ \t]|$)|>(?: |$)"
)
"""Differs from line to line, or says nothing."""
_PLACES = tuple(
    re.compile(form)
    for form in (
        r" {0,12}\d{1,6}:(?: |$)",
        r"[A-Za-z][\w.-]{0,253}:(?: |$)",
        r"\[[^\]\n]{1,300}\](?:<std(?:out|err)>)?:? ?",
    )
)
_MAX_NESTED = 4
_LOOKED_AT = 1 << 16


class Untagged(NamedTuple):
    """Lines without tags."""

    lines: list[str]  # As many as there were.
    # The different places that tags name, such as hosts; none without tags.
    places: tuple[str, ...] = ()


def untag(lines: Sequence[str]) -> Untagged:
    """Take off what every line has in front; where one has none, none has any."""
    found = Untagged(list(lines))
    for _ in range(_MAX_NESTED):
        for form in (_TIME, *_PLACES):
            tags = _tags(found.lines, form)
            if tags:
                rest = [
                    line[len(tag) :]
                    for line, tag in zip(found.lines, tags, strict=True)
                ]
                told = {tag.strip(" :") for tag in tags if tag}
                own = () if form is _TIME else tuple(sorted(told))
                found = Untagged(rest, max(found.places, own, key=len))
                break
        else:
            break
    return found


def first_lines(text: str) -> list[str]:
    """Return the first lines of a text without tags, to see what it is."""
    head = text[:_LOOKED_AT]
    # A line that is cut may have lost its tag.
    whole = head if len(text) <= _LOOKED_AT else head.rpartition("\n")[0] or head
    return untag(whole.splitlines()).lines


def lines_of_one(lines: Sequence[str], origin: str) -> list[str]:
    """Return lines without tags.

    Raises:
        UsageError: They are of several hosts or ranks.
    """
    found = untag(lines)
    if len(found.places) > 1:
        raise UsageError(
            f"{origin} must be of one host, got lines of {len(found.places)}: "
            f"{shorten(', '.join(found.places))}. Give those of one alone: grep -F "
            f"{shorten(found.places[0])} {origin}"
        )
    return found.lines


def _tags(lines: Sequence[str], form: re.Pattern[str]) -> list[str]:
    """Return what each line begins with; nothing where a line does not."""
    tags: list[str] = []
    for line in lines:
        match = form.match(line)
        if match is None and line.strip():
            return []
        tags.append(match[0] if match else "")
    return tags if any(tags) else []
