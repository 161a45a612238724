"""A real Slurm on the hosts of ``machines``: its controller on the first of them.

    with machines(3) as cluster, slurm(cluster) as batch:
        assert batch.run(["srun", "-N2", "hostname"]).stdout

Every host is a node, also the first. Slurm knows no accounting here, kills by its own
list of processes (Linux control groups are the machine's, not a host's), and believes
in as many CPUs as it is told.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.machines import Cluster, ClusterError, HostProcess, Machine

START_S = 30.0
_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
_SBIN = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# Slurm takes any file for a GPU's.
_NO_GPUS = ("/dev/null", "/dev/zero")

_CONF = """
ClusterName=ronde
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
GresTypes=gpu
KillWait=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation=/run/slurmctld
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_no_slurm() -> str:
    """Say why no Slurm can be started here; nothing where it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_SBIN) is None]
    if missing:
        return (
            f"Slurm's tests need {', '.join(missing)}, got none. Debian: apt-get "
            "install slurm-wlm munge"
        )
    return ""


class Slurm:
    """A Slurm that runs.

    Attributes:
        head: The host that users log in to.
        environment: What Slurm's commands need to find it.
    """

    def __init__(self, cluster: Cluster, conf: Path) -> None:
        self.head = cluster.hosts[0]
        self.environment: Mapping[str, str] = {
            "SLURM_CONF": str(conf),
            "PATH": _SBIN,
            "HOME": str(Path.home()),
            "USER": "root",
        }
        self._cluster = cluster

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] = {}, **popen: Any
    ) -> HostProcess:
        """Start a command on the head; ``env`` is added to the environment."""
        own = {**self.environment, **env}
        return self._cluster.start(self.head, words, env=own, **popen)

    def run(
        self, words: Sequence[str], *, env: Mapping[str, str] = {}, **popen: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head to its end: see ``Cluster.run``."""
        own = {**self.environment, **env}
        return self._cluster.run(self.head, words, env=own, **popen)

    def wait_over(self, job_id: str, limit_s: float) -> str:
        """Wait until a batch job is over; return its state.

        ``sbatch --wait`` would look more and more rarely, up to half a minute late.
        """
        deadline = time.monotonic() + limit_s
        asking = ["scontrol", "--oneliner", "show", "job", job_id]
        state = ""
        while time.monotonic() < deadline:
            told = self.run(asking).stdout.partition(" JobState=")[2]
            state = told.partition(" ")[0]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state
            time.sleep(0.1)
        raise ClusterError(f"job {job_id} must end within {limit_s} s, got {state}")

    def wait_idle(self) -> None:
        """Wait until no node has anything to do."""
        deadline = time.monotonic() + START_S
        asking = ["sinfo", "--noheader", "--Node", "--format=%t"]
        states: list[str] = []
        while time.monotonic() < deadline:
            states = self.run(asking).stdout.split()
            if states == ["idle"] * len(self._cluster.hosts):
                return
            time.sleep(0.05)
        raise ClusterError(f"Slurm's nodes must become idle, got {states}")


@contextmanager
def slurm(
    cluster: Cluster, *, cpus: int = 4, num_gpus: int = 0, memory_mib: int = 1
) -> Generator[Slurm]:
    """Start Slurm on all hosts; end it with all its jobs.

    Args:
        cluster: The hosts.
        cpus: How many each node is said to have.
        num_gpus: How many GPUs each node is said to have, at most two; there are none.
        memory_mib: How much memory each node is said to have.

    Raises:
        ClusterError: It does not start.
    """
    folder = cluster.folder / "slurm"
    folder.mkdir()
    conf = folder / "slurm.conf"
    given = f"CPUs={cpus} RealMemory={memory_mib} Gres=gpu:{num_gpus}"
    nodes = [
        f"NodeName={host.name} NodeAddr={host.address} {given} State=UNKNOWN"
        for host in cluster.hosts
    ]
    gpus = [f"Name=gpu File={file}" for file in _NO_GPUS[:num_gpus]]
    (folder / "gres.conf").write_text("\n".join(gpus))
    conf.write_text(
        _CONF.format(first=cluster.hosts[0], folder=folder, nodes="\n".join(nodes))
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    running = Slurm(cluster, conf)
    with ExitStack() as undoing:
        undoing.callback(shutil.rmtree, folder)
        for host in cluster.hosts:
            daemon = ("munged", "--foreground", "--force", f"--key-file={key}")
            places = ("--seed-file=/run/munge/seed", "--log-file=/run/munge/log")
            _start(running, cluster, host, (*daemon, *places), undoing)
        head = ("slurmctld", "-D", "-c")
        _start(running, cluster, cluster.hosts[0], head, undoing)
        for host in cluster.hosts:
            _start(running, cluster, host, ("slurmd", "-D", "-N", host.name), undoing)
        running.wait_idle()
        undoing.callback(_cancel_all, running)
        yield running


def _start(
    running: Slurm,
    cluster: Cluster,
    host: Machine,
    words: Sequence[str],
    undoing: ExitStack,
) -> None:
    """Start a daemon; end it in the reverse order."""
    log = cluster.folder / "slurm" / f"{words[0]}-{host.name}.out"
    making = 'umask 022; mkdir -p /run/munge /run/slurmd /run/slurmctld; exec "$@"'
    with log.open("wb") as out:
        daemon = cluster.start(
            host,
            ["sh", "-c", making, "sh", *words],
            env=running.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    undoing.callback(_stop, daemon)


def _stop(daemon: HostProcess) -> None:
    daemon.terminate()
    try:
        daemon.wait(10.0)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(10.0)


def _cancel_all(running: Slurm) -> None:
    running.run(["scancel", "--user=root"])
    running.wait_idle()
