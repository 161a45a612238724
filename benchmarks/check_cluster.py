"""Time ``ronde check`` on several healthy hosts, and print its findings.

Hosts are namespaces, each with its own sshd and a link of 1 Gbit/s. Needs root.

    python benchmarks/check_cluster.py --rounds 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cluster.machines import Cluster, ClusterError, machines  # noqa: E402

_LIMIT_S = 120.0
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
FORMS: dict[str, Sequence[str]] = {
    "ronde check": (),
    "ronde check --bandwidth tcp": ("--bandwidth", "tcp"),
    "ronde check --bandwidth gloo": ("--bandwidth", "gloo"),
}


def check(cluster: Cluster, words: Sequence[str]) -> tuple[float, list[str]]:
    """Check all hosts from the first; return the seconds and the findings."""
    hosts = ",".join(host.name for host in cluster.hosts)
    command = [sys.executable, "-m", "ronde", "check", "-H", hosts, "--json", *words]
    begun = time.perf_counter()
    done = cluster.run(
        cluster.hosts[0],
        [*command, "--ssh-args", f"-F {cluster.ssh_config}"],
        env={"PATH": _PATH, "HOME": str(Path.home())},
        timeout_s=_LIMIT_S,
        stderr=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - begun
    result = json.loads(done.stdout)
    return seconds, [
        f"{each['severity']} {each['check']} {each['host']}"
        for each in result["findings"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time ronde check on several hosts.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=3)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    found: Counter[str] = Counter()
    try:
        with machines(options.hosts) as cluster:
            for _ in range(options.rounds):
                for name, words in FORMS.items():
                    seconds, findings = check(cluster, words)
                    times[name].append(seconds)
                    found.update(findings)
    except ClusterError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.hosts} hosts, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    )
    for name, seconds in times.items():
        print(
            f"{name:26} {statistics.median(seconds):6.2f} s, at most {max(seconds):.2f}"
        )
    for finding, count in found.most_common():
        print(f"{count} times: {finding}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
