"""Files of NCCL's log -> what they say.

They are read in pieces, so that a log of any size takes bounded memory.
"""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from ronde.topology.nccl_log.collector import Collector
from ronde.topology.nccl_log.hosts import mend_hosts
from ronde.topology.nccl_log.jobs import make_jobs
from ronde.topology.nccl_log.log import NcclLog
from ronde.topology.nccl_log.messages import MAX_LINE_CHARS, MessageReader
from ronde.topology.nccl_log.packed import read_pieces


def read_nccl_log(files: Iterable[BinaryIO]) -> NcclLog:
    """Return what one log says that lies in one file or in several.

    Args:
        files: Open, each read once from where it stands to its end. What gzip
            packed is unpacked.

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
