"""A short run of the loop that breaks jobs: every fault once that takes no long.

The long one: ``python benchmarks/launch_faults.py --rounds 11 --jobs 3``.
"""

import pytest
from tests.faults.fault_loops import load_script, run_loop

SCRIPT = load_script("launch_faults")
# All of them run before the first test is judged.
pytestmark = pytest.mark.timeout(400)
FAULTS = [fault for fault in SCRIPT.FAULTS if not fault.is_long]


@pytest.fixture(scope="module")
def tallies():
    """Run all; most of them wait, so that several at a time take little longer."""
    return SCRIPT.run_all(FAULTS, num_rounds=1, num_jobs=3)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_code_cause_and_words_are_right_and_nothing_is_left(tallies, fault):
    if fault.name not in tallies:
        pytest.skip("not possible on this machine")
    tally = tallies[fault.name]
    assert tally.wrong == []
    assert (tally.runs, tally.leftovers) == (1, 0)


def test_the_loop_reports_what_came_of_it():
    (fault,) = run_loop("launch_faults", "--rounds", "2", "--only", "os._exit")[
        "faults"
    ]
    assert (fault["runs"], fault["right"], fault["leftovers"]) == (2, 2, 0)
