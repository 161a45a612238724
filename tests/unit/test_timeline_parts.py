"""What a rank records reaches its part whole, bounded, and readable after a crash."""

import gzip
import os
import threading
import zlib

import pytest
from hypothesis import given, strategies as st
from tests.limits import HANG_S
from tests.unit.timeline_samples import bound, encode, header, record, records

from ronde.errors import UsageError
from ronde.timeline import (
    MAX_WAITING,
    NUM_SEGMENTS,
    PartFiles,
    ThreadedRecorder,
    read_parts,
)


@given(records())
def test_what_is_encoded_is_read_back(operations):
    (track,) = read_parts([gzip.compress(encode(*operations))])
    assert track.operations == operations
    assert (track.header, track.num_dropped, track.is_whole) == (header(), 0, True)


@given(records(), st.data())
def test_a_part_that_was_cut_off_is_read_up_to_there(operations, data):
    lines = encode(*operations, ended=False)
    packer = zlib.compressobj(1, wbits=31)
    packed = packer.compress(lines) + packer.flush(zlib.Z_SYNC_FLUSH)
    cut = data.draw(st.integers(40, len(packed)))
    tracks = read_parts([packed[:cut]])
    for track in tracks:
        assert track.operations == operations[: len(track.operations)]
        assert not track.is_whole
    if cut == len(packed):
        assert tracks[0].operations == operations


def test_a_part_given_twice_is_refused():
    blob = gzip.compress(encode(record()))
    with pytest.raises(UsageError, match="records of rank 0 twice"):
        read_parts([blob, blob])


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"\x1f\x8bnothing", "cannot decompress"),
        (
            gzip.compress(b'{"ronde_timeline": 99, "rank": 0}\n'),
            "have version 99, but",
        ),
        (gzip.compress(encode() + b"[1, 2]\n"), "damaged"),
        (gzip.compress(encode() + b"nonsense\n"), "damaged"),
    ],
    # What is packed holds the time, and no test is called so twice.
    ids=["not packed", "other form", "no object", "nonsense"],
)
def test_what_is_no_part_is_refused(blob, why):
    with pytest.raises(UsageError, match=why):
        read_parts([blob])


def test_files_hold_what_was_taken_before_they_are_closed(tmp_path):
    files = PartFiles(tmp_path / "parts", header(), 1 << 20)
    files.add([record(sequence=number) for number in range(5)])
    (track,) = read_parts([files.read()])
    assert (len(track.operations), track.is_whole) == (5, False)
    files.close(num_lost=2)
    (track,) = read_parts([files.read()])
    assert (track.num_dropped, track.is_whole) == (2, True)
    files.remove()
    assert not (tmp_path / "parts").exists()


def test_files_stay_within_their_limit_and_count_what_went(tmp_path):
    limit = 16 << 10
    files = PartFiles(tmp_path, header(), limit)
    files.add_bound(bound(0, -5, 5))
    num_records = 20_000
    for first in range(0, num_records, 32):
        # Names that do not repeat are what packs worst.
        files.add(
            [
                record(f"x{os.urandom(8).hex()}", sequence=number)
                for number in range(first, min(first + 32, num_records))
            ]
        )
    sizes = [path.stat().st_size for path in files.paths]
    assert len(sizes) == NUM_SEGMENTS
    # One batch may pass it.
    assert limit / 2 < sum(sizes) < limit + (4 << 10)
    files.close(num_lost=0)
    (track,) = read_parts([files.read()])
    kept = [each.sequence for each in track.operations]
    assert kept == list(range(num_records - len(kept), num_records))
    assert track.num_dropped == num_records - len(kept) > 0
    assert track.bounds == [bound(0, -5, 5)]
    assert sorted(tmp_path.iterdir()) == sorted(files.paths)


class Memory:
    """Keeps what it is given."""

    def __init__(self):
        self.records, self.cycles, self.num_lost = [], [], None
        self.taken = threading.Event()

    def add(self, records, cycles=()):
        self.records += records
        self.cycles += cycles
        self.taken.set()

    def close(self, num_lost):
        self.num_lost = num_lost


def test_a_recorder_hands_everything_on_from_all_threads():
    sink = Memory()
    recorder = ThreadedRecorder([sink], gather_s=0.001, has_cycles=True)
    number_each = 2000

    def add(first):
        for number in range(first, first + number_each):
            recorder.operation(record(sequence=number))
            recorder.cycle(number)

    starts = [thread * number_each for thread in range(4)]
    threads = [threading.Thread(target=add, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert sorted(each.sequence for each in sink.records) == list(range(8000))
    assert sorted(sink.cycles) == list(range(8000))
    assert sink.num_lost == 0


def test_what_cannot_wait_is_counted():
    sink = Memory()
    recorder = ThreadedRecorder([sink], gather_s=60.0)
    for _ in range(MAX_WAITING + 7):
        recorder.operation(record())
    recorder.close()
    assert (len(sink.records), sink.num_lost) == (MAX_WAITING, 7)


def test_a_full_disk_ends_the_timeline_and_not_the_program(caplog):
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, PTH123

    class Full(Memory):
        def add(self, records, cycles=()):
            super().add(records, cycles)
            full.write(b"x")

    broken, sound = Full(), Memory()
    recorder = ThreadedRecorder([broken, sound], gather_s=0.001)
    recorder.operation(record())
    assert broken.taken.wait(HANG_S)
    assert sound.taken.wait(HANG_S)
    recorder.operation(record())
    recorder.close()
    full.close()
    assert (len(sound.records), sound.num_lost) == (2, 0)
    assert broken.num_lost is None
    assert "cannot write the timeline" in caplog.text
