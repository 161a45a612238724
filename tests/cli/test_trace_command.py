"""``ronde trace`` and ``ronde run --timeline``, as a user types them."""

import gzip
import json
import re
import subprocess
import sys

import pytest
from tests.unit.timeline_samples import check_events, encode, record

TRAIN = """
import os, pathlib, signal, sys, time
import torch
import ronde.torch as hvd
from ronde.timeline import read_parts

hvd.init()
for step in range(20):
    # Rank 1 is late, on any machine.
    has_asked = pathlib.Path(sys.argv[1]) / str(step)
    while hvd.rank() == 1 and not has_asked.exists():
        time.sleep(0.0005)
    if hvd.rank() == 1:
        time.sleep(0.02)  # by more than clocks may differ
    handle = hvd.allreduce_async(torch.ones(4), name="x")
    if hvd.rank() == 0:
        has_asked.touch()
    hvd.synchronize(handle)
if len(sys.argv) > 2 and hvd.rank() == 1:
    # The timelines' threads write now and then.
    parts = pathlib.Path(sys.argv[2])
    written = ()
    while written != [20, 20]:
        time.sleep(0.01)
        tracks = read_parts(part.read_bytes() for part in parts.iterdir())
        written = [len(track.operations) for track in tracks]
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(torch.ones(4), name="y")
hvd.shutdown()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    asked = tmp_path / "asked"
    asked.mkdir()
    return [sys.executable, str(path), str(asked)]


def run(ronde, tmp_path, *words):
    return ronde("run", "-n", "2", *words, cwd=tmp_path)


def check(path):
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return check_events(json.loads(text)["traceEvents"])


def test_a_timeline_of_all_ranks(ronde, tmp_path, script):
    name = "t.json.gz"
    done = run(ronde, tmp_path, "--timeline", name, *script)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [name, "asked", "train.py"]
    )
    spans = check(tmp_path / name)
    for rank in range(2):
        own = [e for e in spans if e["pid"] == rank and "fused" in e.get("args", {})]
        late = [e["args"]["late_rank"] for e in own]
        assert len(own) == 21
        assert late[:20] == [1] * 20
    shown = ronde("trace", "show", name, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, b"")
    text = shown.stdout.decode()
    assert f"{name}: 2 ranks on 1 host" in text
    assert "All ranks read one clock." in text
    assert "allreduce.x: " in text
    assert "for rank 1 (20 times)" in text


def test_what_was_recorded_before_a_crash_is_there(ronde, tmp_path, script):
    done = run(ronde, tmp_path, "--timeline", "t.json.gz", *script, "t.json.gz.parts")
    assert done.returncode == 137
    spans = check(tmp_path / "t.json.gz")
    own = [e for e in spans if "fused" in e.get("args", {})]
    assert [sum(e["pid"] == rank for e in own) for rank in range(2)] == [20, 20]
    text = ronde("trace", "show", "t.json.gz", cwd=tmp_path).stdout.decode()
    assert re.search(r"did not end in order on rank(s 0-| )1:", text)


def test_a_program_that_records_nothing(ronde, tmp_path):
    done = run(ronde, tmp_path, "--timeline", "t.json", "/bin/true")
    assert done.returncode == 0
    assert done.stderr == (
        b"ronde: the timeline is empty: no rank called init(), so there is no file\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_that_cannot_be_is_refused_before_anything_starts(
    ronde_here, tmp_path
):
    (tmp_path / "old.json.parts").mkdir()
    for words, why in (
        (["--timeline", "no/t.json"], b"--timeline must be a file in a directory"),
        (["--timeline", "old.json"], b"has records of an earlier job"),
        (["--timeline", "t", "--timeline-limit", "1"], b"must be at least 64KiB"),
        (["--timeline", "t", "--timeline-limit", "x"], b"size must be a number"),
        (["--timeline-limit", "1MiB"], b"has no effect without --timeline"),
    ):
        done = run(ronde_here, tmp_path, *words, "/bin/sh", "-c", "echo started")
        assert (done.returncode, done.stdout) == (64, b""), done.stderr
        assert why in done.stderr


def test_parts_of_a_job_whose_launcher_died_can_be_merged(ronde_here, tmp_path):
    parts = tmp_path / "t.json.parts"
    parts.mkdir()
    for rank in range(2):
        packed = gzip.compress(encode(record(submitted=rank * 3), rank=rank))
        (parts / f"rank-{rank}.ronde-part").write_bytes(packed)
    done = ronde_here("trace", "merge", "t.json.gz", "t.json.parts", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert len(check(tmp_path / "t.json.gz")) == 6
    shown = ronde_here("trace", "show", "t.json.parts", cwd=tmp_path)
    assert b"t.json.parts: 2 ranks on 1 host" in shown.stdout


def test_help(ronde_here):
    for words in (["trace"], ["trace", "-h"], ["trace", "--help"]):
        assert ronde_here(*words).stdout.startswith(b"usage: ronde trace show FILE")
    for verb in ("show", "merge"):
        done = ronde_here("trace", verb, "--help")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(f"usage: ronde trace {verb}".encode())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["shwo", "t"], b"verb must be show or merge, got 'shwo'"),
        (["show"], b"FILE is required"),
        (["show", "no.json"], b"cannot read the timeline"),
        (["show", "t", "--tensors", "-1"], b"whole number of at least 0"),
        (["merge", "out"], b"PART is required"),
        (["merge", "out", "no"], b"cannot read the timeline part 'no'"),
        (["merge", "out", "."], b"found no timeline parts"),
    ],
)
def test_bad_words_are_refused(ronde_here, tmp_path, words, why):
    done = ronde_here("trace", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (64, b"")
    assert why in done.stderr
    assert done.stderr.count(b"\n") == 1


OTHER_CLOCK = ("unshare", "--time", "--monotonic", "1000", "--fork", "--kill-child")
"""Starts a program whose monotonic clock is 1,000 s ahead of everybody else's."""

AS_RANK_1 = f'[ "$RANK" = 1 ] && exec {" ".join(OTHER_CLOCK)} "$@"; exec "$@"'


def test_ranks_with_different_clocks_are_brought_to_one(ronde, tmp_path, script):
    if subprocess.run(
        [*OTHER_CLOCK, "true"], check=False, capture_output=True
    ).returncode:
        pytest.skip(
            "needs a time namespace: run as root, on Linux with util-linux 2.36"
        )
    words = ("--timeline", "t.json", "/bin/sh", "-c", AS_RANK_1, "sh", *script)
    done = run(ronde, tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    first, other = json.loads((tmp_path / "t.json").read_text())["otherData"]["ranks"]
    assert (first["clock_offset_us"], first["clock_error_us"]) == (0, 0)
    assert len(other["clock_points"]) == 2
    for _, offset_ns, error_ns in other["clock_points"]:
        assert abs(offset_ns + 1000 * 10**9) <= error_ns < 10**9
    spans = check(tmp_path / "t.json")
    asked = [e["args"] for e in spans if "fused" in e.get("args", {})]
    asked = [args for args in asked if args["tensor"] == "allreduce.x"]
    assert len(asked) == 40
    # No clock is known better than its error.
    clear = [a for a in asked if a["late_by_us"] > other["clock_error_us"]]
    assert {args["late_rank"] for args in clear} == {1}
    text = ronde("trace", "show", "t.json", cwd=tmp_path).stdout.decode()
    assert "of rank 0's; rank 1's is the least certain." in text
