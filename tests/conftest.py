"""The fixtures of all tests that need more than one process."""

import compileall
import gc
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests import ranks

from ronde.launch import own_environment

# Behind a shell's ``&``, or nohup, they are ignored, and commands would keep it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

PACKAGE = Path(__file__).parents[1] / "src" / "ronde"


def pytest_addoption(parser):
    parser.addoption("--times", type=int, default=1, help="so many times as long")


def pytest_configure(config):
    """Have Hypothesis draw examples.

    A machine that others use too may take a second over any one. One run of CI is like
    the other; anywhere else each run draws anew.
    """
    times = config.getoption("times")
    settings.register_profile(
        "shared machine",
        max_examples=40 * times,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=times == 1 and "CI" in own_environment(),
    )
    settings.load_profile("shared machine")


def pytest_sessionstart():
    """Compile once what hundreds of processes import.

    Where ``PYTHONDONTWRITEBYTECODE`` is set, each of them would compile it by itself.
    """
    compileall.compile_dir(PACKAGE, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave tests that are yet to run out of all collections of garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def run_ranks():
    """Return ``run_ranks(size, fn, *args, timeout_s=60)``: see ``tests/ranks.py``."""
    return ranks.run_ranks


@pytest.fixture(scope="session")
def run_ranks_bare():
    """Return ``run_ranks_bare(size, fn, ...)``, for tests of ``init()`` itself."""
    return ranks.run_ranks_bare
