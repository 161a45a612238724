"""``ronde why --slow`` for a job on three hosts, one of which has a slow link."""

import subprocess
import sys

import pytest
from tests.cluster.test_ps import ENV, ask
from tests.limits import HANG_S, until
from tests.timed import impatient_ronde

pytestmark = pytest.mark.waits

RANK = """
import torch
import torch.distributed as dist
import ronde
dist.init_process_group("ronde")
step = 0
while True:
    dist.all_reduce(torch.ones(1 << 18))
    step += 1
    ronde.progress(step=step)
"""


def test_the_host_with_a_slow_link_is_named(cluster):
    words = [*impatient_ronde(), "run", "-H", "node1:1,node2:1,node3:1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--grace", "2s"]
    cluster.slow_down(cluster.hosts[1], "40mbit")
    with cluster.start(
        cluster.hosts[0],
        [*words, "--", sys.executable, "-c", RANK],
        env=ENV,
        stdin=subprocess.DEVNULL,
    ) as process:
        try:
            found = {}

            def is_found():
                assert process.poll() is None
                for job in ask(cluster, "ps")["jobs"]:
                    if RANK in job["command"]:
                        faults = ask(cluster, "why", "--slow", job["job_id"])["faults"]
                        found.update({each["kind"]: each for each in faults})
                return "link" in found

            until(is_found, found)
            fault = found["link"]
            assert fault["ranks"] == [1]
            assert "The link of node2 is slow" in fault["text"]
        finally:
            process.terminate()
            assert process.wait(HANG_S) == 143
            cluster.slow_down(cluster.hosts[1], cluster.rate)
