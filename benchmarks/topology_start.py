"""How long ``ronde topo`` takes, beside Python itself, taking turns.

Usage: python benchmarks/topology_start.py [ROUNDS]
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "tests" / "topology" / "samples"
H100 = str(SAMPLES / "nccl_topo" / "oci_H100-topology.xml")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "ronde topo": ["-m", "ronde", "topo"],
    "ronde topo H100.xml": ["-m", "ronde", "topo", H100],
    "ronde topo --paths H100.xml": ["-m", "ronde", "topo", "--paths", H100],
    "ronde topo lint H100.xml": ["-m", "ronde", "topo", "lint", H100],
}


def measure(words: list[str]) -> float:
    """Return how long a Python program takes, in seconds."""
    begun_s = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, check=False)
    seconds = time.perf_counter() - begun_s
    # Lint ends with 1 where it finds something.
    if done.returncode not in (0, 1):
        sys.exit(done.stderr.decode())
    return seconds


def main() -> None:
    """Measure all in turns and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, words in COMMANDS.items():
            took[name].append(measure(words))
    print(f"{rounds} rounds, seconds\n{'command':30}  median  least")
    for name, times in took.items():
        print(f"{name:30}  {statistics.median(times):6.3f}  {min(times):5.3f}")


if __name__ == "__main__":
    main()
