"""Slurm's lists of hosts: ``n[01-04,7],login1``."""

import re
from itertools import product

from ronde.errors import UsageError

MAX_HOSTS = 1 << 16  # of one list: more is a typing error
BLANKS = " \t"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def split_list(text: str, source: str) -> list[str]:
    """Split at the commas outside of brackets; empty parts are left out."""
    outside = re.sub(r"\[[^][]*\]", "", text)
    if "[" in outside or "]" in outside:
        raise UsageError(
            f"{source}: brackets must be closed and not be nested, got {text!r}. "
            "Type them as in n[01-04,7]."
        )
    parts = re.findall(r"(?:\[[^][]*\]|[^],[])+", text)
    return [part.strip(BLANKS) for part in parts if part.strip(BLANKS)]


def expand_list(text: str, source: str) -> list[str]:
    """Return the host names of a list, in order and with duplicates."""
    names: list[str] = []
    for word in split_list(text, source):
        names += expand(word, source)
        _require_room(len(names), text, source)
    return names


def expand(word: str, source: str) -> list[str]:
    """Return the names of a word such as ``rack[0-1]n[08-11]x``.

    The last range varies fastest. Numbers are padded to the width of a range's low end.
    """
    count, choices = 1, list[list[str]]()
    for index, piece in enumerate(re.split(r"\[([^][]*)\]", word)):
        numbers: list[str] = []
        for part in piece.split(",") if index % 2 else ():
            match = _RANGE.fullmatch(part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise UsageError(
                    f"{source}: a range must be ascending numbers such as 01-04,7, got "
                    f"{part!r} in {word!r}. Type it as in n[01-04,7]."
                )
            span = range(int(match[1]), int(match[2] or match[1]) + 1)
            _require_room(count * (len(numbers) + len(span)), word, source)
            numbers += [f"{number:0{len(match[1])}}" for number in span]
        count *= len(numbers) or 1
        choices.append(numbers or [piece])
    return ["".join(each) for each in product(*choices)]


def _require_room(count: int, word: str, source: str) -> None:
    if count > MAX_HOSTS:
        raise UsageError(
            f"{source}: a list must name at most {MAX_HOSTS} hosts, got {word!r}, "
            f"which names {count}. Shorten its ranges."
        )
