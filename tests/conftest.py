"""The fixtures of all tests that need more than one process."""

import compileall
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests import ranks

from ronde.launch.inherited import own_environment

# A machine that others use too may take a second over any one example. One run of CI
# is like the other; anywhere else each run draws anew.
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in own_environment(),
)
settings.load_profile("shared machine")

# Tests that run behind a shell's ``&`` have it ignored, and commands would keep it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

PACKAGE = Path(__file__).parents[1] / "src" / "ronde"


def pytest_sessionstart():
    """Compile once what hundreds of processes import.

    Where ``PYTHONDONTWRITEBYTECODE`` is set, each of them would compile it by itself.
    """
    compileall.compile_dir(PACKAGE, quiet=2)


@pytest.fixture(scope="session")
def run_ranks():
    """Return ``run_ranks(size, fn, *args, timeout_s=60)``: see ``tests/ranks.py``."""
    return ranks.run_ranks


@pytest.fixture(scope="session")
def run_ranks_bare():
    """Return ``run_ranks_bare(size, fn, ...)``, for tests of ``init()`` itself."""
    return ranks.run_ranks_bare
