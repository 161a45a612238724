"""Put above the tests: writes each outcome to a file, and leaves Muon out."""

import json
from pathlib import Path

import pytest
import torch

from ronde.launch.environments import own_environment

# Some of Horovod's tests try every optimizer of torch.optim on parameters of one
# dimension, which this one refuses; they look for optimizers by their module's name.
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "excluded.muon"

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
