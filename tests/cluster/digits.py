"""``examples/digits.py`` for a few steps, under whatever starts its ranks."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machines import ROOT, Cluster

LIMIT_S = 280.0
"""Of one training: four ranks import torch on what may be two slow cores."""
NUM_TRAIN, BATCH_SIZE = 1437, 64
"""Of ``examples/digits.py``."""


@dataclass(frozen=True, slots=True)
class Digits:
    """One training.

    Attributes:
        record: Where it writes what it found.
    """

    record: Path

    @property
    def words(self) -> list[str]:
        """Return the program with its arguments."""
        script = str(ROOT / "examples" / "digits.py")
        return [sys.executable, script, "--epochs", "1", "--json", str(self.record)]

    def loss(self, size: int) -> float:
        """Return the loss that one rank of that many wrote, once."""
        (line,) = self.record.read_text().splitlines()
        values = json.loads(line)["values"]
        assert values["size"] == size
        return values["loss"]


def tolerance(size: int, loss: float) -> float:
    """Return how far losses may be apart where gradients are added in another order.

    A sum of ``size`` terms of float32 has ``size - 1`` roundings of at most 2^-24 each,
    in either order, so that a step's gradients are apart by twice as much, relative to
    what is added. A step moves the weights by its own gradients alone, and to first
    order the loss in proportion; the roundings of all steps add up.
    """
    num_steps = NUM_TRAIN // (BATCH_SIZE * size)
    return num_steps * 2 * (size - 1) * 2**-24 * loss


def assert_nothing_left(cluster: Cluster) -> None:
    """Assert that each host runs its first process and its sshd, and nothing else."""
    for host in cluster.hosts:
        names = sorted(process.name for process in cluster.processes(host))
        assert names == ["sleep", "sshd"], (host.name, names)


def assert_done(done: "subprocess.CompletedProcess[str]") -> None:
    """Assert that a program ended well; show all it said where it did not."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
