"""What is looked at on a host before ranks start, and what is said of it."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, strategies as st
from tests.namespaces import why_not

from ronde.launch import readiness
from ronde.launch.readiness import Finding, check_here, judge

GIB = 1 << 30
FIT = (
    Finding(readiness.CLOCK, 1_800_000_000_000),
    Finding(readiness.SHARED_MEMORY, 8 * GIB, "/dev/shm"),  # noqa: S108
    Finding(readiness.OPEN_FILES, 65536),
    Finding(readiness.LOCKED_MEMORY, readiness.UNLIMITED),
    Finding(readiness.DISK, 100 * GIB, "/logs"),
    Finding(readiness.OWN_NAME, 1, "node1"),
    Finding(readiness.LEFTOVERS, 0),
)


def but(name, amount, detail=""):
    return tuple(
        Finding(name, amount, detail or f.detail) if f.name == name else f for f in FIT
    )


def said(*hosts):
    return judge({f"node{i}": found for i, found in enumerate(hosts, 1)})


def the_remark(*hosts):
    (remark,) = said(*hosts)
    return remark


def test_nothing_is_said_of_hosts_that_are_fit():
    assert said(FIT, FIT, FIT) == ()
    assert judge({}) == ()


def test_every_thing_is_looked_at_on_this_host(tmp_path):
    found = {f.name: f for f in check_here(str(tmp_path))}
    assert list(found) == [f.name for f in FIT]
    assert abs(found[readiness.CLOCK].amount - time.time() * 1000) < 60_000
    free = os.statvfs(tmp_path)
    assert found[readiness.DISK].amount <= free.f_blocks * free.f_frsize
    assert found[readiness.OPEN_FILES].amount > 0
    missing = {f.name: f for f in check_here(str(tmp_path / "missing"))}
    assert missing[readiness.DISK].amount == readiness.UNREADABLE


def test_what_is_not_readable_is_not_bad():
    unreadable = tuple(Finding(f.name, readiness.UNREADABLE, f.detail) for f in FIT)
    assert said(unreadable, unreadable, FIT) == ()


def test_a_clock_that_is_apart_from_the_others_is_told():
    remark = the_remark(FIT, FIT, but(readiness.CLOCK, 1_800_000_009_500))
    assert (remark.host, remark.text) == ("node3", "its clock is +9.5 s off")
    assert not remark.is_bad


def test_less_than_most_have_is_told():
    remark = the_remark(FIT, but(readiness.LOCKED_MEMORY, 1 << 23), FIT)
    words = "8MiB of locked memory where most hosts have any amount"
    assert (remark.host, remark.text, remark.is_bad) == ("node2", words, False)
    remark = the_remark(FIT, but(readiness.OPEN_FILES, 20_000), FIT)
    assert remark.text == "20000 of open files where most hosts have 65536"


def test_of_two_hosts_neither_is_the_rule():
    assert said(FIT, but(readiness.LOCKED_MEMORY, 1 << 23)) == ()


def test_too_little_is_bad_on_all_hosts_alike():
    little = but(readiness.SHARED_MEMORY, 1 << 20)
    remarks = said(little, little)
    assert [r.host for r in remarks] == ["node1", "node2"]
    assert all(r.is_bad for r in remarks)
    assert remarks[0].text == "1MiB of shared memory in /dev/shm"
    assert "docker run --shm-size" in remarks[0].cure
    assert not the_remark(but(readiness.SHARED_MEMORY, GIB // 2)).is_bad
    # What Docker gives is too little here, as it is to ronde check.
    assert the_remark(but(readiness.SHARED_MEMORY, 64 << 20)).is_bad


def test_what_is_bad_comes_first():
    odd = but(readiness.OWN_NAME, 0)
    left = but(readiness.LEFTOVERS, 2, "17 18")
    remarks = said(odd, left)
    assert [(r.host, r.is_bad) for r in remarks] == [("node2", True), ("node1", False)]
    assert remarks[0].cure == "Type there: kill -9 17 18"


ORPHAN = """
import os, subprocess, sys
read, write = os.pipe()
marked = {"RONDE_COOKIE": "x", "PATH": os.environ["PATH"]}
go = "echo $$; exec sleep 60"
subprocess.run(["sh", "-c", f"sh -c '{go}' >&{write} &"], pass_fds=[write], env=marked)
lost = int(os.read(read, 100))
from ronde.launch.lineage import read_process
while read_process(lost).parent != 1:
    pass
from ronde.launch.readiness import LEFTOVERS, check_here
(found,) = [f for f in check_here("/") if f.name == LEFTOVERS]
print(found.amount, found.detail == str(lost))
"""


def test_a_process_of_a_job_that_nobody_looks_after_is_found():
    """In a process table of its own, where an orphan is a child of number 1."""
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if reason := why_not(space):
        pytest.skip(reason)
    words = [*space, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", ORPHAN]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "1 True\n", done.stderr


FINDINGS = st.lists(
    st.builds(
        Finding,
        st.sampled_from([f.name for f in FIT]),
        st.integers(-1, 1 << 63),
        st.text(max_size=5),
    ),
    max_size=8,
)


@given(st.dictionaries(st.text(max_size=5), FINDINGS, max_size=5))
def test_every_remark_is_of_a_host_that_was_looked_at(found):
    for remark in judge(found):
        assert remark.host in found
        assert remark.text
        assert remark.cure
