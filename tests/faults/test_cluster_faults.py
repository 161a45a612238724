"""A short run of the loop that breaks jobs on three hosts: every fault once.

The long one: ``python benchmarks/cluster_faults.py --runs 300``.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.machines import why_not

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster_faults.py"


def _fault_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("cluster_faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [fault.name for fault in module.FAULTS]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.parametrize("name", _fault_names())
def test_the_end_is_right_on_all_hosts_and_nothing_is_left(name):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "1", "--only", name],
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    fault, total = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (fault["fault"], fault["runs"], fault["wrong"]) == (name, 1, 0)
    assert total["max_s"] == fault["max_s"]
