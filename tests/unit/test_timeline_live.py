"""Rank 0's live file: Horovod's form, valid JSON at any time, bounded."""

import json

from tests.unit.timeline_samples import BASE_NS, record

from ronde.timeline import Activity, LiveFile


def open_live(path, limit_bytes=1 << 20):
    return LiveFile(
        path,
        0,
        start_ns=BASE_NS,
        wall_us=17 * 10**14,
        limit_bytes=limit_bytes,
    )


def test_an_operation_looks_as_horovod_writes_it(tmp_path):
    live = open_live(tmp_path / "t.json")
    activity = Activity("GLOO_ALLREDUCE", BASE_NS + 21_000, BASE_NS + 29_000)
    times = {"submitted": 1000, "agreed": 10_000, "begun": 20_000, "ended": 30_000}
    live.add([record(**times)._replace(activities=(activity,))], [BASE_NS + 31_000])
    events = json.loads((tmp_path / "t.json").read_text())
    live.close(0)
    started = {"start_time_since_epoch_in_micros": 17 * 10**14}
    assert (events[0]["name"], events[0]["args"]) == ("process_name", started)
    assert (tmp_path / "t.json").stat().st_mode & 0o777 == 0o600
    assert events[2:] == [
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


def test_the_file_grows_no_further_than_its_limit(tmp_path):
    path, limit = tmp_path / "t.json", 8 << 10
    live = open_live(path, limit)
    for number in range(200):
        live.add([record("x", number)])
    live.close(0)
    assert limit / 2 < path.stat().st_size <= limit + 200
    assert json.loads(path.read_text())[-1]["name"] == "TIMELINE_LIMIT"
