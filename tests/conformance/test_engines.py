"""One suite over every engine and size."""

from functools import partial

import pytest
from tests.conformance.data_movement import MOVEMENTS
from tests.conformance.engines import LONG, SETTINGS
from tests.conformance.places import PLACES
from tests.conformance.reductions import REDUCTIONS
from tests.conformance.refusals import REFUSALS
from tests.conformance.samples import ALL_CASES, keep

SUITE = {
    "reductions": REDUCTIONS,
    "movements": MOVEMENTS,
    "refusals": REFUSALS,
    "places": PLACES,
}

LIMIT_S = 200.0
MINDFUL = ("shared_memory", "auto", "hierarchical")


def run_checks(communicator, checks, *, share=ALL_CASES):
    """Run all checks in order on a share of their cases; return their names."""
    keep(share)
    own = communicator.duplicate()
    for check in checks:
        check(own, "cpu")
    own.close()
    return [check.__name__ for check in checks]


def parts_of(setting):
    # Only these depend on a tensor's memory; Gloo shows that the checks are right.
    if setting.engine in MINDFUL or (setting.engine, setting.size) == ("gloo", 2):
        return list(SUITE)
    return [part for part in SUITE if part != "places"]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "setting",
    [*SETTINGS, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)],
    ids=str,
)
def test_engine(run_ranks, setting):
    """Starting a process costs more than most checks, so one runs all of them."""
    checks = [check for part in parts_of(setting) for check in SUITE[part]]
    names = run_ranks(
        setting.size,
        partial(run_checks, share=setting.share),
        checks,
        timeout_s=LIMIT_S,
        connecting=setting,
    )
    assert names == [[check.__name__ for check in checks]] * setting.size
