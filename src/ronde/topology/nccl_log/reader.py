"""Files of NCCL's log -> what they say.

They are read in pieces, so that a log of any size takes bounded memory.
"""

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import BinaryIO

from ronde.errors import UsageError
from ronde.topology.nccl_log.collector import Collector
from ronde.topology.nccl_log.jobs import make_jobs, mend_hosts
from ronde.topology.nccl_log.log import NcclLog
from ronde.topology.nccl_log.messages import MAX_LINE_CHARS, MessageReader

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


def read_nccl_log(files: Iterable[BinaryIO]) -> NcclLog:
    """Return what one log says that lies in one file or in several.

    Raises:
        OSError: One cannot be read.
        UsageError: One is packed, and damaged.
    """
    collector = Collector()
    total = [0, 0, 0]
    for file in files:
        # Lines break inside each other within a file alone.
        reader = MessageReader()
        for line in _lines(file):
            for message in reader.feed(line):
                collector.take(message)
        reader.end()
        counts = (reader.num_lines, reader.num_mended, reader.num_lost)
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
    mend_hosts(collector.processes.values())
    jobs, num_jobs_left_out = make_jobs(collector)
    return NcclLog(
        jobs=jobs,
        loose_versions=tuple(collector.loose_versions),
        num_lines=total[0],
        num_messages=collector.num_messages,
        num_mended=total[1],
        num_lost=total[2],
        num_left_out=collector.num_left_out
        + collector.starts.num_left_out
        + num_jobs_left_out,
    )


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield lines without their ends; of one without end the beginning alone."""
    rest = ""
    for piece in read_pieces(file):
        # What is no UTF-8, or is cut by a piece's end, stands as replacement
        # characters: no field of NCCL's that is read here holds any.
        first, *others = piece.decode(errors="replace").split("\n")
        if not others:
            rest = (rest + first)[:MAX_LINE_CHARS]
            continue
        yield rest + first
        *lines, rest = others
        yield from lines
    if rest:
        yield rest
