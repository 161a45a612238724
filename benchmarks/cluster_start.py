"""Time the start and end of ``/bin/true`` on several hosts, against MPI's launchers.

Three hosts (namespaces, each with its own sshd and a link of 1 Gbit/s) with two ranks
each; every run makes its ssh connections anew, all launchers with the same ssh. They
take turns, so that a machine that slows down slows all of them. Then 256 ranks on eight
hosts, by ronde. The last line is JSON. Needs root.

    python benchmarks/cluster_start.py --rounds 10
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cluster.machines import Cluster, ClusterError, machines  # noqa: E402

_LIMIT_S = 30.0
_PREFIX = Path(sys.prefix)
_MPICH = _PREFIX / "mpich"
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
RONDE = "ronde run"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher's command to start ``/bin/true`` everywhere.

    Attributes:
        words: The command.
        path: Where its own programs are looked for.
    """

    words: Sequence[str]
    path: Path


def launchers(cluster: Cluster, slots: int) -> dict[str, Launcher]:
    """Return those that are installed, ``ronde run`` first."""
    hosts = ",".join(f"{host.name}:{slots}" for host in cluster.hosts)
    num_ranks = str(slots * len(cluster.hosts))
    ssh = cluster.folder / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cluster.ssh_config} "$@"\n'
    )
    ssh.chmod(0o755)
    ronde = [sys.executable, "-m", "ronde", "run", "--nested", "-H", hosts]
    ronde += ["--ssh-args", f"-F {cluster.ssh_config}"]
    open_mpi = [str(_PREFIX / "bin/mpirun"), "--allow-run-as-root", "--host", hosts]
    open_mpi += ["--prtemca", "plm_ssh_agent", str(ssh), "--bind-to", "none"]
    mpich = [str(_MPICH / "bin/mpirun"), "-launcher", "ssh", "-hosts", hosts]
    mpich += ["-launcher-exec", str(ssh)]
    found = {
        RONDE: Launcher([*ronde, "/bin/true"], _PREFIX),
        "mpirun, Open MPI": Launcher(
            [*open_mpi, "-n", num_ranks, "/bin/true"], _PREFIX
        ),
        "mpirun, MPICH": Launcher([*mpich, "-n", num_ranks, "/bin/true"], _MPICH),
    }
    return {name: one for name, one in found.items() if Path(one.words[0]).exists()}


def time_start(cluster: Cluster, launcher: Launcher) -> float:
    """Run a launcher on the first host to its end; return the seconds.

    Infinity stands for one that did not end in time.
    """
    begun = time.perf_counter()
    try:
        done = cluster.run(
            cluster.hosts[0],
            launcher.words,
            env={"PATH": f"{launcher.path / 'bin'}:{_PATH}", "HOME": str(Path.home())},
            timeout_s=_LIMIT_S,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return math.inf
    seconds = time.perf_counter() - begun
    if done.returncode != 0:
        raise ClusterError(f"{launcher.words[:4]} must end with 0, got: {done.stdout}")
    return seconds


def compare(rounds: int, *, is_alone: bool) -> dict[str, list[float]]:
    """Return the times of all launchers on three hosts; the first round is left out.

    Args:
        rounds: Runs of each that count.
        is_alone: Whether ``ronde run`` has no other beside it.
    """
    with machines(3) as cluster:
        all_of_them = launchers(cluster, slots=2)
        if is_alone:
            all_of_them = {RONDE: all_of_them[RONDE]}
        times: dict[str, list[float]] = {name: [] for name in all_of_them}
        for _ in range(rounds + 1):
            for name, launcher in all_of_them.items():
                times[name].append(time_start(cluster, launcher))
    return {name: seconds[1:] for name, seconds in times.items()}


def time_many(rounds: int) -> list[float]:
    """Return the times of 256 ranks on eight hosts."""
    with machines(8) as cluster:
        ronde = launchers(cluster, slots=32)[RONDE]
        return [time_start(cluster, ronde) for _ in range(rounds)]


def main() -> int:
    """Print medians and write one line of JSON; return the exit code."""
    parser = argparse.ArgumentParser(description="Time the start on several hosts.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--many", type=int, default=3, help="rounds of 256 ranks")
    parser.add_argument("--alone", action="store_true", help="time ronde run only")
    options = parser.parse_args()
    try:
        times = compare(options.rounds, is_alone=options.alone)
        many = time_many(options.many) if options.many else []
    except ClusterError as error:
        print(f"cluster_start: {error}", file=sys.stderr)
        return 2
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'2 ranks on each of 3 hosts':28} {'median s':>8} {'worst':>7} {'x':>6}")
    median = statistics.median(times[RONDE])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:28} {middle:8.3f} {max(seconds):7.3f} {middle / median:6.2f}")
    for seconds in many:
        print(f"256 ranks on 8 hosts: {seconds:.2f} s")
    rounded = {name: rounded_times(each) for name, each in times.items()}
    result = {"seconds": rounded, "many_s": rounded_times(many)}
    print(json.dumps({"benchmark": "cluster_start", **result}))
    return 0


def rounded_times(times: Sequence[float]) -> list[float | None]:
    """Return a value for JSON: None for a launcher that did not end in time."""
    return [None if math.isinf(seconds) else round(seconds, 4) for seconds in times]


if __name__ == "__main__":
    sys.exit(main())
