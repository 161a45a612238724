"""Readers and summaries of timelines."""

import gzip
import json

import pytest
from hypothesis import given, strategies as st
from tests.unit.timeline_samples import bound, encode, record, records, track

from ronde.errors import UsageError
from ronde.render import draw_trace
from ronde.timeline import write_trace
from ronde.trace import covered, read_part_files, read_trace, summarize, trace_of

LIMIT = 1 << 30

# What Horovod's rank 0 wrote of one tensor that was negotiated twice: with the ranks'
# marks, and from its cache, without.
HOROVOD = [
    {"name": "process_name", "ph": "M", "pid": 0,
     "args": {"start_time_since_epoch_in_micros": 1795265174153301}},
    {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.a"}},
    {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 3514, "pid": 1},
    {"ph": "X", "name": "0", "ts": 3515, "pid": 1, "dur": 0},
    {"ph": "X", "name": "1", "ts": 3646, "pid": 1, "dur": 0},
    {"ph": "E", "ts": 3646, "pid": 1},
    {"ph": "B", "name": "ALLREDUCE", "ts": 3770, "pid": 1},
    {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 3835, "pid": 1},
    {"ph": "E", "ts": 3975, "pid": 1},
    {"ph": "E", "ts": 3984, "pid": 1, "args": {"dtype": "float32", "shape": "[4]"}},
    {"ph": "i", "name": "CYCLE_START", "ts": 4385, "s": "g"},
    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5000, "pid": 1},
    {"ph": "E", "ts": 5100, "pid": 1},
    {"ph": "B", "name": "ALLREDUCE", "ts": 5100, "pid": 1},
    {"ph": "E", "ts": 5200, "pid": 1, "args": {"dtype": "float32", "shape": "[4]"}},
]  # fmt: skip


def write_part(directory, name, *operations, **head):
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.ronde-part"
    path.write_bytes(gzip.compress(encode(*operations, **head)))
    return path


def late_job(lateness_us=5000, num_steps=10):
    """Return two ranks, the second always late, as tracks."""
    late, step = lateness_us * 1000, 20_000_000
    tracks = []
    for rank in range(2):
        own = [
            record("allreduce.x", number, at + rank * late, at + late, at + late, end)
            for number in range(num_steps)
            for at in [number * step]
            for end in [at + late + 1_000_000]
        ]
        tracks.append(track(rank, own))
    return tracks


@given(st.lists(records(), min_size=1, max_size=3), st.booleans())
def test_a_merged_trace_says_the_same_as_its_parts(tmp_path_factory, ranks, is_packed):
    path = tmp_path_factory.mktemp("trace") / ("t.json.gz" if is_packed else "t.json")
    tracks = [track(rank, own) for rank, own in enumerate(ranks)]
    write_trace(path, tracks, limit_bytes=LIMIT)
    of_file, of_parts = read_trace(path), trace_of(tracks)
    assert len(of_file.ranks) == len(of_parts.ranks)
    # Times count from the first event, and activities are for the eye alone.
    begins = [
        min(each.submitted_ns or each.begun_ns, each.begun_ns)
        for own in ranks
        for each in own
    ]
    start = min(begins, default=0)
    for one, other in zip(of_file.ranks, of_parts.ranks, strict=True):
        assert sorted(one.operations) == sorted(
            (
                key,
                each._replace(
                    submitted_ns=each.submitted_ns and (each.submitted_ns - start or 1),
                    agreed_ns=each.agreed_ns and (each.agreed_ns - start or 1),
                    begun_ns=each.begun_ns - start,
                    ended_ns=each.ended_ns - start,
                    activities=(),
                ),
            )
            for key, each in other.operations
        )


def test_a_summary_says_who_waited_for_whom():
    summary = summarize(trace_of(late_job()))
    waited, late = summary.ranks
    assert (waited.waiting_s, late.waiting_s) == pytest.approx((0.05, 0))
    assert (waited.num_late, late.num_late) == (0, 10)
    assert (waited.held_up_s, late.held_up_s) == pytest.approx((0, 0.05))
    (tensor,) = summary.tensors
    assert (tensor.name, tensor.late_ranks) == ("allreduce.x", [(1, 10)])
    assert tensor.waiting_s == pytest.approx(0.05)
    assert tensor.longest_s == pytest.approx(0.005)
    text = draw_trace("t.json", summary, 10)
    assert "t.json: 2 ranks on 1 host, 186ms, 10 operations." in text
    assert "All ranks read one clock." in text
    assert "allreduce.x: 50ms in 10 operations, 5ms at worst; for rank 1 (10" in text


