"""Runs that failed, were cut or are wrong: exit code, reason, file and line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.log_writing import Form, all_reduce_row, header, log, side
from tests.bench.test_log_json import document, upstream

from ronde.bench import read_log, to_record
from ronde.cli import main

ROWS = [all_reduce_row(1 << exponent) for exponent in range(10, 14)]
GOOD = log("all_reduce", ROWS)
START = GOOD[: GOOD.index(header(Form())[0])]
CUT = GOOD[: GOOD.index("# Out of")]  # at the end of a line
HOST = "gpu-17: "
NCCL = "Test NCCL failure common.cu:311 'unhandled system error / '"
ECHO = " .. gpu-17 pid 4001: Test failure common.cu:455"
WARN = "gpu-17:4001:4033 [0] net.cc:12 NCCL WARN no route to gpu-18"
REMARK = 'gpu-17:4001:4033 [0] init.cc:303 NCCL WARN Missing "iommu=pt" from kernel'


def lines(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


def with_row(**figures: float | None) -> str:
    """Return a log whose third row has other figures out of place."""
    half = ROWS[2].out_of_place
    assert half is not None
    rows = [*ROWS]
    rows[2] = replace(ROWS[2], out_of_place=replace(half, **figures))
    return log("all_reduce", rows)


def read(tmp_path: Path, text: str, *words: str) -> int:
    (tmp_path / "a.log").write_text(text)
    return main(["bench", "read", str(tmp_path / "a.log"), *words])


def problems(err: str) -> list[str]:
    """Return what was reported as an error, from the log's name on."""
    return re.findall(r"^ronde: (?:\S*/)?(a\.log:.*)$", err, re.MULTILINE)


FAILED = {
    "before the table": (
        START + lines(HOST + NCCL, ECHO, ECHO),
        [f"9: the run failed: {HOST}{NCCL}"],
    ),
    "with its cause": (
        START + lines(REMARK, WARN, WARN, HOST + NCCL, ECHO),
        [f"10: the run failed: NCCL: no route to gpu-18; line 12: {HOST}{NCCL}"],
    ),
    "after other rows": (CUT + lines(HOST + NCCL), [f"16: the run failed: {HOST}"]),
    "within a row": (
        CUT
        + "       16384          4096     float     sum      -1"
        + lines(HOST + NCCL),
        [f"16: the run failed: {HOST}{NCCL}"],
    ),
    "in time": (
        CUT + lines("gpu-17: Test timeout (30s) common.cu:402"),
        ["16: the run failed: gpu-17: Test timeout (30s)"],
    ),
    "in the last line": (CUT + HOST + NCCL, [f"16: the run failed: {HOST}{NCCL}"]),
    "the second of two": (
        GOOD + START + lines(HOST + NCCL) + GOOD,
        ["30: the run failed: "],
    ),
    "by itself": (lines(HOST + NCCL), ["1: the run failed: "]),
    "wrong elements": (
        with_row(num_wrong=7),
        ["14: 7 wrong elements in 1 row, the first of 4096 bytes, float sum"],
    ),
    "checks that failed": (
        GOOD.replace(": 0 OK", ": 3 FAILED"),
        ["16: Out of bounds values : 3 FAILED"],
    ),
    "bandwidth below what was asked for": (
        re.sub(r"(bandwidth    : \S+) ", r"\1 FAILED", GOOD),
        ["17: Avg bus bandwidth : "],
    ),
    "an average that is no number": (
        re.sub(r"bandwidth    : \S+ ", "bandwidth    : -nan", GOOD),
        ["17: Avg bus bandwidth : -nan"],
    ),
    "a rate that is no number": (
        with_row(busbw_gb_per_s=float("nan")),
        ["14: a time or rate that is negative or no number in 1 row", "17: Avg"],
    ),
    "an error at the end": (
        GOOD.replace("\n\n", "\n# error: interrupted\n"),
        ["21: error: interrupted"],
    ),
}


