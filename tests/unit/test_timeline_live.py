"""Rank 0's file while it runs: Horovod's form, valid at any moment, bounded."""

import json
import time

import pytest
from hypothesis import given
from tests.limits import HANG_S
from tests.unit.timeline_samples import BASE_NS, check_events, record, records

from ronde.timeline import Activity, LiveFile, ThreadedRecorder


def open_live(path, limit_bytes=1 << 20):
    return LiveFile(
        path,
        0,
        start_ns=BASE_NS,
        wall_us=1_700_000_000_000_000,
        limit_bytes=limit_bytes,
    )


def test_the_file_is_json_from_the_first_moment_on(tmp_path):
    live = open_live(tmp_path / "t.json")
    (start, order) = json.loads((tmp_path / "t.json").read_text())
    started = {"start_time_since_epoch_in_micros": 1_700_000_000_000_000}
    assert (start["name"], start["args"]) == ("process_name", started)
    assert order["name"] == "process_sort_index"
    assert (tmp_path / "t.json").stat().st_mode & 0o777 == 0o600
    live.close(0)


def test_an_operation_looks_as_horovod_writes_it(tmp_path):
    live = open_live(tmp_path / "t.json")
    activity = Activity("GLOO_ALLREDUCE", BASE_NS + 21_000, BASE_NS + 29_000)
    times = {"submitted": 1000, "agreed": 10_000, "begun": 20_000, "ended": 30_000}
    live.add([record(**times)._replace(activities=(activity,))], [BASE_NS + 31_000])
    live.close(0)
    events = json.loads((tmp_path / "t.json").read_text())[2:]
    assert events == [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1, "pid": 1},
        {"ph": "X", "name": "0", "ts": 1, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 10, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 20, "pid": 1},
        {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 21, "pid": 1},
        {"ph": "E", "ts": 29, "pid": 1},
        {
            "ph": "E",
            "ts": 30,
            "pid": 1,
            "args": {"dtype": "float32", "shape": "[2, 3]"},
        },
        {"ph": "i", "name": "CYCLE_START", "ts": 31, "s": "g"},
    ]


@given(records())
def test_any_operation_can_be_written(tmp_path_factory, operations):
    path = tmp_path_factory.mktemp("live") / "t.json"
    live = open_live(path)
    for each in operations:
        # One tensor's operations never overlap; its parts are nested.
        live.add([each._replace(activities=())])
        json.loads(path.read_text())
    live.close(0)
    events = json.loads(path.read_text())
    assert sum(event["ph"] == "E" for event in events) == sum(
        event["ph"] == "B" for event in events
    )


def test_operations_one_after_another_are_in_chromes_format(tmp_path):
    live = open_live(tmp_path / "t.json")
    for number in range(5):
        at = number * 100_000
        live.add([record("x", number, at, at + 10_000, at + 20_000, at + 30_000)])
    live.close(0)
    check_events(json.loads((tmp_path / "t.json").read_text()))


def test_the_file_grows_no_further_than_its_limit(tmp_path):
    path, limit = tmp_path / "t.json", 8 << 10
    live = open_live(path, limit)
    for number in range(200):
        live.add([record("x", number)])
    live.close(0)
    assert limit / 2 < path.stat().st_size <= limit + 200
    assert json.loads(path.read_text())[-1]["name"] == "TIMELINE_LIMIT"


def test_what_happens_is_on_disk_while_it_is_recorded(tmp_path):
    live = open_live(tmp_path / "t.json")
    recorder = ThreadedRecorder([live], gather_s=0.05, has_cycles=True)
    recorder.operation(record())
    recorder.cycle(BASE_NS)
    deadline = time.monotonic() + HANG_S
    while "CYCLE_START" not in (tmp_path / "t.json").read_text():
        assert time.monotonic() < deadline
    recorder.close()
    assert "allreduce.x" in (tmp_path / "t.json").read_text()


def test_a_file_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_live(tmp_path / "no" / "t.json")
