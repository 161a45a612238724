"""Alignment of ranks to one clock, late ranks, lanes, and the merged file."""

import gzip
import json

import pytest
from hypothesis import given, strategies as st
from tests.unit.timeline_samples import (
    BASE_NS,
    bound,
    check_events,
    read_events,
    record,
    records,
    track,
)

from ronde.errors import UsageError
from ronde.timeline import (
    ClockBound,
    ClockMap,
    ClockReading,
    align,
    bound_offset,
    find_arrivals,
    waited_ns,
    write_trace,
)

LIMIT = 1 << 30
DELAYS = st.lists(
    st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20
)


@given(st.integers(-(10**12), 10**12), DELAYS)
def test_exchanges_hold_the_true_offset_between_them(offset, delays):
    now, exchanges = BASE_NS, []
    for there, back in delays:
        exchanges.append(ClockReading(now, now + there + offset, now + there + back))
        now += there + back + 1
    found = bound_offset(exchanges)
    assert found.low_ns <= offset <= found.high_ns
    assert found.high_ns - found.low_ns <= min(map(sum, delays)) + 4000


@given(
    st.integers(-(10**9), 10**9),
    st.floats(-1e-4, 1e-4),
    st.integers(0, 10**5),
    st.integers(1, 3600 * 10**9),
    st.floats(-0.5, 1.5),
)
def test_a_line_between_two_measurements_is_true_within_its_error(
    offset, drift, error, span, where
):
    def true_offset(at_ns):
        return offset + round(drift * (at_ns - BASE_NS))

    clock = ClockMap.of_bounds(
        [
            ClockBound(at, true_offset(at) - error, true_offset(at) + error)
            for at in (BASE_NS + span, BASE_NS)
        ]
    )
    at_ns = BASE_NS + round(where * span)
    assert abs(clock.offset_ns(at_ns) - true_offset(at_ns)) <= (
        clock.error_ns(at_ns) + 2
    )
    assert clock.error_ns(at_ns) >= error


def test_hosts_that_nobody_compared_are_put_together_by_their_time_of_day():
    other = track(1, [record()], clock="b")
    first = track(0, [record()])
    tracks = align([first, other])
    assert [each.clock.is_measured for each in tracks] == [True, False]
    assert tracks[1].keyed[0][1] == record()


def test_ranks_of_one_host_share_what_one_of_them_measured():
    tracks = [
        track(0, [record()]),
        track(1, [record()], clock="b", bounds=[bound(0, 990, 1010)]),
        track(2, [record()], clock="b"),
    ]
    begun = [each.keyed[0][1].begun_ns for each in align(tracks)]
    assert begun == [BASE_NS + 20, BASE_NS + 1020, BASE_NS + 1020]


@given(
    st.lists(
        st.tuples(st.integers(-(10**9), 10**9), st.integers(0, 10**6)),
        min_size=2,
        max_size=6,
    )
)
def test_the_late_rank_is_right_whatever_the_offsets(ranks):
    """Each rank's clock is off by its offset; rank r submits at its true time."""
    tracks = []
    for rank, (drawn, at) in enumerate(ranks):
        offset = drawn if rank else 0
        own = record(submitted=at - offset, agreed=None, begun=at - offset, ended=2**21)
        bounds = [bound(0, offset, offset)] if rank else []
        tracks.append(track(rank, [own], clock=str(rank), bounds=bounds))
    aligned = align(tracks)
    ((_, arrival),) = find_arrivals((t.rank, t.keyed) for t in aligned).items()
    times = [at for _, at in ranks]
    assert arrival.late_ns == BASE_NS + max(times)
    assert arrival.late_rank == times.index(max(times))
    assert arrival.margin_ns == max(times) - sorted(times)[-2]
    assert arrival.early_ns == BASE_NS + min(times)


def test_a_joined_rank_is_never_late():
    tracks = align(
        [
            track(0, [record(submitted=5)]),
            track(1, [record(submitted=9)]),
            track(2, [record(submitted=None)]),
        ]
    )
    arrivals = find_arrivals((t.rank, t.keyed) for t in tracks)
    ((_, arrival),) = arrivals.items()
    assert (arrival.late_rank, arrival.early_ns) == (1, BASE_NS + 5)
    assert waited_ns(record(submitted=5), arrival) == 4
    assert waited_ns(record(submitted=None), arrival) == 0


