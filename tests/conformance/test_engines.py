"""One suite over every engine and size."""

from functools import partial

import pytest
from tests.conformance.data_movement import MOVEMENTS
from tests.conformance.engines import SETTINGS
from tests.conformance.places import PLACES
from tests.conformance.reductions import REDUCTIONS
from tests.conformance.refusals import REFUSALS
from tests.conformance.samples import thin_out

SUITE = {
    "reductions": REDUCTIONS,
    "movements": MOVEMENTS,
    "refusals": REFUSALS,
    "places": PLACES,
}

LIMIT_S = 200.0
MINDFUL = ("shared_memory", "auto", "hierarchical")


def run_checks(communicator, checks, *, is_whole=True):
    """Run each check on a communicator of its own; return the names of all."""
    if not is_whole:
        thin_out(communicator.size)
    for check in checks:
        own = communicator.duplicate()
        check(own, "cpu")
        own.close()
    return [check.__name__ for check in checks]


def parts_of(setting):
    # Only these care where a tensor lies; Gloo shows that the checks are right.
    if setting.engine in MINDFUL or str(setting) == "gloo-2":
        return list(SUITE)
    return [part for part in SUITE if part != "places"]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "setting",
    [
        # On one host it is shared memory once more.
        pytest.param(s, marks=pytest.mark.long) if s.engine == "auto" else s
        for s in SETTINGS
    ],
    ids=str,
)
def test_engine(run_ranks, setting):
    """Making a process costs more than most checks, so one serves all of them."""
    checks = [check for part in parts_of(setting) for check in SUITE[part]]
    names = run_ranks(
        setting.size,
        partial(run_checks, is_whole=setting.is_whole),
        checks,
        timeout_s=LIMIT_S,
        connecting=setting,
    )
    assert names == [[check.__name__ for check in checks]] * setting.size
