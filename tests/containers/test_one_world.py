"""One command in every pod of a printed manifest is one world."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.training import Training
from tests.containers.manifests import print_manifest
from tests.containers.pods import Pod, PodNetwork, PodSpec

pytestmark = pytest.mark.soak

TELL = 'echo "$RANK of $WORLD_SIZE on $RONDE_HOST: $PET_NNODES$RONDE_NODES"'
PROGRAM = ("--no-prefix", "--", "sh", "-c", TELL)


def light(spec: PodSpec) -> PodSpec:
    """Leave out what imports torch and is in the test of a training."""
    return spec._replace(words=[word for word in spec.words if word != "--preflight"])


def assert_one_world(pods: list[Pod], names: list[str]) -> None:
    ends = [pod.wait() for pod in pods]
    told = [pod.describe() for pod in pods]
    assert ends == [0] * len(pods), told
    assert sorted(pods[0].out().splitlines()) == [
        f"{rank} of {len(names)} on {name}: " for rank, name in enumerate(names)
    ], told
    assert [pod.out() for pod in pods[1:]] == [""] * (len(pods) - 1), told


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "mpijob"])
def test_the_pods_of_a_manifest_are_one_world(network: PodNetwork, kind: str) -> None:
    manifest = print_manifest(kind, "--nodes", "3", program=PROGRAM)
    specs = [light(spec) for spec in manifest.pods(network.folder)]
    assert_one_world([network.start(s) for s in specs], [s.name for s in specs])


def test_the_pods_of_a_leader_worker_set_are_one_world(network: PodNetwork) -> None:
    manifest = print_manifest("job", "--nodes", "3", program=PROGRAM)
    names = ["train-0", "train-0-1", "train-0-2"]
    specs: list[PodSpec] = []
    for i, spec in enumerate(manifest.pods(network.folder)):
        address = {"LWS_LEADER_ADDRESS": "train-0.train.default"}
        own = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": str(i), **address}
        specs.append(light(spec)._replace(name=names[i], environment=own))
    # The leader comes last.
    pods = [network.start(spec) for spec in reversed(specs)]
    assert_one_world(pods[::-1], names)


SSHD = """
Port 2222
HostKey /shared/key
AuthorizedKeysFile /shared/key.pub
PidFile none
StrictModes no
UsePAM no
"""
SSH = """
Host *
    Port 2222
    IdentityFile /shared/key
    UserKnownHostsFile /shared/known_hosts
    StrictHostKeyChecking yes
"""


@pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin") is None, reason="no sshd")
def test_the_launcher_of_an_mpijob_reaches_its_workers_by_ssh(
    network: PodNetwork,
) -> None:
    """Start the launcher first, as the user of the others: 1000, without any rights."""
    names = [f"train-worker-{i}" for i in range(2)]
    shared = network.folder / "ssh"
    shared.mkdir(mode=0o755)
    key = shared / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(words, check=True)
    os.chown(key, 1000, 1000)
    (shared / "sshd_config").write_text(SSHD)
    (shared / "ssh_config").write_text(SSH)
    (shared / "known_hosts").write_text(f"* {key.with_suffix('.pub').read_text()}")
    hosts = "".join(f"{name}.train slots=1\n" for name in names)
    (shared / "hostfile").write_text(hosts)
    run = ["ronde", "run", "-v", "--ssh-args", "-F /shared/ssh_config"]
    run += [
        "--join-timeout",
        "10m",
        *PROGRAM[:-1],
        'echo "$RANK of $WORLD_SIZE on $(hostname)"',
    ]
    launcher = PodSpec(
        "train-launcher",
        run,
        environment={
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        },
        files={"/shared": shared, "/etc/mpi": shared},
        memory_folders={"/tmp": None},  # noqa: S108
    )
    sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/shared/sshd_config"]
    own = {"K_MPI_JOB_ROLE": "worker"}
    head = network.start(launcher)
    head.await_line("waiting for train-worker-")
    for name in names:
        network.start(launcher._replace(name=name, words=sshd, environment=own))
    assert head.wait() == 0, [pod.describe() for pod in network.pods[-3:]]
    lines = [f"{i} of 2 on {name}" for i, name in enumerate(names)]
    assert sorted(head.out().splitlines()) == lines


def test_a_training_in_pods_of_a_job_is_that_of_ranks_of_one_host(
    network: PodNetwork, local_loss: Callable[[int], float]
) -> None:
    shared = network.folder / "training"
    shared.mkdir()
    shared.chmod(0o777)
    training = Training(shared / "record")
    shutil.copy(training.words[1], shared / "train.py")
    program = ("-x", "RONDE_ENGINE=gloo", "train.py", "/shared/record")
    manifest = print_manifest("job", "--nodes", "3", "--cpu", "1", program=program)
    folders = {"/shared": shared}
    specs = manifest.pods(network.folder, workdir="/shared")
    pods = [network.start(s._replace(folders={**s.folders, **folders})) for s in specs]
    codes = [pod.wait() for pod in pods]
    assert codes == [0, 0, 0], [pod.describe() for pod in pods]
    assert training.loss(3) == local_loss(3)
    assert Path(shared / "record").stat().st_uid == 1000
