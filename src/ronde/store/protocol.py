"""Requests to the store and its replies, as bytes.

A frame is a 4-byte length (big endian, of what follows), a byte that says what it is,
and fields, each a 4-byte length and its bytes. Every length is checked before anything
of that size is waited for, and nothing is evaluated or unpickled.
"""

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ronde.errors import StoreError

MAX_FRAME_BYTES = 16 << 20  # longest frame, its length field not counted
_MAX_FIELDS = 1 << 17
_LENGTH = Struct(">I")


class Op(IntEnum):
    """What a request asks for, with its fields."""

    SET = 1  # key, value, key, value,
    GET = 2  # keys; the values, once all are there
    WAIT = 3  # keys; nothing, once all are there
    CHECK = 4
    """keys; b"1" if all are there"""
    ADD = 5  # key, decimal number; the sum
    COMPARE_SET = 6  # key, expected value, new value; the value afterwards
    DELETE = 7
    """key; b"1" if it was there"""
    APPEND = 8  # key, what to put at the end of its value
    COUNT = 9  # nothing; the number of keys


class Status(IntEnum):
    """What a reply is."""

    DONE = 0  # its fields are the answer
    REFUSED = 1  # its field is a sentence that says why


class Frame(NamedTuple):
    """A request or a reply."""

    kind: int  # an ``Op`` or a ``Status``
    fields: tuple[bytes, ...]  # what belongs to it


def max_connections(num_ranks: int) -> int:
    """Return how many connections so many ranks may have at a time."""
    return 16 + 16 * num_ranks


def encode(kind: int, fields: Sequence[bytes]) -> bytes:
    """Return a frame with its length."""
    length = 1 + sum(_LENGTH.size + len(field) for field in fields)
    if length > MAX_FRAME_BYTES or len(fields) > _MAX_FIELDS:
        raise StoreError(
            f"a request to the store and its reply must be at most {MAX_FRAME_BYTES} "
            f"bytes and {_MAX_FIELDS} fields, got {length} and {len(fields)}. Ask for "
            "less at once."
        )
    parts = [_LENGTH.pack(length), bytes((kind,))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    return b"".join(parts)


def decode(body: bytes) -> Frame:
    """Return the frame that these bytes are, its length left out."""
    fields: list[bytes] = []
    at, end = 1, len(body)
    while at + _LENGTH.size <= end and len(fields) < _MAX_FIELDS:
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        fields.append(body[at - length : at])
    if not body or at != end:
        raise StoreError("a frame of the store must be made of whole fields.")
    return Frame(body[0], tuple(fields))


class Splitter:
    """Cuts received bytes, however they came, into the bodies of frames.

    Holds one frame at most, and of that no more than has come.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete now."""
        self._received += data
        bodies: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if not 1 <= length <= self._max_bytes:
                raise StoreError(
                    f"length of a frame of the store must be in 1..{self._max_bytes}, "
                    f"got {length}."
                )
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            bodies.append(bytes(memoryview(self._received)[start + 4 : end]))
            start = end
        del self._received[:start]
        return bodies
