"""What is started under a binding has it, and nobody else does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.launch.agent import ranks
from ronde.launch.agent.ranks import inherited_binding
from ronde.topology.cpu_sets import format_list
from ronde.topology.machine import UNKNOWN_NODE

ALLOWED = sorted(os.sched_getaffinity(0))

needs_policy = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists() or os.uname().machine not in ranks._CALLS,
    reason="this kernel shows no memory policy",
)


def child_cpus() -> str:
    return _child("grep ^Cpus_allowed_list: /proc/self/status").split()[1]


def child_policies() -> set[str]:
    return {line.split()[1] for line in _child("cat /proc/self/numa_maps").splitlines()}


def _child(command: str) -> str:
    done = subprocess.run(
        command.split(), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_a_child_has_the_cpus_and_the_parent_its_own_again():
    with inherited_binding([ALLOWED[-1]], UNKNOWN_NODE) as refused:
        assert child_cpus() == str(ALLOWED[-1])
    assert refused == ""
    assert child_cpus() == format_list(ALLOWED)


def test_no_cpus_leave_them_as_they_are():
    with inherited_binding([], UNKNOWN_NODE) as refused:
        assert child_cpus() == format_list(ALLOWED)
    assert refused == ""


def test_an_error_inside_is_passed_on_after_the_binding_was_undone():
    with pytest.raises(OSError, match="inside"), inherited_binding(ALLOWED[:1], -1):
        raise OSError("inside")
    assert os.sched_getaffinity(0) == set(ALLOWED)


def test_cpus_that_are_not_there_are_told_of_and_the_rest_is_used():
    with inherited_binding([ALLOWED[0], 1023], UNKNOWN_NODE) as refused:
        assert child_cpus() == str(ALLOWED[0])
    assert refused == "CPUs 1023: not in the cpuset"
    with inherited_binding([1023], UNKNOWN_NODE) as refused:
        assert child_cpus() == format_list(ALLOWED)
    assert refused == "CPUs 1023: Invalid argument"


@needs_policy
def test_a_childs_memory_prefers_the_node_and_the_parents_does_not():
    with inherited_binding([], 0) as refused:
        assert child_policies() == {"prefer:0"}
    assert refused == ""
    assert child_policies() == {"default"}


@needs_policy
def test_a_node_that_is_not_there_is_told_of_and_binds_nothing():
    with inherited_binding([], 900) as refused:
        assert child_policies() == {"default"}
    assert refused == "memory node 900: Invalid argument"


@needs_policy
def test_a_policy_that_was_set_before_stays():
    code = (
        "import subprocess\nfrom ronde.launch.agent import ranks\n"
        "interleave = 3\n"
        "assert ranks._set_policy(interleave, 0) == 0\n"
        "with ranks.inherited_binding([], 0):\n"
        "    subprocess.run(['cat', '/proc/self/numa_maps'], check=True)\n"
        "print('-')\n"
        "subprocess.run(['cat', '/proc/self/numa_maps'], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    inside, after = done.stdout.split("-\n", 1)
    for maps in (inside, after):
        assert {line.split()[1] for line in maps.splitlines()} == {"interleave:0"}
