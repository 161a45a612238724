"""Put above the tests: writes each outcome to a file, and makes them run as they are.

Muon is left out; the elastic tests that Horovod skips for faults of its own are run.
PyTorch's tests fork their ranks.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ronde.launch.environments import own_environment

# Some of Horovod's tests try every optimizer of torch.optim on parameters of one
# dimension, which this one refuses; they look for optimizers by their module's name.
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "excluded.muon"

# They set how many hosts Horovod waits for at the start; ronde never waits for two.
_gloo_run = ModuleType("horovod.runner.gloo_run")
_gloo_run.__dict__["_get_min_start_hosts"] = lambda _: 1
# And constants of Horovod's own driver, which ronde does not have.
_DRIVER = "horovod.runner.elastic.driver"
_SKIPPED = (
    "test_all_hosts_blacklisted",
    "test_fault_tolerance_without_scaling",
    "test_single_rank_failure",
)

_ENVIRONMENT = own_environment()
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
_RANK = next((_ENVIRONMENT[n] for n in _RANK_VARIABLES if n in _ENVIRONMENT), "0")
_FILE = Path(_ENVIRONMENT["UPSTREAM_TESTS_OUTCOMES"]) / _RANK


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append one line for each test that is over, so that a dying rank leaves some."""
    is_over = report.when == "call" or report.outcome != "passed"
    if is_over:
        line = {"test": report.nodeid, "outcome": report.outcome}
        with _FILE.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_pycollect_makeitem(name: str, obj: object) -> None:
    """Let the tests of the base class stand for those that only skip."""
    if name in ("ElasticTorchTests", "ElasticTensorFlow2Tests"):
        import horovod.runner.elastic

        sys.modules[_gloo_run.__name__] = horovod.runner.gloo_run = _gloo_run
        driver = import_module("ronde.cli.horovod_launch")
        driver.__dict__["ELASTIC_TIMEOUT_SECS"] = 600
        sys.modules[_DRIVER] = horovod.runner.elastic.driver = driver
        for test in _SKIPPED:
            if test in vars(obj):
                delattr(obj, test)


if "UPSTREAM_TESTS_TORCH" in _ENVIRONMENT:
    from torch.testing._internal import common_distributed

    def _fork(self: common_distributed.MultiProcessTestCase) -> None:
        """Start ranks that have torch already: to import it takes them seconds."""
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = _fork  # noqa: SLF001
