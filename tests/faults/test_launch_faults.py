"""A short run of the loop that breaks jobs: every fault once or twice.

The long one: ``python benchmarks/launch_faults.py --rounds 40``.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "launch_faults.py"


def _fault_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("launch_faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [fault.name for fault in module.FAULTS]


@pytest.mark.parametrize("name", _fault_names())
def test_the_exit_code_is_right_and_nothing_is_left(name):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "2", "--only", name],
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    (fault,) = json.loads(done.stdout.splitlines()[-1])["faults"]
    assert (fault["runs"], fault["right"], fault["leftovers"]) == (2, 2, 0)
