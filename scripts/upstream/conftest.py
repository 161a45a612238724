"""Put above Horovod's tests: writes each outcome down, and leaves Muon out."""

import json
from pathlib import Path

import pytest
import torch

from ronde.launch.environments import own_environment

# Some tests try every optimizer of torch.optim on parameters of one dimension, which
# this one refuses; they look for optimizers by the module that they say they are of.
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "excluded.muon"

_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
_SAID = own_environment()
_NUMBER = next((_SAID[name] for name in _RANK if name in _SAID), "0")
_FILE = Path(_SAID["UPSTREAM_TESTS_OUTCOMES"]) / _NUMBER


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append one line for each test that is over, so that a rank that dies has told."""
    is_over = report.when == "call" or report.outcome != "passed"
    if is_over:
        line = {"test": report.nodeid.split("::", 1)[1], "outcome": report.outcome}
        with _FILE.open("a") as file:
            file.write(json.dumps(line) + "\n")
