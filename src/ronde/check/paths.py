"""Errands to paths, in processes of their own: a mount that hangs holds up no other.

A thread would not do: while it hangs in the kernel, its process cannot end.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ronde.check.facts import Value

Errand = Mapping[str, Value]
"""``do`` names a function of ``ronde.check.errands``; the rest are its arguments."""

Told = dict[str, Value]
"""What came of it. ``error`` says why nothing did, ``has_hung`` that time was up."""

_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.check.errands import main; main(sys.argv[2])"
)
_KILLED_S = 0.2


def run_errands(
    groups: Sequence[Sequence[Errand]], deadline_s: float
) -> list[list[Told]]:
    """Run errands, those of a group one after the other, groups side by side.

    Args:
        groups: What lies on one mount belongs into one group.
        deadline_s: For all; what is not done then has hung, and is killed.

    Returns:
        Of each group, what came of each errand.
    """
    ends_s = time.monotonic() + deadline_s
    running = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_DIR, json.dumps(group)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for group in (list(map(dict, each)) for each in groups)
    ]
    failure = f"no answer within {deadline_s:g} s"
    # One after the other, those behind one that hangs would be taken to hang too.
    with ThreadPoolExecutor(len(groups) or 1) as pool:
        collected = [
            pool.submit(_collect, process, len(group), ends_s, failure)
            for process, group in zip(running, groups, strict=True)
        ]
        return [each.result() for each in collected]


def _collect(
    process: "subprocess.Popen[bytes]", num: int, ends_s: float, failure: str
) -> list[Told]:
    has_hung = False
    try:
        said, _ = process.communicate(timeout=max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        said, has_hung = error.output or b"", True
        process.kill()
        # What hangs in the kernel dies when that lets go of it, and is not waited for.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED_S)
    # What follows the last end of a line was cut off.
    told = [json.loads(line) for line in said.split(b"\n")[:-1]]
    lost = {"error": failure, "has_hung": True} if has_hung else {"error": "it died"}
    return told + [lost] * (num - len(told))
