"""One suite over every engine and size."""

import pytest
from tests.conformance.engines import SETTINGS
from tests.conformance.reductions import REDUCTIONS


def run_all(communicator, checks, device="cpu"):
    for check in checks:
        check(communicator, device)
    return communicator.size


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("check", REDUCTIONS, ids=lambda c: c.__name__)
def test_reductions(run_ranks, setting, check):
    sizes = run_ranks(setting.size, run_all, [check], connecting=setting)
    assert sizes == [setting.size] * setting.size
