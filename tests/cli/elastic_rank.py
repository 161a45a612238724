"""A rank of an elastic job that trains nothing, and what befalls it.

``PLAN`` maps ``number:step`` to what a process does when it has applied so many steps,
or at ``number:start`` and ``number:joined``, before and after its first view begins:
a signal's name, ``exit N``, ``exit when FILE`` is there, ``raise``, ``raise and stay``
or ``hang``. All are done in view ``LAST_VIEW``.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ronde.errors import MembershipError
from ronde.membership import Member, own_member
from ronde.world import own_or

_STEP_S = 0.005
_STAY_S = 300.0

ENVIRON = own_or(None)


def befall(what: str) -> None:
    """Do what is planned."""
    if what.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[what])
    elif what == "hang":
        threading.Event().wait()
    elif what.startswith("raise"):
        if what.endswith("stay"):
            atexit.register(threading.Event().wait, _STAY_S)
        raise ValueError("the program is wrong")
    elif what.startswith("exit when "):
        while not Path(what.removeprefix("exit when ")).exists():
            time.sleep(_STEP_S)
        sys.exit()
    elif what:
        sys.exit(int(what.split()[1]))


def train(member: Member, plan: dict[str, str], last_view: int) -> None:
    """Count steps from view to view."""
    pause = threading.Event()
    befall(plan.pop(f"{member.number}:start", ""))
    begun, begins = member.join()
    befall(plan.pop(f"{member.number}:joined", ""))
    while True:
        try:
            step = member.step = max(begins.step, 0)
            member.running()
            while begun.view < last_view:
                member.allow(step + 1)
                if member.should_settle(step):
                    break
                befall(plan.pop(f"{member.number}:{step}", ""))
                pause.wait(_STEP_S)
                step += 1
                member.step = step
            else:
                member.done(step)
                print(f"done {begun.rank_of(member.number)} of {len(begun.members)}")  # noqa: T201
                return
        except MembershipError:
            pass
        begun, begins = member.settle(member.step)


if __name__ == "__main__":
    me = own_member()
    if me is None:
        sys.exit("elastic_rank must be a rank of an elastic job.")
    start = ENVIRON.get("START_PLAN", "")
    if ENVIRON.get("RONDE_JOINS") and start:
        befall(start)
    train(me, json.loads(ENVIRON["PLAN"]), int(ENVIRON["LAST_VIEW"]))
