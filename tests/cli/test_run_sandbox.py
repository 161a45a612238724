"""Where the kernel shows or allows less: programs run, or are refused in a sentence."""

import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.limits import HANG_S
from tests.namespaces import why_not
from tests.soak.launch_faults import FAULTS, Tally, run_once

from ronde.world import boot_identity, network_identity

SPACE = ("unshare", "--user", "--map-root-user", "--mount")
NO_BOOT_NAME = (*SPACE, "sh", "-c", 'mount -t tmpfs none /proc/sys && exec "$@"', "sh")
NO_PROCESSES = (*SPACE, "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
OTHERS_PROCESSES = (*SPACE, "--pid", "--fork", "--kill-child")
PROGRAM = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def in_sandbox(*words, space=NO_BOOT_NAME):
    """Run words where ``/proc`` shows less than elsewhere."""
    if reason := why_not(space):
        pytest.skip(reason)
    return subprocess.run(
        [*space, *words], capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_ranks_run_where_the_boot_has_no_name():
    command = (sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix", "--")
    done = in_sandbox(*command, sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_processes_of_one_machine_agree_on_it():
    code = "from ronde.world import network_identity; print(network_identity())"
    words = (sys.executable, "-c", code)
    here = subprocess.run(words, capture_output=True, text=True, check=True)
    assert here.stdout.strip() == network_identity()
    hidden = in_sandbox(*words)
    assert hidden.returncode == 0, hidden.stderr
    assert hidden.stdout.strip().rpartition("/")[2] == network_identity().split("/")[1]
    assert boot_identity() not in hidden.stdout


@pytest.mark.parametrize(
    "name",
    [
        "process number is recycled",
        "pidfd_open gives ENOSYS",
        "pidfd_open gives EPERM",
        "Horovod's API: slow exit 93, the other exits 7 in silence",
        "slow exit, the peers report it and exit 7",
    ],
)
def test_a_failed_job_names_the_cause_and_leaves_nothing(name):
    """The other faults are in ``scripts/soak``."""
    [fault] = [fault for fault in FAULTS if fault.name == name]
    if not fault.is_possible():
        pytest.skip("this machine does not allow it")
    tally = Tally()
    run_once(fault, tally)
    assert not tally.wrong


@pytest.mark.parametrize("space", [NO_PROCESSES, OTHERS_PROCESSES])
def test_nothing_starts_where_proc_does_not_show_the_processes(tmp_path, space):
    # Without it nobody can find what the ranks leave behind.
    program = ("/bin/sh", "-c", "touch started; setsid sleep 1000 &")
    run = (sys.executable, "-m", "ronde", "run", "-n", "2", "--chdir", str(tmp_path))
    done = in_sandbox(*run, "--", *program, space=space)
    assert done.returncode == 64
    assert done.stderr.startswith("ronde: /proc belongs to another pid namespace")
    assert done.stderr.endswith(" Type: mount -t proc proc /proc\n")
    assert not list(tmp_path.iterdir())


def limit_open_files(soft, hard):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("limit", "size", "said"),
    [
        (12, 2, "must be at least 24 to run a job, got 12. Type: ulimit -n 4096"),
        (40, 10, "must be at least 64 for 10 ranks on a host, got 40. Type: ulimit -n"),
    ],
)
def test_too_few_open_files_are_told_before_anything_starts(
    ronde, tmp_path, limit, size, said
):
    words = ("run", "-n", str(size), "/usr/bin/touch", str(tmp_path / "started"))
    done = ronde(*words, preexec_fn=limit_open_files(limit, limit))
    assert done.returncode == 64
    assert done.stderr.startswith(b"ronde: limit of open files " + said.encode())
    assert done.stderr.count(b"\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.waits
def test_many_hosts_need_no_higher_limit_of_open_files(ronde):
    hosts = ",".join(f"n{number}.invalid" for number in range(24))
    done = ronde("run", "-H", hosts, "true", preexec_fn=limit_open_files(40, 400))
    assert done.returncode == 69
    assert b"open files" not in done.stderr.lower()


@pytest.mark.parametrize("limit", [1, 3, 6])
def test_too_few_processes_are_told_and_none_is_left(limit):
    # Of a user of its own, whose processes alone count, and who may read Python.
    capability = "+dac_read_search"
    user = ("setpriv", "--reuid", "61234", "--clear-groups")
    space = (*user, "--inh-caps", capability, "--ambient-caps", capability)
    program = (sys.executable, "-m", "ronde", "run", "-n", "4", "sleep", "1000")
    done = in_sandbox("prlimit", f"--nproc={limit}", *program, space=space)
    assert done.returncode == 70
    text = f"limit of processes of this user is reached: {limit} (ulimit -u). Raise"
    assert done.stderr.startswith(f"ronde: {text}")
    assert done.stderr.count("\n") == 1
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError):
            left += [path] if path.stat().st_uid == 61234 else []
    assert not left
