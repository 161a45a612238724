"""A real Ray of two nodes, each a host of its own with 2 CPUs and 1 GPU.

    with ray_cluster() as ray:
        job = ray.launch("train.py")

The GPUs are a number that Ray counts; nothing computes on them.
"""

import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.machines import Cluster, HostProcess, Machine, machines
from tests.cluster.observation import Process
from tests.limits import HANG_S, until

CPUS, GPUS = 2, 1
_PORT = 6379
_BIN = Path(sys.executable).parent
_ENVIRONMENT = {
    "PATH": f"{_BIN}:/usr/bin:/bin",
    "HOME": str(Path.home()),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other programs may fill the machine
    "OMP_NUM_THREADS": "1",
}
_OWN = ("--num-cpus", str(CPUS), "--num-gpus", str(GPUS))
_OBSERVER = """
import json, os, sys, ray
replies = os.fdopen(os.dup(1), "w")  # Ray writes of lost nodes to standard output
os.dup2(2, 1)
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
for _ in sys.stdin:
    groups = ray.util.placement_group_table().values()
    print(json.dumps({
        "free": {k: ray.available_resources().get(k, 0) for k in ("CPU", "GPU")},
        "groups": [g["state"] for g in groups if g["state"] != "REMOVED"],
        "nodes": sum(node["Alive"] for node in ray.nodes()),
    }), file=replies, flush=True)
"""


@contextmanager
def ray_cluster(shared: Sequence[Path] = ()) -> Generator["RayCluster"]:
    """Start Ray on two hosts; all ends with the block."""
    with machines(2, shared=shared) as cluster:
        ray = RayCluster(cluster)
        ray.start_nodes(cluster.hosts)
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        ray.observer = ray.start([sys.executable, "-c", _OBSERVER], **pipes)
        try:
            yield ray
        finally:
            for process in ray.started:
                process.kill()
                process.communicate()


class RayCluster:
    """Two nodes of Ray, the programs on the first one, and Ray's own account of them.

    Attributes:
        cluster: The hosts.
        started: All programs.
        observer: A client of Ray that reports its state.
    """

    observer: HostProcess

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: list[HostProcess] = []

    def start_nodes(self, hosts: Sequence[Machine]) -> None:
        """Start Ray on hosts; the first host's is the head."""
        head = self.cluster.hosts[0]
        starting = []
        for host in hosts:
            words = [str(_BIN / "ray"), "start", "--node-ip-address", host.address]
            words += ["--address", f"{head.address}:{_PORT}"]
            if host is head:
                words[-2:] = ["--head", "--port", str(_PORT)]
                words += ["--include-dashboard", "false"]
            words += [*_OWN, "--object-store-memory", "80000000"]
            starting.append(self.start(words, host, stderr=subprocess.STDOUT))
        for process in starting:
            out, _ = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, out

    def restart_node(self, host: Machine) -> None:
        """Start Ray again on a host where it was killed."""
        end_of(self.start([str(_BIN / "ray"), "stop", "--force"], host))
        self.start_nodes([host])

    def start(
        self, words: Sequence[str], host: Machine | None = None, **popen: Any
    ) -> HostProcess:
        """Start a program, on the first host if none is named."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.cluster.start(
            host or self.cluster.hosts[0],
            words,
            **{"env": _ENVIRONMENT, "stdin": subprocess.DEVNULL, **pipes, **popen},
        )
        self.started.append(process)
        return process

    def launch(self, *words: str, **variables: str) -> HostProcess:
        """Start ``ronde run --launcher ray``, with further variables."""
        ronde = [sys.executable, "-m", "ronde", "run", "--launcher", "ray"]
        return self.start([*ronde, *words], env={**_ENVIRONMENT, **variables})

    def state(self) -> dict[str, Any]:
        """Return Ray's free resources, placement groups and number of nodes."""
        assert self.observer.stdin
        assert self.observer.stdout
        self.observer.stdin.write("\n")
        self.observer.stdin.flush()
        return json.loads(self.observer.stdout.readline())

    def leftovers(self, *hosts: Machine) -> list[Process]:
        """Return all processes of ronde, of its ranks and of its tasks in Ray."""
        return [
            process
            for host in hosts or self.cluster.hosts
            for process in self.cluster.processes(host)
            if process.state != "Z"
            and (b"RONDE_COOKIE" in process.environment or _is_ours(process.words))
        ]

    def await_nothing_left(self, num_nodes: int = 2) -> None:
        """Wait until Ray has all of its nodes' resources again and nothing of ours."""
        free = {"CPU": num_nodes * CPUS, "GPU": num_nodes * GPUS}
        idle = {"free": free, "groups": [], "nodes": num_nodes}
        until(lambda: not self.leftovers(), self.leftovers)
        until(lambda: self.state() == idle, self.state)


def end_of(process: HostProcess) -> tuple[int, str, str]:
    """Wait for a program; return its exit code, output and errors."""
    out, errors = process.communicate(timeout=HANG_S)
    return process.returncode, out, errors


def _is_ours(words: Sequence[str]) -> bool:
    ours = ("ronde", "ray::run_agent", "ronde.launch.hosts.ray_nodes", "tests.timed")
    return any(word in ours or "from ronde." in word for word in words)
