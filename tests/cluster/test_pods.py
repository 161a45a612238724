"""One command in every pod: hosts with the names and variables of controllers."""

import subprocess
import sys

import pytest
from tests.cluster.machines import why_not
from tests.limits import HANG_S

from ronde.launch import own_environment

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]
NAMED = 'hostname "$0"; exec "$@"'


def job_set(number):
    return {"JOB_COMPLETION_INDEX": number}


def leader_worker_set(number):
    address = {"LWS_LEADER_ADDRESS": "train-0.train.default"}
    return {"LWS_GROUP_SIZE": 3, "LWS_WORKER_INDEX": number, **address}


def train_job(number):
    return {
        "PET_NNODES": 3,
        "PET_NPROC_PER_NODE": 1,
        "PET_NODE_RANK": number,
        "PET_MASTER_ADDR": "train-0.train",
        "PET_MASTER_PORT": 29500,
        "JOB_COMPLETION_INDEX": number,
    }


def pytorch_job(number):
    names = {"MASTER_ADDR": "train-0.train", "MASTER_PORT": 23456}
    return {**train_job(number), **names, "RANK": number, "WORLD_SIZE": 3}


def skypilot(number):
    return {
        "SKYPILOT_NUM_NODES": 3,
        "SKYPILOT_NODE_RANK": number,
        "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2\n10.77.0.3",
        "SKYPILOT_NUM_GPUS_PER_NODE": 0,
    }


def volcano(number):
    names = {"MASTER_ADDR": "train-0.train", "MASTER_PORT": 23456}
    return {"VC_TASK_INDEX": number, "RANK": number, "WORLD_SIZE": 3, **names}


@pytest.fixture
def pods(cluster, tmp_path):
    """Give the hosts the names of pods; yield a function that starts all of them."""
    files = [host.folder / "hosts" for host in cluster.hosts]
    before = [file.read_text() for file in files]
    lines = [
        f"{host.address} train-{i}.train.default train-{i}.train train-{i}\n"
        for i, host in enumerate(cluster.hosts)
    ]
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    started = []

    def start(environment, words):
        for i, host in enumerate(cluster.hosts):
            own = {name: str(value) for name, value in environment(i).items()}
            named = ("unshare", "--uts", "sh", "-c", NAMED, f"train-{i}")
            started.append(
                cluster.start(
                    host,
                    [*named, sys.executable, "-m", "ronde", "run", *words],
                    env=own_environment() | own | {"RONDE_TOKEN_FILE": str(token)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return [
            (process.returncode, out, errors)
            for process in started
            for out, errors in [process.communicate(timeout=HANG_S)]
        ]

    for file, text, line in zip(files, before, lines, strict=True):
        file.write_text(line + "".join(each for each in lines if each != line) + text)
    yield start
    for process in started:
        process.kill()
        process.communicate()
    for file, text in zip(files, before, strict=True):
        file.write_text(text)


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        (job_set, ["--nodes", "3"]),
        (leader_worker_set, []),
        (train_job, []),
        (pytorch_job, []),
        (skypilot, []),
        (volcano, []),
    ],
)
def test_the_same_command_in_every_pod_is_one_world(pods, controller, words):
    script = 'echo "$RANK of $WORLD_SIZE on $RONDE_HOST: $PET_NNODES$RONDE_NODES"'
    ends = pods(controller, [*words, "--no-prefix", "--", "sh", "-c", script])
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert sorted(ends[0][1].splitlines()) == [
        f"{rank} of 3 on train-{rank}: " for rank in range(3)
    ]
    assert "pod 0 of 3" in ends[0][2]
    for number in (1, 2):
        assert f"pod {number} of 3" in ends[number][2]
        assert ends[number][1] == ""


def test_the_launcher_of_an_mpijob_waits_for_workers_that_are_not_up_yet(
    cluster, tmp_path
):
    hosts = cluster.hosts[0].folder / "hosts"
    before = hosts.read_text()
    config, hostfile = tmp_path / "ssh_config", tmp_path / "hostfile"
    config.write_text(
        f"Host train-worker-0\n  HostKeyAlias node2\n{cluster.ssh_config.read_text()}"
    )
    hostfile.write_text("train-worker-0 slots=1\nnode3 slots=1\n")
    variables = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    }
    words = ["run", "-v", "--ssh-args", f"-F {config}", "--join-timeout", "10m"]
    script = 'echo "$RANK of $WORLD_SIZE on $(hostname)"'
    launcher = cluster.start(
        cluster.hosts[0],
        [
            sys.executable,
            "-m",
            "ronde",
            *words,
            "--no-prefix",
            "--",
            "sh",
            "-c",
            script,
        ],
        env=own_environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        errors = iter(launcher.stderr.readline, "")
        assert any("waiting for train-worker-0" in line for line in errors)
        hosts.write_text(f"{cluster.hosts[1].address} train-worker-0\n{before}")
        out, _ = launcher.communicate(timeout=HANG_S)
    finally:
        hosts.write_text(before)
        launcher.kill()
    assert (launcher.returncode, sorted(out.splitlines())) == (
        0,
        ["0 of 2 on node2", "1 of 2 on node3"],
    )
