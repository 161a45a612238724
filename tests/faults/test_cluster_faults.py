"""A short run of the loop that breaks jobs on three hosts: every fault once.

The long one: ``python benchmarks/cluster_faults.py --runs 300``.
"""

import random

import pytest
from tests.cluster.machines import machines, why_not
from tests.faults.fault_loops import load_script, run_loop

SCRIPT = load_script("cluster_faults")
pytestmark = pytest.mark.skipif(
    bool(why_not()), reason=why_not() or "hosts can be made"
)


@pytest.fixture(scope="module")
def hosts():
    """Return three hosts; the loop leaves them as they were, and so says the script."""
    with machines(3) as cluster:
        yield cluster


@pytest.mark.parametrize("fault", SCRIPT.FAULTS, ids=lambda fault: fault.name)
def test_the_end_is_right_on_all_hosts_and_nothing_is_left(hosts, fault):
    tally = SCRIPT.Tally()
    SCRIPT.run_once(hosts, fault, tally, random.Random(fault.name))
    assert tally.wrong == []
    assert len(tally.seconds) == 1


def test_the_loop_tells_what_came_of_it():
    told = run_loop("cluster_faults", "--runs", "1", "--only", "Ctrl-C")
    fault, total = told["rows"]
    assert (fault["fault"], fault["runs"], fault["wrong"]) == ("Ctrl-C", 1, 0)
    assert total["max_s"] == fault["max_s"]