def test_what_cannot_be_written_is_refused(tmp_path):
    tracks = [track(0, [record()])]
    with pytest.raises(UsageError, match="too small even for the names"):
        write_trace(tmp_path / "t.json", tracks, limit_bytes=10)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="cannot write the timeline"):
        write_trace(tmp_path / "no" / "t.json", tracks, limit_bytes=LIMIT)


@given(st.lists(records(), min_size=1, max_size=3), st.integers(-(10**6), 10**6))
def test_a_merged_trace_is_in_order_and_nested_and_complete(
    tmp_path_factory, ranks, offset
):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    bounds = [bound(0, offset - 10, offset + 10)]
    tracks = [track(rank, own, clock="a") for rank, own in enumerate(ranks)]
    tracks[-1] = track(len(ranks) - 1, ranks[-1], clock="b", bounds=bounds)
    assert write_trace(path, tracks, limit_bytes=LIMIT) == 0
    events = read_events(path.read_text())
    spans = check_events(events)
    for rank, own in enumerate(ranks):
        mine = [e for e in spans if e["pid"] == rank and "fused" in e.get("args", {})]
        assert len(mine) == len(own)
        lengths = sorted(each.ended_ns - each.begun_ns for each in own)
        assert sorted(round(e["dur"] * 1000) for e in mine) == lengths


def test_a_negotiation_shows_who_came_late(tmp_path):
    path = tmp_path / "trace.json"
    tracks = [
        track(0, [record(submitted=0, agreed=5000, begun=6000, ended=9000)]),
        track(1, [record(submitted=4000, agreed=5000, begun=6000, ended=9000)]),
    ]
    write_trace(path, tracks, limit_bytes=LIMIT)
    spans = check_events(read_events(path.read_text()))
    words = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans]
    assert words == [
        (0, "NEGOTIATE_ALLREDUCE", 0.0, 5.0),
        (1, "NEGOTIATE_ALLREDUCE", 4.0, 1.0),
        (0, "1", 4.0, 0.0),
        (1, "1", 4.0, 0.0),
        (0, "ALLREDUCE", 6.0, 3.0),
        (1, "ALLREDUCE", 6.0, 3.0),
    ]
    late = {"late_rank": 1, "waited_us": 4.0, "late_by_us": 4.0}
    assert spans[0]["args"] == {"tensor": "allreduce.x"} | late


def test_the_head_says_how_sure_the_clocks_are(tmp_path):
    path = tmp_path / "trace.json.gz"
    tracks = [
        track(0, [record()]),
        track(1, [record()], clock="b", bounds=[bound(0, 900_000, 1_100_000)]),
    ]
    write_trace(path, tracks, limit_bytes=LIMIT, remarks=["So it is."])
    facts = json.loads(gzip.decompress(path.read_bytes()))["otherData"]
    assert facts["remarks"] == ["So it is."]
    assert [each["clock_error_us"] for each in facts["ranks"]] == [0.0, 100.0]
    assert [each["clock_offset_us"] for each in facts["ranks"]] == [0.0, 1000.0]


@pytest.mark.parametrize(
    ("name", "limit"), [("trace.json", 64 << 10), ("trace.json.gz", 16 << 10)]
)
def test_a_limit_is_kept_and_the_newest_stay(tmp_path, name, limit):
    many = [
        record(f"x{number}", number, number * 40, None, number * 40, number * 40 + 30)
        for number in range(5000)
    ]
    path = tmp_path / name
    left_out = write_trace(path, [track(0, many)], limit_bytes=limit)
    content = path.read_bytes()
    assert limit / 4 < len(content) <= limit
    text = gzip.decompress(content) if name.endswith(".gz") else content
    spans = check_events(read_events(text))
    assert spans[-1]["args"]["sequence"] == 4999
    assert 0 < left_out == 5000 - len(spans)
    facts = json.loads(text)["otherData"]
    assert facts["ranks"][0]["dropped"] == left_out
    assert list(tmp_path.iterdir()) == [path]
