"""``ronde ps``, ``ronde why`` and ``why --slow`` for a job on three hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S, until
from tests.timed import impatient_ronde

pytestmark = pytest.mark.waits

RANK = """
import signal
import torch
import torch.distributed as dist
import ronde
dist.init_process_group("ronde")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
dist.all_reduce(torch.ones(1))
ronde.progress(step=7 + dist.get_rank(), loss=0.5)
print("there", flush=True)
if dist.get_rank() == 2:
    signal.sigwait([signal.SIGUSR1])
step = 10
while True:
    dist.all_reduce(torch.ones(1 << 18))
    step += 1
    ronde.progress(step=step)
"""
ENV = {"PATH": os.defpath, "HOME": str(Path.home())}


def ask(cluster, *words):
    command = [sys.executable, "-m", "ronde", *words, "--json"]
    done = cluster.run(cluster.hosts[0], command, env=ENV, timeout_s=HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ps(cluster):
    return [job for job in ask(cluster, "ps")["jobs"] if job["command"][-1] == RANK]


def find_slow_link(cluster, name):
    links = []

    def is_found():
        found = ask(cluster, "why", "--slow", name)["faults"]
        links.extend(each for each in found if each["kind"] == "link")
        return links

    until(is_found)
    return links[0]


def test_ranks_of_all_hosts_are_listed_and_judged_where_the_job_was_started(cluster):
    words = [*impatient_ronde(), "run", "-H", "node1:1,node2:1,node3:1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--grace", "2s"]
    with cluster.start(
        cluster.hosts[0],
        [*words, "--no-prefix", "--", sys.executable, "-c", RANK],
        env=ENV,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert [process.stdout.readline() for _ in range(3)] == ["there\n"] * 3
            jobs = []
            # The call is reported after a second, and then by rank 2 that it is not in.
            while not any(job["awaited_ranks"] == {"0": [2], "1": [2]} for job in jobs):
                assert process.poll() is None
                jobs = ps(cluster)
            workers = jobs[0]["workers"]
            hosts = [each["host"] for each in workers]
            assert hosts == ["node1", "node2", "node3"]
            assert [each["status"]["step"] for each in workers] == [7, 8, 9]
            assert workers[2]["status"]["progress"] == {"loss": 0.5}
            name = jobs[0]["job_id"]
            faults = []
            while not faults:  # a wait of less than three seconds is no hang
                found = ask(cluster, "why", name)
                faults = found["verdict"]["faults"]
            (fault,) = faults
            assert found["verdict"]["waits"][0]["collective"]["sequence"] == 2
            assert (fault["kind"], fault["ranks"]) == ("sleeping", [2])
            assert "(node3, pid " in fault["text"]
            assert "<string>:12" in fault["text"]
            assert found["silent_hosts"] == []

            cluster.slow_down(cluster.hosts[1], "40mbit")
            pid = str(workers[2]["pid"])
            cluster.run(cluster.hosts[2], ["kill", "-USR1", pid])
            link = find_slow_link(cluster, name)
            assert link["ranks"] == [1]
            assert "The link of node2 is slow" in link["text"]
        finally:
            process.terminate()
            assert process.wait(HANG_S) == 143
            cluster.slow_down(cluster.hosts[1], cluster.rate)
