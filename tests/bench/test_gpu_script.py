"""``scripts/gpu``: a rehearsal on the CPU, what fails in it, and what it packs."""

import ast
import json
import re
import signal
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from scripts.gpu_machine.packing import PLATFORMS, PYTHON, WANTED
from scripts.gpu_machine.parts import gpu_parts
from tests.cli.conftest import clean_environment
from tests.limits import HANG_S

from ronde.records import read_records

ROOT = Path(__file__).parents[2]
OF_TORCH = {"torch", "ronde"}


def start(*words):
    return subprocess.Popen(
        [str(ROOT / "scripts" / "gpu"), *words],
        env=clean_environment() | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*words, timeout_s):
    with start(*words) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.terminate()  # which ends the part, too
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_a_rehearsal_goes_through_every_part(tmp_path):
    ended = run("--rehearse", "--out", str(tmp_path), timeout_s=400)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    results = {part["name"]: part["result"] for part in summary["parts"]}
    assert results == dict.fromkeys(
        [
            *("facts", "tests rehearsal", "steps", "all_reduce", "train mnist_cnn"),
            *("topo", "topo lint", "topo place", "topo limit", "check"),
        ],
        "passed",
    )
    assert summary["facts"]["torch"]
    tests = next(part["tests"] for part in summary["parts"] if "tests" in part)
    assert {test["result"] for test in tests} == {"passed", "skipped"}
    kinds = [record.kind for record in read_records(tmp_path / "records.jsonl")]
    assert kinds == ["training_step", "bench", "bench_train"]
    # So few and small that any machine gives them back.
    files = list(tmp_path.rglob("*"))
    assert len(files) <= 8
    assert all(file.stat().st_size < 1 << 20 for file in files)
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {name} | passed |" in report for name in results)
    for title in ("A step of mnist_cnn, 1 ranks", "all_reduce, 2 ranks, auto"):
        assert f"## {title}\n" in report


HANGS = """\
import subprocess, sys, time
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
print("left", child.pid)
time.sleep(600)
"""
PARTS = [
    ("hangs", "tests", HANGS, 1.0),
    ("fails", "tests", "exit('no')", 30.0),
    ("floods", "tools", "print('y' * 3000000)", 30.0),
    ("gives up", "tools", "exit(77)", 30.0),
    ("passes", "facts", "print(7)", 30.0),
]


def test_a_part_that_hangs_or_fails_loses_nothing_of_the_others(tmp_path):
    parts = [
        {"name": name, "log": log, "words": ["-c", program], "limit_s": limit_s}
        for name, log, program, limit_s in PARTS
    ]
    file = tmp_path / "parts.json"
    file.write_text(json.dumps(parts))
    out = tmp_path / "out"
    ended = run("--rehearse", "--out", str(out), "--parts", str(file), timeout_s=HANG_S)
    assert (ended.returncode, ended.stderr) == (1, "")
    summary = json.loads((out / "summary.json").read_text())
    assert [part["result"] for part in summary["parts"]] == [
        *("ran over", "failed", "passed", "skipped", "passed")
    ]
    words = [part.get("words") for part in summary["parts"]]
    left = re.fullmatch(r"killed after 1 s; left (\d+)", words[0])
    assert left is not None
    assert not Path("/proc", left[1]).exists()
    assert words[1] == "exit code 1; no"
    assert "| hangs | ran over |" in (out / "report.md").read_text()
    assert "\n7\n" in (out / "facts.log").read_text()
    assert (out / "tools.log").stat().st_size < 2 << 20


def test_a_signal_ends_the_part_that_runs_too(tmp_path):
    part = {"name": "hangs", "log": "tests", "words": ["-c", HANGS], "limit_s": 60.0}
    file = tmp_path / "parts.json"
    file.write_text(json.dumps([part]))
    log = tmp_path / "tests.log"
    with start("--rehearse", "--out", str(tmp_path), "--parts", str(file)) as process:
        while not (left := re.search(r"^left (\d+)$", read(log), re.MULTILINE)):
            assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not Path("/proc", left[1]).exists()


def read(path):
    return path.read_text() if path.exists() else ""


def test_all_that_the_gpu_tests_import_is_packed():
    """Whatever they import is the standard library's, torch's, or in a wheel."""
    to_read = [*ROOT.glob("tests/gpu/*.py"), ROOT / "tests" / "conftest.py"]
    read, foreign = set(), set()
    while to_read:
        file = to_read.pop()
        if file in read or not file.exists():
            continue
        read.add(file)
        for name in imports_of(file):
            top = name.partition(".")[0]
            if top == "tests":
                to_read.append(ROOT / f"{name.replace('.', '/')}.py")
            elif top not in sys.stdlib_module_names:
                foreign.add(top)
    assert len(read) > 10
    assert foreign - OF_TORCH <= set(WANTED.values())


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_the_wheels_need_is_packed_too():
    needed = {"ronde", *WANTED}
    on_the_machine = {"python_version": PYTHON, "sys_platform": "linux", "extra": ""}
    for name in [*needed]:
        for text in requires(name) or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate(on_the_machine):
                needed.add(need.name)
    packed = {name.lower() for name in WANTED} | OF_TORCH
    assert {name.lower() for name in needed} <= packed


def test_every_pinned_wheel_is_for_one_python_and_old_enough_a_system():
    pins = (ROOT / "constraints.txt").read_text()
    assert all(re.search(rf"^{name}==", pins, re.MULTILINE) for name in WANTED)
    assert "2_28" in PLATFORMS  # torch's own wheels need as much


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_each_part_for_gpus_is_there_and_all_test_files_have_one(tmp_path, num_gpus):
    parts = gpu_parts(tmp_path, num_gpus)
    files = {word for part in parts for word in part.words if word.startswith("tests/")}
    there = {f"tests/gpu/{file.name}" for file in ROOT.glob("tests/gpu/test_*.py")}
    assert files == there
    scripts = [word for part in parts for word in part.words if word.endswith(".py")]
    assert all((ROOT / script).is_file() for script in scripts)
    assert len({part.name for part in parts}) == len(parts)
