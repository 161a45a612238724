"""The conformance table of all front ends, over NumPy, which needs no framework."""

import pytest
from tests.frameworks.conformance import check_front_ends
from tests.ranks import run_ranks_bare
from tests.session.test_front_ends import DYNAMIC


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_table_over_numpy(size):
    run_ranks_bare(size, lambda _: check_front_ends(["numpy"]), environment=DYNAMIC)
