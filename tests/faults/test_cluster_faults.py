"""A short run of the loop that breaks jobs on three hosts: every fault once.

The long one: ``python benchmarks/cluster_faults.py --runs 300``.
"""

import pytest
from tests.cluster.machines import why_not
from tests.faults.fault_loops import fault_names, run_loop


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.parametrize("name", fault_names("cluster_faults"))
def test_the_end_is_right_on_all_hosts_and_nothing_is_left(name):
    told = run_loop("cluster_faults", "--runs", "1", "--only", name)
    fault, total = told["rows"]
    assert (fault["fault"], fault["runs"], fault["wrong"]) == (name, 1, 0)
    assert total["max_s"] == fault["max_s"]
