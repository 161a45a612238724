"""The state of the store, and the frames of its requests and replies.

A frame is a 4-byte length (big endian), a byte for its kind, and fields; the length
does not include its own bytes. A field is a 4-byte length and its bytes. Every length
is checked before data of that size is received. Nothing is evaluated or unpickled.
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import Generic, NamedTuple, TypeVar

from ronde.errors import StoreError

MAX_FRAME_BYTES = 16 << 20  # longest frame, its length field not counted
_MAX_FIELDS = 1 << 17
_LENGTH = Struct(">I")
_ENTRY_BYTES = 200  # overhead of an entry
C = TypeVar("C", bound=Hashable)


class Op(IntEnum):
    """Kinds of requests; the comments show the fields of request -> answer."""

    SET = 1  # key, value, key, value, ... -> none
    GET = 2  # keys -> their values, once all keys exist
    WAIT = 3  # keys -> none, once all keys exist
    CHECK = 4  # keys -> b"1" if all keys exist
    ADD = 5  # key, decimal number -> the sum
    COMPARE_SET = 6  # key, expected value, new value -> the value afterwards
    DELETE = 7  # key -> b"1" if it existed
    APPEND = 8  # key, bytes to append -> none
    COUNT = 9  # none -> the number of keys


class Status(IntEnum):
    """Kinds of replies; the comments show their fields."""

    DONE = 0  # with the fields of the answer
    REFUSED = 1  # with one field, the reason as a sentence


class Frame(NamedTuple):
    """A request or a reply."""

    kind: int  # an ``Op`` or a ``Status``
    fields: tuple[bytes, ...]


class Limits(NamedTuple):
    """Limits on the size of the store's content."""

    key_bytes: int = 4096
    value_bytes: int = 8 << 20
    total_bytes: int = 512 << 20  # of all keys and values


def max_connections(num_ranks: int) -> int:
    return 16 + 16 * num_ranks


