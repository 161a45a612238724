"""Horovod's timeline calls, and what ``init`` and ``shutdown`` have to do for them."""

import os
from pathlib import Path

from ronde.collectives.torch_modes import outside_compiler
from ronde.errors import UsageError
from ronde.torch.session import Session, current_session, current_world
from ronde.world.horovod_config import DYNAMIC


@outside_compiler
def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to take down what all ranks do; every rank should call this.

    Rank 0 writes its own operations to the file while they happen, in Horovod's form.
    After ``stop_timeline()`` or ``shutdown()`` the file holds those of all ranks, on
    one clock. A timeline that runs already is ended first.

    Args:
        file_path: Rank 0's file; packed with gzip at the end where its name ends in
            ``.gz``. Other ranks keep a part beside it, or in a temporary directory.
        mark_cycles: Whether to mark when submissions are sent off.

    Raises:
        NotInitializedError: ``init()`` was not called.
        UsageError: ``HOROVOD_TIMELINE`` was not set before ``init()``.
        OSError: Rank 0 cannot write the file.
    """
    session = _session()
    if not session.knobs.timeline:
        raise UsageError(
            "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."
        )
    _stop(session)
    session.recordings.start(Path(os.fspath(file_path)), has_cycles=mark_cycles)
    _tell(session)


@outside_compiler
def stop_timeline() -> None:
    """End the timeline; nothing happens where none runs.

    Rank 0 returns when the file is complete. Ranks that have not begun a timeline are
    not waited for, and one that does not stop its own is left out after 5 s.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    _stop(_session())


def open_timeline(session: Session) -> None:
    """Begin the timelines that the environment asks for, at the end of ``init()``."""
    recordings, knobs = session.recordings, session.knobs
    recordings.open()
    if knobs.timeline and knobs.timeline != DYNAMIC:
        recordings.start(Path(knobs.timeline), has_cycles=knobs.has_timeline_cycles)
    _tell(session)


def close_timeline(session: Session) -> None:
    """End all timelines, once the session is closed.

    Not earlier: other ranks may learn from the closing that it is time for theirs.
    """
    session.recordings.close()


def _session() -> Session:
    current_world()
    return current_session()


def _stop(session: Session) -> None:
    session.recordings.stop()
    _tell(session)


def _tell(session: Session) -> None:
    recorder = session.recordings.recorder
    for member in session.members.values():
        member.coordinator.recorder = recorder
