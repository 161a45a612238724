"""``ronde`` with other timeouts: ``python -m tests.timed lease_s=2.5 run ...``."""

import sys

from ronde.cli import main
from ronde.launch import Timeouts

LEASE_S = 2.5
"""Of hosts that are to be missed soon; twice that long a busy one may be silent."""


def ronde(**timeouts: float) -> list[str]:
    """Return the command, with the fields of ``Timeouts`` that are given.

    Its working directory must be the repository.
    """
    given = ",".join(f"{name}={value}" for name, value in timeouts.items())
    return [sys.executable, "-m", "tests.timed", given]


def impatient_ronde(**timeouts: float) -> list[str]:
    """Return the command for a job that soon misses a host."""
    return ronde(lease_s=LEASE_S, ping_s=LEASE_S / 10, **timeouts)


if __name__ == "__main__":
    given = (each.split("=") for each in sys.argv[1].split(","))
    timeouts = Timeouts(**{name: float(value) for name, value in given})
    sys.exit(main(sys.argv[2:], timeouts))
