"""``ronde run --preflight`` makes the checks of ``ronde check`` before a job."""

import subprocess
import sys

import pytest
from tests.namespaces import why_not

FAULT = {"GLOO_SOCKET_IFNAME": "nosuch"}


def test_a_job_starts_where_hosts_are_ready(ronde):
    done = ronde("run", "-n", "2", "--preflight", "echo", "there")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"[0] there\n[1] there\n"


def test_what_a_check_finds_ends_the_start(ronde):
    done = ronde("run", "-n", "2", "--preflight", "echo", env=FAULT)
    assert (done.returncode, done.stdout) == (69, b""), done.stderr
    assert b"GLOO_SOCKET_IFNAME=nosuch: no nosuch is among" in done.stderr


def test_a_host_that_is_not_ready_starts_without_preflight(ronde):
    done = ronde("run", "-n", "1", "echo", env=FAULT)
    assert done.returncode == 0


ORPHAN = """
import os, subprocess, sys
read, write = os.pipe()
marked = {"RONDE_COOKIE": "x", "PATH": os.environ["PATH"]}
go = "echo $$; exec sleep 60"
subprocess.run(["sh", "-c", f"sh -c '{go}' >&{write} &"], pass_fds=[write], env=marked)
lost = int(os.read(read, 100))
from ronde.launch.process_tree import read_process
while read_process(lost).parent != 1:
    pass
from ronde.check.storage import find_leftovers
found = find_leftovers()
print(found["num"], found["pids"] == str(lost))
"""


def test_a_process_of_a_job_that_nobody_looks_after_is_found():
    """In a process table of its own, where an orphan is a child of number 1."""
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if reason := why_not(space):
        pytest.skip(reason)
    words = [*space, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", ORPHAN]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "1 True\n", done.stderr
