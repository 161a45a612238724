"""``examples/digits.py`` as ``restarts.py`` runs it: every step is said, in JSON.

Each line has the generation, rank, process, port to meet at, and the time since boot,
which is the same clock on all hosts of one machine.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(event: str, **more: int) -> None:
    """Write one line, whole."""
    environ = os.environ  # noqa: TID251  a rank's own
    epoch = environ["RONDE_EPOCH"]
    line = {
        "event": event,
        "epoch": int(epoch),
        "rank": int(environ["RANK"]),
        "pid": os.getpid(),
        "port": environ["MASTER_PORT"],
        "at_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        **more,
    }
    os.write(1, f"\n{json.dumps(line)}\n".encode())


def main() -> None:
    """Train, and report each phase."""
    say("begun")
    import torch

    say("torch")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import digits

    say("imported")

    class Schedule(torch.optim.lr_scheduler.OneCycleLR):
        """Says that the ranks are connected, and each step."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            say("met")

        def step(self, *args: Any) -> None:
            super().step(*args)
            if self.last_epoch > 0:
                say("step", step=self.last_epoch)

    torch.optim.lr_scheduler.OneCycleLR = Schedule
    digits.run(digits.main)


main()