def test_who_came_late_is_not_told_beyond_the_clocks_error():
    job = late_job(lateness_us=50)
    off = track(1, job[1].operations, clock="b", bounds=[bound(0, -60_000, 60_000)])
    summary = summarize(trace_of([job[0], off]))
    assert (summary.num_unclear, summary.ranks[1].num_late) == (10, 0)
    text = draw_trace("t", summary, 10)
    assert "it is unknown which rank came last" in text
    assert "within 78.1us of rank 0's; rank 1's is the least certain" in text
    unmeasured = trace_of([job[0], track(1, job[1].operations, clock="b")])
    text = draw_trace("t", summarize(unmeasured), 10)
    assert "The clocks of rank 1 were not measured" in text
    assert "for rank 1" not in text


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)))
def test_what_intervals_cover(intervals):
    points = {at for first, last in intervals for at in range(first, last)}
    assert covered((first, last) for first, last in intervals) == len(points)


def test_fusion_counts_batches_and_buckets():
    batch = [record(f"x{i}", i)._replace(num_fused=4) for i in range(4)]
    bucket = [record("g", 4, agreed=None)._replace(num_fused=8, shape=(100,))]
    fusion = summarize(trace_of([track(0, batch + bucket)])).fusion
    assert (fusion.num_tensors, fusion.num_batches, fusion.max_tensors) == (12, 2, 8)
    assert fusion.mean_bytes == (4 * 6 * 4 + 400) / 2


def test_what_is_missing_is_said(tmp_path):
    job = late_job()
    job[0].num_dropped, job[0].is_whole, job[0].header = 7, False, job[0].header
    text = draw_trace("t", summarize(trace_of(job[:1])), 10)
    assert "7 records are missing, the oldest" in text
    assert "did not end in order on rank 0" in text
    assert "There are no records of rank 1." in text
    empty = draw_trace("t", summarize(trace_of([track(0, [])])), 10)
    assert empty.startswith("t: no operation was recorded.\n")


def test_sessions_of_one_rank_are_put_together(tmp_path):
    for session in range(2):
        for rank in range(2):
            head = {"rank": rank, "session": session}
            write_part(tmp_path, f"{rank}.{session}", record(submitted=rank), **head)
    trace = read_trace(tmp_path)
    assert [len(rank.operations) for rank in trace.ranks] == [2, 2]
    assert len(trace.arrivals) == 2
    path = tmp_path / "t.json.gz"
    write_trace(path, read_part_files([tmp_path]), limit_bytes=LIMIT)
    again = read_trace(path)
    assert [len(rank.operations) for rank in again.ranks] == [2, 2]
    assert len(again.arrivals) == 2


@pytest.mark.parametrize("ending", ["]", "", ",\n"])
def test_what_horovod_wrote_is_read_as_far_as_it_goes(tmp_path, ending):
    path = tmp_path / "horovod.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, HOROVOD)) + ending)
    summary = summarize(read_trace(path))
    assert summary.num_operations == 2
    (rank,) = summary.ranks
    assert rank.waiting_s == pytest.approx(131e-6)
    assert rank.moving_s == pytest.approx(314e-6)
    (tensor,) = summary.tensors
    assert (tensor.name, tensor.late_ranks) == ("allreduce.a", [(1, 1)])
    text = draw_trace("h", summary, 10)
    assert "the timeline of rank 0 alone" in text
    assert "which rank came last for 1 of 2 operations" in text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "no names of tensors or ranks"),
        (b'{"traceEvents": []}', "but not a timeline of"),
        (gzip.compress(b"hello", mtime=0)[:-9], "cannot read the timeline"),
        (b'{"displayTimeUnit": "ms",\n"otherData": {"ronde_timeline": 99},\n', "99"),
        (b'{"displayTimeUnit": "ms",\n"otherData": {"x',  "is not valid JSON"),
        (b'[{"ph": "B", "pid": 1}, 4]', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
    ],
)  # fmt: skip
def test_what_is_no_timeline_is_refused(tmp_path, content, why):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read the timeline"):
        read_trace(tmp_path / "no.json")
    with pytest.raises(UsageError, match="found no timeline parts"):
        read_trace(tmp_path)
    write_trace(tmp_path / "t.json", late_job(), limit_bytes=LIMIT)
    with pytest.raises(UsageError, match="cannot be merged again"):
        read_part_files([tmp_path / "t.json"])