@pytest.mark.parametrize("case", FAILED)
def test_a_run_that_failed_or_is_wrong_exits_with_7(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reasons = FAILED[case]
    assert read(tmp_path, text) == 7
    found = problems(capsys.readouterr().err)
    assert len(found) == len(reasons), found
    assert read(tmp_path, text, str(tmp_path / "nowhere")) == 7
    assert problems(capsys.readouterr().err) == found
    for problem, reason in zip(found, reasons, strict=True):
        assert problem.startswith(f"a.log:{reason}")
    # What is wrong stays wrong in a part, and beside a good one.
    assert read(tmp_path, text, "--partial") == 7
    assert read(tmp_path, text, "--json", str(tmp_path / "a.jsonl")) == 7
    assert main(["bench", "read", str(tmp_path / "a.jsonl")]) == 7


KILLED = [
    "srun: error: gpu-17: task 5: Killed",
    "srun: error: gpu-17: tasks 0-7: Exited with exit code 3",
    "slurmstepd: error: *** STEP 7.0 ON gpu-17 CANCELLED AT 2026-11-21T18:30:00 ***",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0.",
    "mpirun noticed that process rank 3 with PID 0 on node gpu-17 exited on signal 9",
    "prterun detected that one or more processes exited with non-zero status",
    "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "  traceback : Signal 9 (SIGKILL) received by PID 4001",
    "ronde: rank 3 failed first: killed by signal 9",
    "command terminated with exit code 137",
    "run.sh: line 12:  4001 Killed                  ./all_reduce_perf -g 8",
    "Segmentation fault (core dumped)",
    "run.sh: line 12:  4001 Terminated              ./all_reduce_perf -g 8",
    "Terminated",
    "kernel: Out of memory: Killed process 4001 (all_reduce_perf) total-vm:81kB",
    "PRTE has lost communication with a remote daemon.",
    "bash: line 1:  4001 Killed                  sleep 1000",
    "There are not enough slots available in the system to satisfy the 16",
    "bash: all_reduce_perf: command not found",
]


# Perhaps of another program: a run that is whole has not failed for these.
STRAY = [KILLED[3], KILLED[15], KILLED[18]]


@pytest.mark.parametrize("line", KILLED)
@pytest.mark.parametrize("prefix", ["", "[1,3]<stderr>:", "3: "])
def test_what_a_launcher_saw_killed_failed(line: str, prefix: str) -> None:
    for text, at, is_over in ((CUT, 16, False), (GOOD, 22, True)):
        log = read_log(f"{text}{prefix}{line}\n", "a.log")
        (run,) = log.runs
        is_passed_over = is_over and line in STRAY
        failures = (f"a.log:{at}: the run failed: {line.strip()}",)
        assert run.failures == (() if is_passed_over else failures)
        assert run.warnings == ((f"line {at}: {line}",) if is_passed_over else ())
        assert (run.is_complete, log.damage, log.cuts) == (is_over, [], [])


def test_the_first_signs_are_quoted() -> None:
    """The cause is often not the first line, and never far behind it."""
    texts = [KILLED[1], "srun: error: Node failure on gpu-17", ECHO, KILLED[0], WARN]
    (run,) = read_log(CUT + lines(*texts), "a.log").runs
    quoted = f"{texts[0]}; line 17: {texts[1]}; line 19: {texts[3]}"
    assert run.failures == (f"a.log:16: the run failed: {quoted}",)
    assert run.rows == tuple(ROWS)


CUTS = {
    "in the table": (CUT, "a.log:15: run 1 has no footer"),
    "below the header": (
        GOOD[: GOOD.index("        1024")],
        "a.log:11: run 1 has no f",
    ),
    "before the table": (START, "a.log:8: run 1 ended before its table began"),
    "in the footer": (GOOD[: GOOD.index("# Avg")], "a.log:16: run 1 has no footer"),
    "then whole": (CUT + GOOD, "a.log:15: run 1 has no footer"),
    "after a whole one": (GOOD + CUT, "a.log:36: run 2 has no footer"),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_run_without_its_end_exits_with_6(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = CUTS[case]
    assert read(tmp_path, text) == 6
    (problem,) = problems(capsys.readouterr().err)
    assert problem.startswith(reason)
    assert read(tmp_path, text, "--partial") == 0


GOOD_ONES = {
    "another program killed before it": lines(*STRAY) + GOOD,
    "warnings": GOOD.replace("#       ", lines(REMARK, WARN) + "#       ", 1),
    "unchecked": log(
        "all_reduce", [replace(r, in_place=side(9, 1, 1, None)) for r in ROWS]
    ),
    "words": GOOD.replace(
        "#       ", "Test of 3 jobs\n0 errors, killed: 0\n#       ", 1
    ),
    "one rank": log("all_reduce", [all_reduce_row(1024, n=1)], Form(num_devices=1)),
}


@pytest.mark.parametrize("case", GOOD_ONES)
def test_good_runs_have_not_failed(case: str, tmp_path: Path) -> None:
    assert read(tmp_path, GOOD_ONES[case]) == 0
    assert len(read_log(GOOD_ONES[case], "a.log").runs) == 1


JSONS = {
    "wrong": ("results.1.in_place.nwrong", 7.0, "result 1: 7 wrong elements in 1 row"),
    "no number": (
        "results.1.in_place.bus_bw",
        "nan",
        "result 1: a time or rate that is negative or no number",
    ),
    "checks": ("out_of_bounds", {"count": 2, "okay": "false"}, "Out of bounds values"),
    "slow": ("average_bus_bandwidth.okay", "false", "Avg bus bandwidth : 0.75 FAILED"),
    "error": ("errors", ["timed out"], "error: timed out"),
}


@pytest.mark.parametrize("case", JSONS)
@pytest.mark.parametrize("make", [document, upstream])
def test_json_of_runs_that_failed(
    case, make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, value, reason = JSONS[case]
    content = make()
    entry = content
    *parents, last = [int(each) if each.isdigit() else each for each in path.split(".")]
    for each in parents:
        entry = entry[each]
    entry[last] = value
    assert read(tmp_path, json.dumps(content), "--partial") == 7
    (problem,) = problems(capsys.readouterr().err)
    assert problem.startswith(f"a.log: {reason}"), problem


def test_records_of_runs_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_log(json.dumps(document()), "a.json").runs[0]
    measured = replace(run, facts={})
    wrong = replace(measured.rows[0], in_place=side(9, 1, 1, 3.0))
    for bad, code, reason in (
        (replace(measured, rows=(wrong,)), 7, "2: 3 wrong elements in 1 row"),
        (replace(measured, failures=("interrupted",)), 7, "2: interrupted"),
        (replace(measured, num_out_of_bounds=4), 7, "2: checks that failed: 4"),
        (
            replace(measured, is_complete=False, average_busbw_gb_per_s=None),
            6,
            "2: the run is not complete",
        ),
    ):
        text = lines(to_record(measured).to_json(), to_record(bad).to_json())
        assert read(tmp_path, text) == code
        (problem,) = problems(capsys.readouterr().err)
        assert problem.startswith(f"a.log:{reason}")


def test_compare_fails_for_what_read_fails_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"good": GOOD, "bad": with_row(num_wrong=7), "cut": CUT, "none": START}
    texts["none"] += lines(HOST + NCCL)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)

    def compare(first: str, second: str, *words: str) -> int:
        paths = [str(tmp_path / name) for name in (first, second)]
        return main(["bench", "compare", *paths, *words])

    assert compare("good", "good") == 0
    for bad in ("bad", "none"):
        assert compare("good", bad) == compare(bad, "good", "--partial") == 7
    assert compare("good", "cut") == 6
    assert compare("good", "cut", "--partial") == 0
    assert "9: the run failed: gpu-17: Test NCCL" in capsys.readouterr().err
    # A file that cannot be read does not hide the failure of another one.
    assert compare("nowhere", "bad") == 7
    err = capsys.readouterr().err
    assert "7 wrong elements" in err
    assert "No such file" in err
    assert compare("good", "nowhere", "--partial") == 6


def unmarked(text: str) -> str:
    """Return a log as it was pasted: without ``#`` before its lines."""
    return re.sub("^#", "", text, flags=re.MULTILINE).replace("#wrong", "wrong")


PASTED = {
    "signs lost": unmarked(GOOD),
    "a sign on wrong": re.sub("^#", " ", GOOD, flags=re.MULTILINE),
    "the header alone": unmarked(GOOD[GOOD.index("#          size") :]),
    "no line of units": re.sub("#? +.B. .*\n", "", unmarked(GOOD)),
    "in a fence": f"Hello,\n```\n{unmarked(GOOD)}```\nas above.\n",
    "of mpirun": re.sub("^", "[1,0]<stdout>:", unmarked(GOOD), flags=re.MULTILINE),
}


@pytest.mark.parametrize("case", PASTED)
def test_a_pasted_table_needs_no_signs(case: str, tmp_path: Path) -> None:
    found = read_log(PASTED[case], "a.log")
    (run,) = found.runs
    assert run.rows == tuple(ROWS)
    assert run.test == "all_reduce"
    assert run.ranks.value == (None if case == "the header alone" else 2)
    assert (run.is_complete, run.warnings, run.failures) == (True, (), ())
    assert found.damage == []
