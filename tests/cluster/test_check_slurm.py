"""``ronde check`` in allocations of a real Slurm: what it gave, and what is there."""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cluster.faults import in_shell
from tests.cluster.slurm import slurm, why_no_slurm

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 60.0
CPUS = len(os.sched_getaffinity(0))
MEMORY_MIB = 1000
CHECKS = "scheduler-cpus,scheduler-gpus"
WHOLE = ("--exclusive", f"--mem={MEMORY_MIB // 2}", "--time=60")


@pytest.fixture(scope="module")
def batch(three_hosts):
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm(three_hosts, cpus=CPUS, num_gpus=2, memory_mib=MEMORY_MIB) as running:
        yield running


class Checked(NamedTuple):
    """What one run came to.

    Attributes:
        facts: Of each host, those of the scheduler.
        found: What is said of hosts that is more than worth knowing.
        unread: What could not be read.
    """

    facts: dict[str, dict[str, object]]
    found: list[tuple[str, str, str, str]]
    unread: list[str]


@pytest.fixture
def check(batch, cluster):
    """Return ``check(asked, *words)``: runs it in an allocation of two hosts."""

    def check(asked, *words, **env):
        path = f"{Path(sys.executable).parent}:{batch.environment['PATH']}"
        program = [sys.executable, "-m", "ronde", "check", "--json", "--only", CHECKS]
        allocated = ["salloc", "--nodes=2", "--nodelist=node1,node2", *asked]
        env = {"PATH": path, **env}
        done = batch.run([*allocated, *program, *words], env=env, timeout_s=LIMIT_S)
        assert done.stdout, done.stderr
        told = json.loads(done.stdout)
        return Checked(
            {
                host["host"]: {
                    name.removeprefix("scheduler."): value
                    for name, value in host["values"].items()
                    if name.startswith("scheduler.")
                }
                for host in told["hosts"]
            },
            [
                (each["check"], each["severity"], each["host"], each["what"])
                for each in told["findings"]
                if each["severity"] != "inform"
            ],
            told["unread"],
        )

    yield check
    batch.wait_idle()


def test_what_slurm_gave_is_there(check):
    """One host is this one, on the other ``srun`` starts the agent."""
    checked = check(WHOLE)
    assert checked.found == []
    assert checked.unread == []
    assert list(checked.facts) == ["node1", "node2"]
    for facts in checked.facts.values():
        assert facts["name"] == "Slurm"
        assert facts["cpus"] == CPUS
        assert "gpus" not in facts


def test_fewer_cpus_than_slurm_gave(check, cluster):
    """What starts tasks on the host was bound to one of its CPUs."""
    if CPUS < 2:
        pytest.skip("it needs two CPUs")
    bind = "taskset -a -p -c {} $(pidof slurmd)"
    every = ",".join(map(str, os.sched_getaffinity(0)))
    one = min(os.sched_getaffinity(0))
    host = cluster.hosts[1]
    with in_shell(cluster, host, bind.format(one), bind.format(every)):
        checked = check(WHOLE)
    ((name, _, where, what),) = checked.found
    assert (name, where) == ("scheduler-cpus", "node2")
    assert what == f"Slurm gave the job {CPUS} CPUs here, but only 1 may be used"


def test_over_ssh_there_is_nothing_to_check(check, cluster):
    """What Slurm tells does not travel there."""
    config = f"-F {cluster.ssh_config}"
    checked = check(WHOLE, "-H", "node2", "--ssh-args", config)
    assert checked == Checked({"node2": {}}, [], [])
