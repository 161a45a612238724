"""``ronde why FILE ...`` on dumps of the flight recorder.

The first five cases are those that torch's own analyser gets wrong.
"""

import json
import pickle
import subprocess
import sys

import pytest
from tests.limits import HANG_S

from ronde.errors import UsageError
from ronde.monitor import explain_dumps, read_dumps

WORLD = ("0", "default_pg")


def entry(number, *, group=WORLD, name="nccl:all_reduce", state="completed", **more):
    return {
        "frames": [{"name": "train", "filename": "/home/me/train.py", "line": number}],
        "process_group": group,
        "pg_id": int(group[0]),
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": name,
        "state": state,
        "retired": state == "completed",
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        **more,
    }


def dump(entries, *, groups=None, completed=-1):
    groups = groups or {"0": ("default_pg", [0, 1, 2, 3])}
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in groups.items()
        },
        "pg_status": {"0": {"last_completed_collective": completed}},
        "entries": entries,
    }


def judge(tmp_path, dumps):
    paths = []
    for rank, plain in dumps.items():
        paths.append(tmp_path / f"comm_lib_trace_rank_{rank}")
        paths[-1].write_bytes(pickle.dumps(plain))
    verdict = explain_dumps(read_dumps(map(str, paths)))
    return [(fault.kind, fault.ranks) for fault in verdict.faults], verdict


def calls(last, state="scheduled", first=1, **more):
    done = [entry(number) for number in range(first, last)]
    return [*done, entry(last, state=state, **more)]


def test_the_odd_one_out_is_the_minority(tmp_path):
    dumps = {rank: dump(calls(5)) for rank in (1, 2, 3)}
    dumps[0] = dump(calls(5, name="nccl:broadcast"))
    faults, verdict = judge(tmp_path, dumps)
    assert faults == [("mismatch", (0,))]
    assert "Rank 0 is in broadcast" in verdict.faults[0].text
    assert "/home/me/train.py:5" in verdict.faults[0].text


def test_a_skipped_call_does_not_hide_ranks_whose_buffers_begin_later(tmp_path):
    groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [0, 1])}
    tensor_parallel = [entry(n, group=("1", "tp")) for n in range(30, 51)]
    dumps = {
        0: dump([*calls(30, first=24), *tensor_parallel], groups=groups),
        1: dump([*calls(30, first=24), *tensor_parallel], groups=groups),
        2: dump(calls(30, first=11), groups=groups),
        3: dump(calls(29, state="completed", first=10), groups=groups),
    }
    faults, verdict = judge(tmp_path, dumps)
    assert faults == [("missing", (3,))]
    assert "call 30 of default_pg" in verdict.faults[0].text


def test_a_wrong_operation_does_not_hide_an_absent_rank(tmp_path):
    dumps = {rank: dump(calls(5)) for rank in (0, 3)}
    dumps[1] = dump(calls(5, name="nccl:all_gather"))
    dumps[2] = dump(calls(4, state="completed"))
    faults, _ = judge(tmp_path, dumps)
    assert faults == [("missing", (2,)), ("mismatch", (1,))]


def test_a_rank_that_has_not_noticed_the_end_is_no_culprit(tmp_path):
    dumps = {rank: dump(calls(5, state="completed")) for rank in (0, 2, 3)}
    dumps[1] = dump(calls(5, state="started"))
    assert judge(tmp_path, dumps)[0] == []


GLOO = """
import os, pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(3):
    dist.all_reduce(torch.ones(8))
if rank == 0:
    work = dist.all_reduce(torch.ones(8), async_op=True)
from torch._C._distributed_c10d import _dump_fr_trace
pathlib.Path(sys.argv[1], f"trace_{rank}").write_bytes(_dump_fr_trace())
os._exit(0)  # the end of a program with Gloo may abort
"""


def test_dumps_of_gloo_are_read(tmp_path, ronde_here):
    script = tmp_path / "train.py"
    script.write_text(GLOO)
    run = [sys.executable, "-m", "ronde", "run", "-n", "2"]
    words = [*run, str(script), str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True, timeout=HANG_S)
    paths = [str(tmp_path / f"trace_{rank}") for rank in range(2)]
    text = ronde_here("why", *paths).stdout.decode()
    assert "Rank 1 has not called call 4 of default_pg" in " ".join(text.split())


def test_a_cycle_of_two_groups_is_found(tmp_path):
    groups = {"1": ("a", [0, 1]), "2": ("b", [0, 1])}
    one, two = ("1", "a"), ("2", "b")
    dumps = {
        0: dump([entry(1, group=one, state="started")], groups=groups),
        1: dump([entry(1, group=two, state="started")], groups=groups),
    }
    dumps[0]["entries"].insert(0, entry(0, group=two))
    dumps[1]["entries"].insert(0, entry(0, group=one))
    assert judge(tmp_path, dumps)[0] == [("order", (0, 1))]


def test_other_shapes_and_types_differ_but_not_those_of_all_to_all(tmp_path):
    dumps = {rank: dump(calls(5)) for rank in (0, 1, 2)}
    dumps[3] = dump(calls(5, input_sizes=[[9]]))
    assert judge(tmp_path, dumps)[0] == [("mismatch", (3,))]
    name = "nccl:all_to_all"
    dumps = {rank: dump(calls(5, name=name, input_sizes=[[rank]])) for rank in range(4)}
    assert judge(tmp_path, dumps)[0] == []


def test_a_rank_without_a_dump_is_dead_and_a_tie_is_said(tmp_path):
    dumps = {rank: dump(calls(5)) for rank in (0, 1, 2)}
    assert judge(tmp_path, dumps)[0] == [("dead", (3,))]
    dumps = {rank: dump(calls(5)) for rank in (0, 1)}
    dumps |= {rank: dump(calls(5, name="nccl:broadcast")) for rank in (2, 3)}
    faults, verdict = judge(tmp_path, dumps)
    assert faults == [("mismatch", (0, 1, 2, 3))]
    assert "either may be wrong" in verdict.faults[0].text


def test_json_is_read_and_bad_files_are_refused(tmp_path):
    good = tmp_path / "trace_0.json"
    good.write_text(json.dumps(dump(calls(2))))
    assert read_dumps([str(good)])[0].rank == 0
    code, text = tmp_path / "trace_1", tmp_path / "trace_2"
    code.write_bytes(pickle.dumps(subprocess.Popen))
    text.write_text("hello")
    missing, unnamed = tmp_path / "trace_3", tmp_path / "trace"
    unnamed.write_text("{}")
    twice = tmp_path / "other_0"
    twice.write_bytes(good.read_bytes())
    for paths, reason in {
        (code,): "wants to load subprocess.Popen",
        (text,): "is no dump",
        (missing,): "cannot read",
        (unnamed,): "must end with its rank",
        (good, twice): "one dump",
    }.items():
        with pytest.raises(UsageError, match=reason):
            read_dumps(map(str, paths))
