"""What is started under a binding has it, and nobody else does."""

import os
import subprocess

import pytest
from tests.limits import HANG_S

from ronde.launch import inherited_binding
from ronde.topology import format_list

ALLOWED = sorted(os.sched_getaffinity(0))


def child_cpus() -> str:
    return _child("grep ^Cpus_allowed_list: /proc/self/status").split()[1]


def _child(command: str) -> str:
    done = subprocess.run(
        command.split(), capture_output=True, text=True, timeout=HANG_S, check=True
    )
    return done.stdout


def test_a_child_has_the_cpus_and_the_parent_its_own_again():
    with inherited_binding([ALLOWED[-1]]) as refused:
        assert child_cpus() == str(ALLOWED[-1])
    assert refused == ""
    assert child_cpus() == format_list(ALLOWED)


def test_no_cpus_leave_them_as_they_are():
    with inherited_binding([]) as refused:
        assert child_cpus() == format_list(ALLOWED)
    assert refused == ""


def test_an_error_inside_is_passed_on_after_the_binding_was_undone():
    with pytest.raises(OSError, match="inside"), inherited_binding(ALLOWED[:1]):
        raise OSError("inside")
    assert os.sched_getaffinity(0) == set(ALLOWED)


def test_cpus_that_are_not_there_are_told_of_and_the_rest_is_used():
    with inherited_binding([ALLOWED[0], 1023]) as refused:
        assert child_cpus() == str(ALLOWED[0])
    assert refused == "CPUs 1023: not in the cpuset"
    with inherited_binding([1023]) as refused:
        assert child_cpus() == format_list(ALLOWED)
    assert refused == "CPUs 1023: Invalid argument"
