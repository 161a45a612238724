"""A light rank of an elastic job that ``pod_faults.py`` breaks, without torch.

Its arguments are a folder, ``RONDE_EPOCH`` and ``RONDE_COOKIE``. A step is a short
sleep. It writes the views it was in, as ``pod_job.STAY`` writes the starts.
"""

import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ronde.errors import MembershipError  # noqa: E402  found by the line above
from ronde.membership import own_member  # noqa: E402

_STEP_S = 0.05


def main(folder: Path, epoch: str, mark: str) -> None:
    """Go from view to view until ``finish`` appears."""
    member = own_member()
    if member is None:
        raise SystemExit("start it by ronde run --nodes A:B")
    address = socket.gethostbyname(socket.gethostname())
    step, (view, begun) = 0, member.join()
    while True:
        step = max(step, begun.step)
        numbers = [worker.id for worker in view.members]
        rank, size = numbers.index(member.number), len(numbers)
        members = ",".join(map(str, numbers))
        words = (epoch, view.view, rank, size, mark, address, members)
        with (folder / "worlds").open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")
        member.step = step
        member.running()
        while not member.is_over and not member.should_settle(step):
            time.sleep(_STEP_S)
            if (folder / "finish").exists():
                with suppress(MembershipError):  # the view has ended
                    member.done(step)
                    return
            step += 1
            member.step = step
        view, begun = member.settle(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
