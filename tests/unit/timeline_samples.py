"""Records to test timelines with, and a checker of Chrome's trace format."""

import itertools
import json

from hypothesis import strategies as st

from ronde.timeline import (
    Activity,
    ClockBound,
    Encoder,
    PartHeader,
    Recorded,
    Track,
    encode_line,
)

BASE_NS = 10**13
"""An uptime of some hours."""


def header(rank=0, size=2, clock="a", **more):
    return PartHeader(rank, size, f"host-{clock}", clock, 1_700_000 * 10**9, **more)


def record(name="allreduce.x", sequence=0, submitted=0, agreed=10, begun=20, ended=30):
    """Return an operation; times count from ``BASE_NS``, None is never."""
    times = [0 if at is None else BASE_NS + at for at in (submitted, agreed)]
    return Recorded(
        set_id=0,
        sequence=sequence,
        name=name,
        kind="ALLREDUCE",
        submitted_ns=times[0],
        agreed_ns=times[1],
        begun_ns=BASE_NS + begun,
        ended_ns=BASE_NS + ended,
        dtype="float32",
        shape=(2, 3),
        num_fused=1,
    )


def track(rank, operations, clock="a", bounds=(), **more):
    return Track(
        header(rank, clock=clock),
        list(operations),
        bounds=list(bounds),
        is_whole=True,
        **more,
    )


def bound(at, low, high):
    return ClockBound(BASE_NS + at, low, high)


def encode(*records, ended=True, **head):
    """Return the lines of a segment."""
    encoder = Encoder(header(**head))
    lines = encoder.head + encoder.operations(records)
    return lines + encode_line(["e", len(records), 0]) if ended else lines


@st.composite
def records(draw, max_size=12):
    """Draw operations of one rank, with activities that need not be nested."""
    count = draw(st.integers(0, max_size))
    return [_drawn(draw, sequence) for sequence in range(count)]


def _drawn(draw, sequence):
    lengths = st.integers(0, 50_000)
    at = BASE_NS + draw(st.integers(0, 200_000))
    times = list(itertools.accumulate([draw(lengths) for _ in range(3)], initial=at))
    submitted, agreed, begun, ended = times
    is_joined, is_bucket = draw(st.booleans()), draw(st.booleans())
    points = st.integers(begun - 5, ended + 5)
    pairs = draw(st.lists(st.tuples(points, points), max_size=4))
    return Recorded(
        set_id=draw(st.integers(0, 2)),
        sequence=sequence,
        name=draw(st.sampled_from(["allreduce.x", "allgather.ü", 'odd"\\\n'])),
        kind=draw(st.sampled_from(["ALLREDUCE", "ALLGATHER", "BARRIER"])),
        submitted_ns=0 if is_joined else submitted,
        agreed_ns=0 if is_bucket else agreed,
        begun_ns=begun,
        ended_ns=ended,
        dtype=draw(st.sampled_from(["float32", ""])),
        shape=draw(st.sampled_from([(), (4,), (2, 3)])),
        num_fused=draw(st.integers(1, 4)),
        activities=tuple(
            Activity("MEMCPY_IN_FUSION_BUFFER", min(pair), max(pair)) for pair in pairs
        ),
    )


def check_events(events):
    """Assert that events have Chrome's trace format, and return those with a length.

    Every event has a name (but for ends), a phase, a place and a time; times ascend;
    whatever begins ends on its own lane; what overlaps on a lane is nested.
    """
    open_spans, last_ts = {}, 0.0
    for event in events:
        assert event["ph"] in "BEXiM", event
        assert "pid" in event
        if event["ph"] == "M":
            assert event["name"] in {
                *("process_name", "process_sort_index"),
                *("thread_name", "thread_sort_index"),
            }
            assert event["args"]
            continue
        assert event["ts"] >= last_ts, event
        last_ts = event["ts"]
        lane = open_spans.setdefault((event["pid"], event.get("tid")), [])
        check_event(event, lane)
    assert not any(end is None for lane in open_spans.values() for end in lane)
    return [event for event in events if event["ph"] == "X"]


def check_event(event, lane):
    begin = round(event["ts"] * 1000)
    while lane and lane[-1] is not None and lane[-1] <= begin:
        lane.pop()
    if event["ph"] == "i":
        assert event["s"] in {"g", "p", "t"}
        return
    if event["ph"] == "E":
        assert lane, event
        assert lane.pop() is None, event
        return
    assert event["name"], event
    if event["ph"] == "B":
        lane.append(None)
        return
    end = begin + round(event["dur"] * 1000)
    assert event["dur"] >= 0
    if event["dur"]:
        assert not lane or lane[-1] is None or end <= lane[-1], (event, lane)
        lane.append(end)


def read_events(text):
    content = json.loads(text)
    return content["traceEvents"] if isinstance(content, dict) else content
