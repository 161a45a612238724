"""Inputs that mean harm, or came to harm: cut, scrambled, deep, long, or no text.

A reader gives a value or ``UsageError`` for each of them, in about a second.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.errors import UsageError

MEGABYTE = 1 << 20

SECONDS = 15.0
"""What a reader may take of a processor's time; it should need one."""


class Hostile(NamedTuple):
    """An input and what is wrong with it."""

    title: str
    data: bytes


def entity_bomb(root: str = "system") -> bytes:
    """Return XML of a few hundred bytes whose entities stand for gigabytes."""
    levels = "".join(
        f'<!ENTITY b{n} "{f"&b{n - 1};" * 10 if n else "bomb"}">' for n in range(10)
    )
    return f'<!DOCTYPE {root} [{levels}]><{root} version="1">&b9;</{root}>'.encode()


def external_entity(root: str = "system") -> bytes:
    """Return XML that asks for a file of this machine to stand in it."""
    return (
        f'<!DOCTYPE {root} [<!ENTITY x SYSTEM "file:///etc/hostname">]>'
        f'<{root} version="1">&x;</{root}>'
    ).encode()


def external_definition(root: str = "system") -> bytes:
    """Return XML whose form is told by a file that is not there."""
    return (
        f'<!DOCTYPE {root} SYSTEM "file:///nowhere/{root}.dtd"><{root} version="1"/>'
    ).encode()


def nested(
    tag: str = "pci", root: str = "system", *, size_bytes: int = 10 * MEGABYTE
) -> bytes:
    """Return elements inside one another without end, all of them closed."""
    opened, closed = f"<{tag}>".encode(), f"</{tag}>".encode()
    depth = size_bytes // (len(opened) + len(closed))
    head = f'<{root} version="1">'.encode()
    return head + opened * depth + closed * depth + f"</{root}>".encode()


def many_elements(
    root: str = "system", tag: str = "cpu", *, num: int = 100_000
) -> bytes:
    """Return XML of very many elements beside one another."""
    body = f'<{tag} numaid="0"/>' * num
    return f'<{root} version="1">{body}</{root}>'.encode()


def nested_json(*, size_bytes: int = 10 * MEGABYTE) -> bytes:
    """Return lists of JSON inside one another without end."""
    return b"[" * (size_bytes // 2) + b"]" * (size_bytes // 2)


def long_attribute(
    root: str = "system",
    tag: str = "cpu",
    name: str = "affinity",
    *,
    size_bytes: int = 10 * MEGABYTE,
) -> bytes:
    """Return XML with one attribute of many digits."""
    digits = b"f" * size_bytes
    head = f'<{root} version="1"><{tag} numaid="0" {name}="'.encode()
    return head + digits + f'"/></{root}>'.encode()


def noise(size_bytes: int = MEGABYTE, seed: int = 6) -> bytes:
    """Return bytes that say nothing."""
    return random.Random(seed).randbytes(size_bytes)


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
    """Yield everything here, made of a good file of a form.

    Args:
        good: A file that the reader reads.
        root: Name of its outermost element, for forms that are XML.
        tag: Name of an element that may be inside itself.
    """
    yield Hostile("empty", b"")
    yield Hostile("blanks", b" \n\t\n" * 1000)
    yield Hostile("one long line", b"x" * (10 * MEGABYTE))
    yield Hostile("many lines", b"0\n" * (2 * MEGABYTE))
    yield Hostile("an entity bomb", entity_bomb(root))
    yield Hostile("an external entity", external_entity(root))
    yield Hostile("an external definition", external_definition(root))
    yield Hostile("10 MB of nesting", nested(tag, root))
    yield Hostile("very many elements", many_elements(root))
    yield Hostile("10 MB of nested lists", nested_json())
    yield Hostile("10 MB of one attribute", long_attribute(root))
    yield Hostile("noise", noise())
    yield from cut(good)
    yield from scrambled(good)
    yield from recoded(good)


def check_harmless(read: Callable[[bytes], object], inputs: Iterator[Hostile]) -> int:
    """Check that a reader gives a value or ``UsageError`` for inputs, and soon.

    Returns:
        How many were refused.
    """
    num_refused = 0
    for title, data in inputs:
        start = time.process_time()
        message = _refusal(read, data, title)
        took = time.process_time() - start
        assert took < SECONDS, f"{title} took {took:.1f} s"
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
