"""``training_rank.py`` under whatever starts its ranks."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machines import Cluster
from tests.cluster.training_rank import BATCH_SIZE, NUM_TRAIN
from tests.limits import HANG_S


@dataclass(frozen=True, slots=True)
class Training:
    """One training.

    Attributes:
        record: Where it writes what it found.
    """

    record: Path

    @property
    def words(self) -> list[str]:
        """Return the program with its arguments."""
        script = str(Path(__file__).with_name("training_rank.py"))
        return [sys.executable, script, str(self.record)]

    def loss(self, size: int) -> float:
        """Return the loss that one rank of that many wrote."""
        values = json.loads(self.record.read_text())
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
    """Assert that each host runs its first process and its sshd, and nothing else.

    A session of sshd ends a moment after the connection that it serves, which nobody
    on the other side can see: it is waited for, and nothing else is.
    """
    due_s = time.monotonic() + HANG_S
    while True:
        names = {
            host.name: sorted(
                process.name
                for process in cluster.processes(host)
                if process.pid != host.init_pid
            )
            for host in cluster.hosts
        }
        for found in names.values():
            assert all(name.startswith("sshd") for name in found), names
        if all(found == ["sshd"] for found in names.values()):
            return
        assert time.monotonic() < due_s, names
        time.sleep(0.01)


def assert_done(done: "subprocess.CompletedProcess[str]") -> None:
    """Assert that a program ended well; show all it said where it did not."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
