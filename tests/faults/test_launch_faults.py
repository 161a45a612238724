"""A short run of the loop that breaks jobs: every fault twice.

The long one: ``python benchmarks/launch_faults.py --rounds 40``.
"""

import pytest
from tests.faults.fault_loops import load_script, run_loop

SCRIPT = load_script("launch_faults")


@pytest.mark.parametrize("name", [fault.name for fault in SCRIPT.FAULTS])
def test_the_exit_code_is_right_and_nothing_is_left(name):
    told = run_loop("launch_faults", "--rounds", "2", "--only", name)
    (fault,) = told["faults"]
    assert (fault["runs"], fault["right"], fault["leftovers"]) == (2, 2, 0)
