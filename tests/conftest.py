"""The fixtures of all tests that need more than one process."""

import pytest
from tests import ranks


@pytest.fixture(scope="session")
def run_ranks():
    """Return ``run_ranks(size, fn, *args, timeout_s=60)``: see ``tests/ranks.py``."""
    return ranks.run_ranks


@pytest.fixture(scope="session")
def run_ranks_bare():
    """Return ``run_ranks_bare(size, fn, ...)``, for tests of ``init()`` itself."""
    return ranks.run_ranks_bare
