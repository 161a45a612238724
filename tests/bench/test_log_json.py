"""JSON of nccl-tests and of ronde, whole, drifted and damaged."""

import copy
import json
import math
from typing import Any

import jsonschema
import pytest
from tests.bench.log_writing import load_schema

from ronde.bench import (
    RankCount,
    RankSource,
    Row,
    Run,
    Side,
    read_log,
    to_record,
)
from ronde.errors import UsageError
from ronde.records import Record

CHECKER = jsonschema.Draft202012Validator(load_schema())


def half(time_us: float = 100.0) -> dict[str, Any]:
    return {"time": time_us, "alg_bw": 0.5, "bus_bw": 0.75, "nwrong": 0.0}


def result(size: int = 1024) -> dict[str, Any]:
    return {
        "size": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": half(),
        "in_place": half(90.5),
        "actual_iterations": 20,
        "experiment_name": "",
    }


def device(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "group": 0,
        "pid": 4000 + rank,
        "hostname": "node-1",
        "device": rank,
        "device_hex": "0000:0f:00",
        "device_info": "NVIDIA H100 80GB HBM3",
    }


def document(num_results: int = 3) -> dict[str, Any]:
    """Return what ``ronde bench -J`` writes."""
    return {
        "version": 3,
        "start_time": "2026-11-21 18:30:00",
        "args": ["ronde", "bench", "all_reduce", "-g", "4"],
        "env": ["NCCL_ALGO=Ring"],
        "nccl_version": 23007,
        "config": {
            "nthreads": 1,
            "ngpus": 4,
            "minimum_bytes": 8,
            "maximum_bytes": 1024,
            "step_factor": 2,
            "warmup_iters": 1,
            "iterations": 20,
            "aggregated_iterations": 1,
            "validation": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "per_iter_timing": "false",
            "per_iter_skip": 0,
            "parallel_init": "false",
            "devices": [device(rank) for rank in range(4)],
        },
        "results": [result(1024 << i) for i in range(num_results)],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 0.75, "okay": "unchecked"},
        "errors": [],
        "end_time": "2026-11-21 18:31:00",
        "ronde": {"test": "all_reduce", "engine": "nccl", "size": 4, "limit": None},
    }


def upstream(num_results: int = 3) -> dict[str, Any]:
    """Return what nccl-tests writes for 4 GPUs of one process: one device of them."""
    content = document(num_results)
    del content["ronde"]
    content["args"] = ["./build/all_reduce_perf", "-g", "4"]
    content["config"]["devices"] = [device(0)]
    return content


def read(content: dict[str, Any] | str) -> Run:
    text = content if isinstance(content, str) else json.dumps(content)
    log = read_log(text, "a.json")
    assert log.damage == []
    (run,) = log.runs
    return run


def changed(path: str, value: object, content: dict[str, Any] | None = None) -> Any:
    """Return the document with one entry changed, or dropped for None."""
    content = copy.deepcopy(document() if content is None else content)
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    entry: Any = content
    for each in parents:
        entry = entry[each]
    if value is None:
        del entry[last]
    else:
        entry[last] = value
    return content


def test_ours_is_read() -> None:
    run = read(document())
    assert run.test == "all_reduce"
    assert run.engine == "nccl"
    assert run.ranks == RankCount.exactly(4, RankSource.GIVEN)
    assert [row.size_bytes for row in run.rows] == [1024, 2048, 4096]
    assert run.rows[0] == Row(
        *(1024, 256, "float", "sum", -1),
        out_of_place=Side(100.0, 0.5, 0.75, 0.0),
        in_place=Side(90.5, 0.5, 0.75, 0.0),
    )
    assert (run.average_busbw_gb_per_s, run.num_out_of_bounds) == (0.75, 0)
    assert run.is_complete
    assert run.warnings == ()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_theirs_is_read(version: int) -> None:
    run = read(changed("version", version, upstream()))
    assert run.test == "all_reduce"
    assert run.ranks == RankCount.exactly(4, RankSource.DEVICES)
    assert run.is_complete
    assert run.warnings == ()


def test_processes_that_list_one_device_each() -> None:
    content = upstream()
    content["config"]["devices"] = [device(0), device(4)]
    assert read(content).ranks.value == 8
    content["config"]["nthreads"] = 2
    content["config"]["devices"] = [device(0), device(8)]
    assert read(content).ranks.value == 16
    content["config"]["devices"] = [device(rank) for rank in range(4)]
    assert read(content).ranks.value == 4


def test_secrets_of_the_environment_are_not_kept() -> None:
    run = read(changed("env", ["AWS_SECRET_ACCESS_KEY=hunter2"], upstream()))
    assert "hunter2" not in to_record(run).to_json()


