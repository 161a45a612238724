"""Have two ranks share a GPU over NCCL, if it lets them: ``sharing.py --json FILE``.

NCCL refuses a GPU that two ranks of a host have, so each rank is shown to it as a host
of its own and the bytes go over sockets. What NCCL logs of that, and the topology that
it found, stands in the output. Exits with 77, and NCCL's own words as the last line,
where it refuses that, too.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = ("-m", "ronde", "bench", "all_reduce", "-g", "2", "--share-gpu")
NCCL = ("--engine", "nccl", "--device", "cuda", "--no-limit")
TRIAL = ("-b", "8", "-e", "8", "-n", "2", "-T", "40")
SWEEP = ("-b", "8", "-e", "16M", "-f", "8", "-n", "10", "-T", "40")
TRIAL_S = 50.0
LOGGED = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING",
}


def main(words: list[str]) -> int:
    """Try once, then measure; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="ronde-nccl-") as folder:
        topology = Path(folder) / "topology.xml"
        why_not = _try(LOGGED | {"NCCL_TOPO_DUMP_FILE": str(topology)})
        if topology.exists():
            print(topology.read_text(), flush=True)
    if why_not:
        print(why_not)
        return 77
    sweep = [sys.executable, *BENCH, *NCCL, *SWEEP, *words]
    return subprocess.run(sweep, check=False).returncode


def _try(variables: dict[str, str]) -> str:
    """Print the output of two ranks; return the reason if they cannot connect."""
    env = os.environ | variables  # noqa: TID251
    try:
        trial = subprocess.run(
            [sys.executable, *BENCH, *NCCL, *TRIAL],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"))
        return f"two ranks with a GPU between them did not meet in {TRIAL_S:.0f} s"
    said = trial.stdout.decode(errors="replace")
    print(said, flush=True)
    if trial.returncode == 0:
        return ""
    lines = [line for line in said.splitlines() if line.strip()] or ["?"]
    warnings = [line for line in lines if "NCCL WARN" in line]
    return f"NCCL lets no two ranks share a GPU: {(warnings or lines)[-1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
