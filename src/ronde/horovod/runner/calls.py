"""What a program and the ranks that it starts leave each other in a directory."""

import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a call on one rank ended.

    Attributes:
        result: What it returned.
        traceback: Of what it raised; empty if it returned.
        ended_ns: When, by ``time.monotonic_ns()``.
        size: Number of ranks.
    """

    result: Any
    traceback: str
    ended_ns: int
    size: int


def leave_call(directory: Path, call: Callable[[], Any]) -> None:
    """Leave a call for the ranks.

    Args:
        directory: Nobody else's: the ranks unpickle what they find there.
        call: Anything that cloudpickle takes.
    """
    # What is defined in a module is pickled as a name: the ranks must find the module.
    (directory / "path").write_bytes(pickle.dumps(sys.path))
    (directory / "call").write_bytes(cloudpickle.dumps(call))


def make_call(directory: Path, rank: int, size: int) -> None:
    """Make the call as one of the ranks, and leave its outcome.

    Args:
        directory: Where ``leave_call`` left it.
        rank: This one.
        size: Number of ranks.

    Raises:
        Exception: Whatever the call raises.
    """
    path: list[str] = pickle.loads((directory / "path").read_bytes())  # noqa: S301  ours
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        call = pickle.loads((directory / "call").read_bytes())  # noqa: S301  ours
        outcome = cloudpickle.dumps(CallOutcome(call(), "", time.monotonic_ns(), size))
    except BaseException:
        failure = CallOutcome(None, traceback.format_exc(), time.monotonic_ns(), size)
        _outcome_file(directory, rank).write_bytes(cloudpickle.dumps(failure))
        raise
    _outcome_file(directory, rank).write_bytes(outcome)


def collect_outcomes(directory: Path, max_size: int) -> list[CallOutcome | None]:
    """Return the outcome of each rank; None for one that left none.

    Args:
        directory: Where ``leave_call`` left the call.
        max_size: Number of ranks that were asked for; fewer may have started.
    """
    files = [_outcome_file(directory, rank) for rank in range(max_size)]
    outcomes: list[CallOutcome | None] = [
        pickle.loads(file.read_bytes()) if file.exists() else None  # noqa: S301  ours
        for file in files
    ]
    started = next((each.size for each in outcomes if each is not None), max_size)
    return outcomes[:started]


def _outcome_file(directory: Path, rank: int) -> Path:
    return directory / f"outcome-{rank}"