def test_numbers_that_are_no_json() -> None:
    text = json.dumps(upstream(1)).replace("100.0", "inf").replace("90.5", '"nan"')
    row = read(text.replace('"bus_bw": 0.75', '"bus_bw": -nan')).rows[0]
    assert row.out_of_place is not None
    assert row.in_place is not None
    assert row.out_of_place.time_us == math.inf
    assert math.isnan(row.in_place.time_us or 0)
    assert math.isnan(row.in_place.busbw_gb_per_s or 0)


def test_early_releases_misspelled_keys() -> None:
    text = json.dumps(upstream())
    text = text.replace("average_bus_bandwidth", "average_bus_bandwidith")
    run = read(text.replace('"bandwidth"', '"bandwidith"'))
    assert run.average_busbw_gb_per_s == 0.75


def test_what_was_not_measured_or_checked() -> None:
    content = upstream()
    content["results"][0]["out_of_place"] = None
    content["results"][1]["in_place"]["nwrong"] = None
    first, second, _ = read(content).rows
    assert first.out_of_place is None
    assert second.in_place is not None
    assert second.in_place.num_wrong is None


def test_a_run_that_did_not_end() -> None:
    content = upstream()
    del content["out_of_bounds"], content["average_bus_bandwidth"]
    log = read_log(json.dumps(content), "a.json")
    (run,) = log.runs
    assert not run.is_complete
    assert len(run.rows) == 3
    assert log.cuts == [
        "a.json: run 1 has no footer: the run was aborted, or the log is cut"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("results", {"a": 1}), r"a.json: this is JSON, but not as"),
        (changed("config", 7), r"a.json: this is JSON, but not as"),
        (changed("config.devices.0.rank", "a"), r"a.json: this is JSON, but not as"),
        (changed("results.1.size", "big"), r"at result 1: .*'big'"),
        (changed("results.1.count", None), r"KeyError at result 1: 'count'"),
        (changed("results.1.count", -1), r"at result 1: .* count -1 is negative"),
        (changed("results.0.type", 7), r"AttributeError at result 0"),
        (changed("results.2.in_place.bus_bw", "fast"), r"at result 2: .*'fast'"),
        (changed("results.2.in_place", [1]), r"AttributeError at result 2"),
        ('{"version": 3, "results": [}', r"a.json:1: this is not valid JSON"),
        ("{" * 5000, r"a.json:1: this is not valid JSON"),
        ('{"version": ' + "1" * 5000 + "}", r"a.json: this is JSON, but not as"),
    ],
)
def test_a_log_with_nothing_to_read_is_an_error(content: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(content)


def test_a_cut_file_is_an_error_with_its_line() -> None:
    text = json.dumps(document(), indent=1)
    cut = text[: text.index('"size": 4096')]
    line = cut.count("\n") + 1
    with pytest.raises(UsageError, match=rf"a.json:{line}: this is not valid JSON"):
        read_log(cut, "a.json")


def test_ours_is_valid() -> None:
    CHECKER.validate(document())
    content = document()
    content["results"][0]["out_of_place"] = None
    content["results"][1]["in_place"]["bus_bw"] = "nan"
    del content["config"]["step_factor"]
    content["config"]["step_bytes"] = 1024
    CHECKER.validate(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("ronde", None),
        ("config.blocking_collectives", False),
        ("results.0.root", -1),
        ("results.0.in_place.bus_bw", "much"),
        ("ronde.limit", {"busbw_gb_per_s": 0, "link": "", "note": ""}),
    ],
)
def test_what_is_not_ours_is_not_valid(path: str, value: object) -> None:
    assert not CHECKER.is_valid(changed(path, value))


def test_records_read_back() -> None:
    runs = [read(document()), read(changed("results.0.in_place.time", "nan"))]
    records = [to_record(run, was_measured_here=False) for run in runs]
    text = "".join(f"{record.to_json()}\n" for record in records)
    again = read_log(text, "a.jsonl").runs
    assert again[0] == runs[0]
    assert repr(again[1]) == repr(runs[1])  # NaN is unequal to itself
    assert {record.machine.cpu for record in records} == {""}


def test_records_of_other_kinds_are_passed_over() -> None:
    other = Record("training", {}).to_json()
    text = f"{other}\n\n{to_record(read(document())).to_json()}\n"
    assert len(read_log(text, "a.jsonl").runs) == 1
    with pytest.raises(UsageError, match=r"a.jsonl:2: records must hold one of kind"):
        read_log(f"{other}\n", "a.jsonl")


def test_damaged_records_are_left_out_and_reported() -> None:
    line = to_record(read(document())).to_json()
    for damaged in (line[:-20], line.replace('"rows"', '"rowz"')):
        log = read_log(f"{line}\n{damaged}\n{line}\n", "a.jsonl")
        assert len(log.runs) == 2
        assert len(log.damage) == 1
        assert log.damage[0].startswith("a.jsonl:2: ")
    with pytest.raises(UsageError, match=r"^a.jsonl:1: "):
        read_log(line[:40], "a.jsonl")
