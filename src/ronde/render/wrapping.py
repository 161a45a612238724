"""Sentences and lists within the columns of a terminal."""

import textwrap
from collections.abc import Sequence

WIDTH = 80


def wrap(label: str, text: str, width: int = WIDTH, *, indent: int = 7) -> str:
    """Return a label and a text in lines of at most some columns.

    Args:
        label: Stands before the first line, with its own blanks.
        text: A name in it that is longer than a line stays whole.
        width: Columns.
        indent: Of the lines after the first.
    """
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines or [label.rstrip()]) + "\n"


def list_some(names: Sequence[str], most: int = 8, noun: str = "times") -> str:
    """Return names, counted where there are several; the end of many is counted only.

    Args:
        names: ``a``, ``b``.
        most: How many to name.
        noun: What they are counted as.
    """
    if len(names) == 1:
        return names[0]
    left = len(names) - most
    more = f" and {left} more" if left > 0 else ""
    return f"{len(names)} {noun}: {', '.join(names[:most])}{more}"
