"""What schedulers say that they gave, read from an environment; and what is there."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.topology.saved_trees import Tree

from ronde.check import scheduler
from ronde.check.catalogue import PROBES, all_checks
from ronde.check.check import FactReader, Fleet, HostFacts, Severity, Value
from ronde.check.judging import Judgement, judge
from ronde.check.probing import run_probes
from ronde.launch.environments import own_environment

HERE = os.uname().nodename
MARKS = ("SLURM_", "PBS_", "LSB_", "KUBERNETES_", "NCPUS")


CHECKS = tuple(each for each in all_checks() if each.id.startswith("scheduler-"))


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the one that these tests may run under."""
    for name in own_environment():
        if name.startswith(MARKS):
            monkeypatch.delenv(name)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a host with 4 cores, of 2 threads each, and an unlimited group."""
    tree = Tree(tmp_path).cpus("0-7")
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        tree.write(f"{topology}/thread_siblings", f"{0x11 << cpu % 4:x}")
    tree.write("proc/self/status", "Cpus_allowed:\tff\n")
    tree.write("proc/self/cgroup", "0::/job/step\n")
    return tree.write("sys/fs/cgroup/job/step/memory.max", "max\n")


def read(tree: Tree, monkeypatch: pytest.MonkeyPatch, **environ: str) -> FactReader:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    reading = FactReader({"root": str(tree.root)})
    scheduler.read(reading)
    return reading


def given(reading: FactReader) -> dict[str, Value]:
    """Return what was given, by short names."""
    told = (scheduler.CPUS, scheduler.GPUS)
    return {
        name.removeprefix("scheduler."): value
        for name, value in reading.values.items()
        if name in told
    }


def test_without_a_scheduler_there_is_nothing() -> None:
    outcome = run_probes({"scheduler": PROBES["scheduler"]}, {})["scheduler"]
    assert outcome[:3] == ({}, {}, "")
    judgement = judged({})
    assert judgement == Judgement((), (), {})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"SLURM_CPUS_ON_NODE": "8"}, {"cpus": 8}),
        # A step may have fewer than the job.
        (
            {
                "SLURM_CPUS_ON_NODE": "1",
                "SLURM_JOB_CPUS_PER_NODE": "72(x2),36",
                "SLURM_JOB_NODELIST": "n[1-3]",
                "SLURMD_NODENAME": "n3",
            },
            {"cpus": 36},
        ),
        # A shell of salloc's, on a host of the job, and on another one.
        (
            {"SLURM_JOB_CPUS_PER_NODE": "4,8", "SLURM_JOB_NODELIST": f"n1,{HERE}"},
            {"cpus": 8},
        ),
        ({"SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "n[1-2]"}, {}),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0"}, {"gpus": 4}),
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS": "16"}, {}),
    ],
)
def test_slurm(
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    expected: dict[str, Value],
) -> None:
    reading = read(tree, monkeypatch, SLURM_JOB_ID="7", **environ)
    assert given(reading) == expected
    assert reading.unreadable == {}
    assert reading.values[scheduler.NAME] == "Slurm"


@pytest.mark.parametrize(
    ("environ", "fact"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "many"}, scheduler.CPUS),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": HERE,
                "SLURM_JOB_CPUS_PER_NODE": "4(x",
            },
            scheduler.CPUS,
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1"}, scheduler.CPUS),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "-1"}, scheduler.GPUS),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"{HERE} 4 n1"}, scheduler.CPUS),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"{HERE} x"}, scheduler.CPUS),
    ],
)
def test_nonsense_is_unreadable_and_no_fault(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], fact: str
) -> None:
    reading = read(tree, monkeypatch, **environ)
    assert fact in reading.unreadable
    assert fact not in reading.values
    facts = HostFacts("a", reading.values, reading.unreadable, {})
    judgement = judge(Fleet((facts,), {}), CHECKS)
    assert judgement.findings == ()
    (check,) = [check.id for check in CHECKS if check.facts[0] == fact]
    assert check in {each.check for each in judgement.unread}


def test_what_is_there_is_what_ranks_see(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        tree.write(f"dev/nvidia{number}")
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read(tree, monkeypatch, **environ).values[scheduler.VISIBLE_GPUS] == 4
    hiding = environ | {"CUDA_VISIBLE_DEVICES": "0,2"}
    reading = read(tree, monkeypatch, **hiding)
    assert reading.values[scheduler.VISIBLE_GPUS] == 2
    assert reading.values[scheduler.CORES] == 4


def test_a_list_of_gpus_that_are_not_there_is_not_believed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert read(tree, monkeypatch, **environ).values[scheduler.VISIBLE_GPUS] == 0


HEALTHY: dict[str, Any] = {
    "scheduler.name": "Slurm",
    "scheduler.cpus": 8,
    "scheduler.gpus": 4,
    "scheduler.cores": 8,
    "scheduler.visible_gpus": 4,
    "host.num_cpus": 8,
    "host.cpu_quota": 0.0,
}


def judged(values: dict[str, Any]) -> Judgement:
    return judge(Fleet((HostFacts("a", values, {}, {}),), {}), CHECKS)


def test_what_is_as_it_was_promised_gives_no_findings() -> None:
    assert judged(HEALTHY).findings == ()
    assert sum(judged(HEALTHY).made.values()) == len(CHECKS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"host.num_cpus": 7}, "warn scheduler-cpus"),
        ({"host.num_cpus": 4, "scheduler.cores": 4}, "warn scheduler-cpus"),
        ({"host.num_cpus": 3, "scheduler.cores": 3}, "fail scheduler-cpus"),
        ({"host.cpu_quota": 2.5}, "fail scheduler-cpus"),
        ({"host.cpu_quota": 8.0}, ""),
        # Slurm counts the cores, each of which has two threads.
        ({"host.num_cpus": 16}, ""),
        # Slurm counts the threads.
        ({"scheduler.cores": 4}, ""),
        ({"host.num_cpus": 64, "scheduler.cores": 32}, "inform scheduler-cpus"),
        # A chunk of several on the host; slots.
        ({"scheduler.name": "PBS", "host.num_cpus": 64, "scheduler.cores": 32}, ""),
        ({"scheduler.visible_gpus": 3}, "fail scheduler-gpus"),
        ({"scheduler.visible_gpus": 8}, "warn scheduler-gpus"),
    ],
)
def test_what_differs_is_found(changes: dict[str, Any], expected: str) -> None:
    found = judged(HEALTHY | changes).findings
    told = [f"{each.severity} {each.check}" for each in found]
    assert told == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"host.cpu_quota": 2.5},
            "gave the job 8 CPUs here, but only 2.5 may be used",
        ),
        (
            {"scheduler.cpus": 1},
            "gave the job 1 CPU here, but 8 may be used, which may be other jobs'",
        ),
        (
            {"scheduler.visible_gpus": 8},
            "gave the job 4 GPUs here, but ranks see 8, which may be other jobs'",
        ),
    ],
)
def test_it_is_said_in_one_sentence(changes: dict[str, Any], what: str) -> None:
    (finding,) = judged(HEALTHY | changes).findings
    assert finding.what == f"Slurm {what}"
    assert finding.severity in Severity
