"""Have two ranks share a GPU over NCCL, if it lets them: ``sharing.py --json FILE``.

NCCL refuses a GPU that two ranks of a host have, so each rank is shown to it as a host
of its own and the bytes go over sockets. Exits with 77, and NCCL's own words as the
last line, where it refuses that, too.
"""

import os
import subprocess
import sys

BENCH = ("-m", "ronde", "bench", "all_reduce", "-g", "2", "--share-gpu")
NCCL = ("--engine", "nccl", "--device", "cuda", "--no-limit")
TRIAL = ("-b", "8", "-e", "8", "-n", "2", "-T", "40")
SWEEP = ("-b", "8", "-e", "16M", "-f", "8", "-n", "10", "-T", "40")
TRIAL_S = 50.0


def main(words: list[str]) -> int:
    """Try once, then measure; return the exit code."""
    env = {**os.environ, "NCCL_DEBUG": "WARN"}  # noqa: TID251
    try:
        trial = subprocess.run(
            [sys.executable, *BENCH, *NCCL, *TRIAL],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"))
        print(f"two ranks with a GPU between them did not meet in {TRIAL_S:.0f} s")
        return 77
    print(trial.stdout, flush=True)
    if trial.returncode:
        lines = [line for line in trial.stdout.splitlines() if line.strip()]
        warnings = [line for line in lines if "NCCL WARN" in line]
        print("NCCL lets no two ranks share a GPU: " + (warnings or lines or ["?"])[-1])
        return 77
    sweep = [sys.executable, *BENCH, *NCCL, *SWEEP, *words]
    return subprocess.run(sweep, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
