"""The directory that a job runs in: where it is, and when it goes away."""

import sys

import pytest

from ronde.launch import resolve_program

# Rank 1 goes on when rank 0 has been reaped.
LEAVE_AND_REMOVE = """
import os, time
if os.environ["RANK"] == "0":
    print(os.getpid(), file=open(os.environ["PID_FILE"] + ".new", "w"))
    os.rename(os.environ["PID_FILE"] + ".new", os.environ["PID_FILE"])
    os.rmdir(os.environ["PWD"])
else:
    while not os.path.exists(os.environ["PID_FILE"]):
        time.sleep(0.01)
    pid = open(os.environ["PID_FILE"]).read().strip()
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)
    print("still here", flush=True)
"""

TELL_AND_FAIL = "import os, sys; print(os.getcwd(), flush=True); sys.exit(1)"


@pytest.fixture
def nowhere(tmp_path):
    """Return what makes a process start in a directory that is gone."""
    directory = tmp_path / "gone"
    directory.mkdir()
    # It is called in the process, which is in the directory already.
    return {"cwd": directory, "preexec_fn": directory.rmdir}


def test_a_rank_that_removes_its_directory_ends_no_other(ronde, tmp_path):
    directory = tmp_path / "gone"
    directory.mkdir()
    done = ronde(
        *("run", "-n", "2", "--", sys.executable, "-I", "-S", "-c", LEAVE_AND_REMOVE),
        env={"PID_FILE": str(tmp_path / "pid")},
        cwd=directory,
    )
    assert (done.returncode, done.stdout) == (0, b"[1] still here\n"), done.stderr
    assert not directory.exists()


def test_ranks_that_start_again_start_in_the_same_directory(ronde, tmp_path):
    directory = tmp_path / "inner"
    directory.mkdir()
    done = ronde(
        *("run", "-n", "1", "--no-prefix", "--chdir", "inner", "--max-restarts", "2"),
        *("--", sys.executable, "-I", "-S", "-c", TELL_AND_FAIL),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.decode().splitlines() == [str(directory)] * 3


@pytest.mark.parametrize(
    "words",
    [
        ["run", "true"],
        ["run", "--chdir", "inner", "true"],
        ["run", "--log-dir", "logs", "true"],
        ["run", "--error-file", "end.json", "true"],
        ["run", "--timeline", "trace.json", "true"],
        ["check", "--path", "."],
    ],
)
def test_a_directory_that_is_gone_gets_one_sentence(
    ronde_here, tmp_path, monkeypatch, words
):
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    done = ronde_here(*words)
    assert (done.returncode, done.stdout) == (64, b"")
    [sentence] = done.stderr.decode().splitlines()
    assert sentence.startswith("ronde: cannot use the current directory: no such file")


def test_a_job_that_names_another_directory_starts(ronde, nowhere, tmp_path):
    words = ["run", "-n", "1", "--preflight", "--chdir", str(tmp_path), "--", "pwd"]
    done = ronde(*words, **nowhere)
    assert (done.returncode, done.stdout) == (0, f"[0] {tmp_path}\n".encode())


def test_a_directory_of_path_that_cannot_be_entered_hides_no_program():
    closed = "/" + "too-long-a-name" * 20
    assert resolve_program(("sh",), f"{closed}:/bin") == ["/bin/sh"]


@pytest.mark.parametrize("program", ["package", "./package/", "app.pyz"])
def test_what_python_runs_needs_no_interpreter_before_it(
    tmp_path, monkeypatch, program
):
    (tmp_path / "package").mkdir()
    for path in ("package/__main__.py", "app.pyz"):
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_program((program, "7"), "/bin") == [sys.executable, program, "7"]
