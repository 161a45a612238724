"""One suite over every engine and size."""

import pytest
from tests.conformance.engines import SETTINGS
from tests.conformance.movements import MOVEMENTS
from tests.conformance.places import PLACES
from tests.conformance.reductions import REDUCTIONS
from tests.conformance.refusals import REFUSALS

SUITE = {
    "reductions": REDUCTIONS,
    "movements": MOVEMENTS,
    "refusals": REFUSALS,
    "places": PLACES,
}


MINDFUL = ("shared_memory", "auto", "hierarchical")


def run_checks(communicator, checks):
    """Run each check on a communicator of its own; return the names of all."""
    for check in checks:
        own = communicator.duplicate()
        check(own, "cpu")
        own.close()
    return [check.__name__ for check in checks]


CASES = [
    (part, setting)
    for part in SUITE
    for setting in SETTINGS
    # Only these care where a tensor lies; Gloo shows that the checks are right.
    if part != "places" or setting.engine in MINDFUL or str(setting) == "gloo-2"
]


@pytest.mark.parametrize(("part", "setting"), CASES, ids=str)
def test_engine(run_ranks, setting, part):
    """Making a process costs more than most checks, so one serves a part of them."""
    names = run_ranks(setting.size, run_checks, SUITE[part], connecting=setting)
    assert names == [[check.__name__ for check in SUITE[part]]] * setting.size
