"""``ronde bench`` as a command: its ranks, its end, its exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from tests.bench.log_writing import load_schema
from tests.cli.conftest import clean_environment
from tests.limits import HANG_S

from ronde.bench import Exit, from_record
from ronde.records import read_records

SMALL = ("-b", "64", "-e", "1K", "-f", "4", "-n", "2", "--no-limit")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ronde", *words]


def start(*words: str, cwd: Path | None = None, **variables: str):
    return subprocess.Popen(
        command(*words),
        env=clean_environment() | variables,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process) -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    return process.returncode, out, err


def bench(*words: str, cwd: Path | None = None, **variables: str):
    return ended(start("bench", *words, cwd=cwd, **variables))


def rows(text: str) -> list[list[str]]:
    return [
        line.split()
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def test_a_soak_of_one_rank_skips_what_cannot_be_reduced_and_overwrites_nothing(
    tmp_path,
):
    """It ends when its time is over."""
    (tmp_path / "a.json").write_text("kept")
    (tmp_path / "a.json.0").write_text("kept too")
    words = ("-b", "64", "-e", "64", "-d", "all", "-o", "max", "-J", "a.json")
    soak = ("-N", "0", "--duration", "1s")
    code, out, err = bench("reduce_scatter", *words, *soak, cwd=tmp_path)
    assert (code, err) == (Exit.OK, "")
    assert (tmp_path / "a.json").read_text() == "kept"
    ours = json.loads((tmp_path / "a.json.1").read_text())["ronde"]
    assert (ours["size"], ours["ended_by"]) == (1, "duration")
    assert out.count("# skipped: f8e") == 2
    assert "one rank has no bus" in out
    assert {row[7] for row in rows(out)} == {"0.00"}


def test_a_launcher_that_started_ranks_is_not_asked_for_more():
    code, _, err = ended(
        start(
            *("run", "-n", "1", "--", *command("bench", "all_reduce", "-g", "2")),
        )
    )
    assert code == Exit.UNSUPPORTED
    assert "cannot be used here" in err


@pytest.mark.waits
def test_half_a_world_is_no_single_run():
    """A launcher's variables without the other ranks: not n unrelated runs."""
    code, out, err = bench("all_reduce", RANK="0", WORLD_SIZE="2")
    assert (code, out) == (Exit.USAGE, "")
    assert err.startswith("ronde: ")
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    code, out, err = bench("all_reduce", "--engine", "gloo", "-T", "100ms", **alone)
    assert (code, out) == (Exit.USAGE, "")
    assert "not all 2 ranks of plain have connected" in err


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_reader_that_goes_away_ends_it():
    process = start("bench", "all_reduce", "-g", "2", *SMALL, "-N", "0")
    first_row(process)
    process.stdout.close()
    assert process.wait(HANG_S) == 128 + signal.SIGPIPE
    process.stderr.close()


def test_it_joins_the_ranks_that_are_there_in_groups_and_fails_if_they_are_slow():
    variables = {"NCCL_TESTS_SPLIT": "MOD 2", "NCCL_TESTS_MIN_BW": "1e6"}
    words = ("run", "-n", "3", "--no-prefix", "--", *command("bench", "all_reduce"))
    code, out, _ = ended(start(*words, *SMALL, **variables))
    assert code == Exit.FAILED
    groups = [line.split()[4] for line in out.splitlines() if "#  Rank" in line]
    assert groups == ["0", "1", "0"]
    # The factor is that of the two ranks of group 0: 1.
    assert all(row[6] == row[7] for row in rows(out))
    assert "# Avg bus bandwidth" in out
    assert " FAILED\n" in out


def test_engines_are_set_side_by_side(tmp_path):
    code, out, err = bench(
        *("all_reduce", "-g", "2", "-b", "1K", "-e", "4K", "-f", "4", "-n", "2"),
        *("--compare", "gloo,shared_memory", "--rounds", "3", "--no-limit"),
        *("--json", "c.jsonl"),
        cwd=tmp_path,
    )
    assert (code, err) == (Exit.OK, "")
    lines = [line.split("|") for line in out.splitlines() if line.startswith("    ")]
    assert [line[0].split()[0] for line in lines] == ["1024", "4096"]
    for _, gloo, shared in lines:
        assert float(gloo.split()[2]) == 1.0
        ratio = float(gloo.split()[0]) / float(shared.split()[0])
        assert float(shared.split()[2]) == pytest.approx(ratio, rel=0.05)
    runs = [from_record(r) for r in read_records(tmp_path / "c.jsonl", "bench")]
    assert [run.engine for run in runs] == ["gloo", "shared_memory"]
    assert [len(run.rows) for run in runs] == [2, 2]
    for run in runs:  # of one size that is long enough
        assert (run.facts["hosts"], run.facts["fit"]) == ([2], None)
        assert "at least 2 of 4096 bytes" in run.facts["no_fit"]


def first_row(process) -> None:
    for line in process.stdout:
        if line.strip() and not line.startswith("#"):
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize(
    ("size", "cycles", "number", "code"),
    [
        pytest.param("2", "0", signal.SIGINT, Exit.OK, marks=pytest.mark.long),
        ("1", "0", signal.SIGTERM, Exit.OK),
        ("2", "100000", signal.SIGINT, Exit.INTERRUPTED),
    ],
)
def test_it_ends_cleanly_when_stopped(tmp_path, size, cycles, number, code):
    words = ("all_reduce", "-g", size, *SMALL, "-N", cycles, "-J", "s.json")
    process = start("bench", *words, cwd=tmp_path)
    first_row(process)
    process.send_signal(number)
    returned, out, _ = ended(process)
    assert returned == code
    assert "# Collective test concluded: all_reduce_perf" in out
    assert out.endswith("# error: interrupted\n" if code else "#\n\n")
    content = json.loads((tmp_path / "s.json").read_text())
    jsonschema.Draft202012Validator(load_schema()).validate(content)
    assert content["ronde"]["ended_by"] == "stopped"
    assert len(content["results"]) >= 1


def ranks_of(pid: int) -> list[int]:
    """Return the processes below ``pid`` that measure, by way of its agent."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        path = Path(f"/proc/{parent}/task/{parent}/children")
        children = [int(child) for child in path.read_text().split()]
        waiting += children
        found += [c for c in children if b"--parent" in _words(c)]
    return sorted(found)


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.waits
def test_a_rank_that_stops_is_noticed_in_time():
    words = ("all_reduce", "-g", "2", *SMALL, "-N", "0", "-T", "5", "--engine", "gloo")
    process = start("bench", *words)
    first_row(process)
    stopped = ranks_of(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    code, out, err = ended(process)
    assert code == Exit.TIMEOUT
    assert "did not end within -T 5 s" in err
    assert "# error: " in out


def test_a_rank_that_dies_is_an_error_of_the_engine():
    words = ("all_reduce", "-g", "2", *SMALL, "-N", "0", "--engine", "gloo")
    process = start("bench", *words)
    first_row(process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    code, out, err = ended(process)
    assert code == 128 + signal.SIGKILL
    assert "rank 1 failed first" in err
    assert "# error: " in out
