"""Ranks of Horovod's API: the one that failed first is named, however slow its exit.

Other programs: ``tests/soak/launch_fault_kinds.py``.
"""

import json
import subprocess
import sys

import pytest
from tests.limits import HANG_S

# The exit of rank 1 goes on for long after it has told the others.
PROGRAM = """
import atexit, os, sys, time
atexit.register(time.sleep, 0.5)
import torch
import horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1), name="first")
if hvd.rank() == 1:
    {fail}
try:
    hvd.allreduce(torch.ones(1), name="second")
except Exception:
    {survive}
"""


@pytest.mark.parametrize(
    ("fail", "survive", "expected"),
    [
        ("raise ValueError('the real cause')", "os._exit(7)", 1),
        ("hvd.shutdown(); sys.exit(93)", "raise", 93),
    ],
)
def test_who_said_goodbye_first_is_the_cause(tmp_path, fail, survive, expected):
    program = PROGRAM.format(fail=fail, survive=survive)
    report = tmp_path / "report"
    options = ("-n", "2", "--error-file", str(report), "--grace", "10s")
    command = (sys.executable, "-m", "ronde", "run", *options, "--")
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    cause = json.loads(report.read_text())["verdict"]["cause"]
    assert (done.returncode, cause["rank"]) == (expected, 1), done.stderr
    assert ("ValueError: the real cause" in done.stderr) is (expected == 1)
