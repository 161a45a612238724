"""Harmful inputs: cut, scrambled, deep, long, or no text.

A reader gives a value or ``UsageError`` for each of them.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.errors import UsageError

MEGABYTE = 1 << 20


class Hostile(NamedTuple):
    """An input and its defect."""

    title: str
    data: bytes


def cut(data: bytes, num_cuts: int = 40) -> Iterator[Hostile]:
    """Yield the beginnings of a file that arrived in part."""
    step = max(1, len(data) // num_cuts)
    for end in range(0, len(data), step):
        yield Hostile(f"cut at byte {end}", data[:end])


def scrambled(data: bytes, num_ways: int = 10) -> Iterator[Hostile]:
    """Yield a file with its lines in other orders, and with single bytes changed."""
    for seed in range(num_ways):
        chance = random.Random(seed)
        lines = data.splitlines(keepends=True)
        chance.shuffle(lines)
        yield Hostile(f"lines shuffled by {seed}", b"".join(lines))
        changed = bytearray(data)
        for _ in range(5):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield Hostile(f"bytes changed by {seed}", bytes(changed))


def recoded(data: bytes) -> Iterator[Hostile]:
    """Yield a file in encodings that it does not declare."""
    text = data.decode(errors="replace")
    yield Hostile("UTF-16", text.encode("utf-16"))
    yield Hostile("UTF-32", text.encode("utf-32"))
    yield Hostile("UTF-8 with a byte order mark", text.encode("utf-8-sig"))
    yield Hostile("an unknown encoding", b'<?xml version="1.0" encoding="x-y"?>' + data)
    yield Hostile("NULs between", b"\0".join(data[n : n + 1] for n in range(len(data))))
    yield Hostile("no UTF-8", b"\xff\xfe\xfa" + data)


def bad_inputs(
    good: bytes, root: str = "system", tag: str = "pci"
) -> Iterator[Hostile]:
    """Yield inputs made from a good file; ``tag`` may be inside itself in XML."""
    bomb = "".join(
        f'<!ENTITY b{n} "{f"&b{n - 1};" * 10 if n else "bomb"}">' for n in range(10)
    )
    opened, closed = f"<{tag}>", f"</{tag}>"
    depth = 10 * MEGABYTE // len(opened + closed)
    many = '<cpu numaid="0"/>' * 100_000
    xml = {
        "an entity bomb": f"<!DOCTYPE {root} [{bomb}]><{root}>&b9;</{root}>",
        "an external entity": (
            f'<!DOCTYPE {root} [<!ENTITY x SYSTEM "file:///etc/hostname">]>'
            f"<{root}>&x;</{root}>"
        ),
        "an external definition": (
            f'<!DOCTYPE {root} SYSTEM "file:///nowhere/{root}.dtd"><{root}/>'
        ),
        "10 MB of nesting": f"<{root}>{opened * depth}{closed * depth}</{root}>",
        "very many elements": f"<{root}>{many}</{root}>",
        "10 MB of one attribute": (
            f'<{root}><cpu numaid="0" affinity="{"f" * 10 * MEGABYTE}"/></{root}>'
        ),
    }
    yield Hostile("empty", b"")
    yield Hostile("blanks", b" \n\t\n" * 1000)
    yield Hostile("one long line", b"x" * (10 * MEGABYTE))
    yield Hostile("many lines", b"0\n" * (2 * MEGABYTE))
    for title, text in xml.items():
        yield Hostile(title, text.encode())
    yield Hostile("nested lists", b"[" * (5 * MEGABYTE) + b"]" * (5 * MEGABYTE))
    yield Hostile("noise", random.Random(6).randbytes(MEGABYTE))
    yield from cut(good)
    yield from scrambled(good)
    yield from recoded(good)


def check_harmless(read: Callable[[bytes], object], inputs: Iterator[Hostile]) -> int:
    """Check that a reader only raises ``UsageError``; return how often it does."""
    num_refused = 0
    for title, data in inputs:
        message = _refusal(read, data, title)
        assert len(message) < 1000, f"{title}: the message is too long"
        num_refused += bool(message)
    return num_refused


def _refusal(read: Callable[[bytes], object], data: bytes, title: str) -> str:
    try:
        read(data)
    except UsageError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{title} led to {error!r}") from error
    return ""
