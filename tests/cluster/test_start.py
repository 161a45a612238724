"""How long ``ronde run`` takes to start: the benchmarks of it, in short.

At length, beside other launchers: ``python benchmarks/cluster_start.py`` and
``python benchmarks/launch_start.py``. Here they have ``ronde run`` alone, and any time
is right that is no hang.
"""

import json
import subprocess
import sys

import pytest
from tests.cluster.machines import ROOT, why_not
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

RONDE = "ronde run"


def figures(script, *words):
    """Run a benchmark for one round; return its last line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--rounds", "1", *words],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert RONDE in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_the_start_on_three_hosts_and_of_256_ranks_on_eight():
    told = figures("cluster_start.py", "--alone", "--many", "1")
    times = [*told["seconds"].pop(RONDE), *told["many_s"]]
    assert told["seconds"] == {}
    assert len(times) == 2
    assert all(times), "it did not end in time"


def test_the_start_on_one_host():
    told = figures("launch_start.py", "--alone")
    assert list(told["median_s"]) == list(told["median_cpu_s"]) == [RONDE]
    assert told["median_cpu_s"][RONDE] > 0
    assert told["median_s"][RONDE] > 0
