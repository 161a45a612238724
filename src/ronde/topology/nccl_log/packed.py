"""Files as they lie there -> pieces of text, unpacked where they are gzip's."""

import zlib
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from ronde.errors import UsageError

_PIECE_BYTES = 1 << 20
_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces of about a megabyte.

    Raises:
        OSError: It cannot be read.
        UsageError: It is packed, and damaged or cut.
    """
    pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
    first = next(pieces, b"")
    whole = chain([first], pieces)
    return _unpack(whole) if first.startswith(_MAGIC) else whole


def _unpack(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what gzip packed; one after another where several lie in a file."""
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    try:
        for piece in pieces:
            rest = piece
            while rest:
                if unpacker.eof:
                    unpacker = zlib.decompressobj(_GZIP_WINDOW)
                yield unpacker.decompress(rest, _PIECE_BYTES)
                rest = unpacker.unconsumed_tail
                if unpacker.eof:
                    # Zeros fill up what is written in blocks.
                    rest = unpacker.unused_data.lstrip(b"\0")
        yield unpacker.flush()
    except zlib.error as error:
        raise _damaged(str(error)) from None
    if not unpacker.eof:
        raise _damaged("it was cut")


def _damaged(how: str) -> UsageError:
    return UsageError(
        f"a packed log must be whole gzip data, got an error: {how}. Unpack what there "
        "is, and give that: zcat FILE > nccl.log"
    )