def encode(kind: int, fields: Sequence[bytes]) -> bytes:
    length = 1 + sum(_LENGTH.size + len(field) for field in fields)
    if length > MAX_FRAME_BYTES or len(fields) > _MAX_FIELDS:
        raise StoreError(
            f"a request to the store and its reply must have at most {MAX_FRAME_BYTES} "
            f"bytes and {_MAX_FIELDS} fields, got {length} and {len(fields)}. Use more "
            "and smaller requests."
        )
    parts = [_LENGTH.pack(length), bytes((kind,))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    return b"".join(parts)


def decode(body: bytes) -> Frame:
    fields: list[bytes] = []
    at, end = 1, len(body)
    while at + _LENGTH.size <= end and len(fields) < _MAX_FIELDS:
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        fields.append(body[at - length : at])
    if not body or at != end:
        raise StoreError("received an incomplete frame on a connection to the store.")
    return Frame(body[0], tuple(fields))


class Splitter:
    """Split received bytes into the bodies of frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._received += data
        bodies: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if not 1 <= length <= self._max_bytes:
                limit = self._max_bytes
                raise StoreError(f"frame length must be in 1..{limit}, got {length}.")
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            bodies.append(bytes(memoryview(self._received)[start + 4 : end]))
            start = end
        del self._received[:start]
        return bodies


class StoreState(Generic[C]):
    """The keys, values and waiting clients of the store.

    A client has at most one pending request, and cancels it by disconnecting.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[C, tuple[Frame, set[bytes]]] = {}  # with missing keys
        self._by_key: dict[bytes, dict[C, None]] = {}

    def handle(self, client: C, body: bytes) -> list[tuple[C, bytes]]:
        """Handle a request; return the replies that are due now, by client."""
        request = decode(body)
        if client in self._waiting:
            raise StoreError("a client sent a second request before its first reply.")
        if request.kind in (Op.GET, Op.WAIT) and request.fields:
            return self._answer_or_wait(client, request)
        try:
            answer, changed = self._carry_out(*request)
            ready = self._put(changed)
        except _RefusedError as error:
            return [(client, encode(Status.REFUSED, [str(error).encode()]))]
        replies = [(client, encode(Status.DONE, answer))]
        return replies + [r for each in ready for r in self._answer_or_wait(*each)]

    def forget(self, client: C) -> None:
        _, missing = self._waiting.pop(client, (None, ()))
        for key in missing:
            self._by_key[key].pop(client)
            if not self._by_key[key]:
                del self._by_key[key]

    def clear(self) -> list[tuple[C, bytes]]:
        """Delete all keys; return the waiting clients, with error replies."""
        reason = b"the store was cleared while this request waited for a key"
        reply = encode(Status.REFUSED, [reason])
        refused = [(client, reply) for client in self._waiting]
        for kept in (self._values, self._waiting, self._by_key):
            kept.clear()
        self._num_bytes = 0
        return refused

    def _carry_out(
        self, kind: int, fields: Sequence[bytes]
    ) -> tuple[Sequence[bytes], Sequence[tuple[bytes, bytes]]]:
        """Return the answer to a request that never waits, and the values to set."""
        values = self._values
        answer, changed = (), ()
        match kind, fields:
            case Op.SET, (_, _, *_) if not len(fields) % 2:
                changed = list(zip(fields[::2], fields[1::2], strict=True))
            case Op.CHECK, keys:
                answer = (b"%d" % all(key in values for key in keys),)
            case Op.COUNT, ():
                answer = (b"%d" % len(values),)
            case Op.DELETE, (key,):
                answer = (b"%d" % (key in values),)
                self._num_bytes -= _size(key, values.pop(key, None))
            case Op.ADD, (key, amount):
                total = _integer(values.get(key) or b"0") + _integer(amount)
                answer = (b"%d" % total,)
                changed = ((key, answer[0]),)
            case Op.APPEND, (key, more):
                changed = ((key, values.get(key, b"") + more),)
            case Op.COMPARE_SET, (key, expected, new):
                # As TCPStore: a key that is not there equals the empty value.
                is_met = values.get(key, b"") == expected
                answer = (new if is_met else values.get(key, expected),)
                changed = ((key, new),) if is_met else ()
            case _:
                raise StoreError(
                    f"unknown request: kind {kind} with {len(fields)} fields."
                )
        return answer, changed

    def _put(self, pairs: Sequence[tuple[bytes, bytes]]) -> list[tuple[C, Frame]]:
        """Set values; return the waiting requests that are complete now."""
        limits, grown = self._limits, 0
        for key, value in pairs:
            if len(key) > limits.key_bytes or len(value) > limits.value_bytes:
                raise _RefusedError(
                    f"key and value must be at most {limits.key_bytes} and "
                    f"{limits.value_bytes} bytes long, got {len(key)} and "
                    f"{len(value)} for {_shown(key)}"
                )
            grown += _size(key, value) - _size(key, self._values.get(key))
        if grown > 0 and self._num_bytes + grown > limits.total_bytes:
            raise _RefusedError(
                f"the store is full: it holds at most {limits.total_bytes} bytes, but "
                f"would have {self._num_bytes + grown} with {_shown(pairs[0][0])}"
            )
        ready: list[tuple[C, Frame]] = []
        for key, value in pairs:
            self._num_bytes += _size(key, value) - _size(key, self._values.get(key))
            self._values[key] = value
            for client in self._by_key.pop(key, ()):
                request, missing = self._waiting[client]
                missing.discard(key)
                if not missing:
                    del self._waiting[client]
                    ready.append((client, request))
        return ready

    def _answer_or_wait(self, client: C, request: Frame) -> list[tuple[C, bytes]]:
        keys = request.fields
        missing = {key for key in keys if key not in self._values}
        if missing:
            self._waiting[client] = request, missing
            for key in missing:
                self._by_key.setdefault(key, {})[client] = None
            return []
        is_get = request.kind == Op.GET
        try:
            found = [self._values[key] for key in keys] if is_get else ()
            return [(client, encode(Status.DONE, found))]
        except StoreError as error:  # the reply is too long
            return [(client, encode(Status.REFUSED, [str(error).encode()]))]


class _RefusedError(Exception):
    """Raised for a well-formed request that the store refuses."""


def _size(key: bytes, value: bytes | None) -> int:
    return 0 if value is None else len(key) + len(value) + _ENTRY_BYTES


def _integer(text: bytes) -> int:
    with suppress(ValueError):
        if len(text) <= 20:
            return int(text)
    raise _RefusedError(f"only numbers can be added, got {text[:20]!r}")


def _shown(key: bytes) -> str:
    return repr(key[:80].decode(errors="replace"))
