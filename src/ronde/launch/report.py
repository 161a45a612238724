"""How a job ended, for programs: a verdict as JSON, and the file that has it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.directory import absolute_path
from ronde.launch.signals import interrupter
from ronde.launch.sink import Generation, Sink
from ronde.launch.through import Through
from ronde.launch.verdict import LostHost, RankEnd, Verdict, signal_name

SCHEMA = 1
"""Version of the reports' form."""


def describe_verdict(verdict: Verdict) -> dict[str, object]:
    """Return a verdict in JSON's types; ``docs/output.md`` has the fields."""
    number = verdict.interrupted_by
    cause = verdict.cause
    return {
        "exit_code": verdict.exit_code,
        "interrupted_by": None if number is None else interrupter(number),
        "cause": None if cause is None else _describe_failure(cause),
        "also_failed": [_describe_failure(end) for end in verdict.also_failed],
        "also_lost": [_describe_failure(lost) for lost in verdict.also_lost],
        "ended": [describe_end(end) for end in verdict.ended],
    }


def describe_end(end: RankEnd) -> dict[str, object]:
    """Return how one rank ended in JSON's types, without what it said."""
    return {
        "rank": end.rank,
        "host": end.host,
        "pid": end.pid,
        "exit_code": end.exit_code,
        "signal": signal_name(-end.status) if end.status < 0 else None,
        "at_s": round(end.at_s, 6),
        "was_stopped": end.was_stopped,
    }


def describe_lost(lost: LostHost) -> dict[str, object]:
    """Return what is known of a host that went away, in JSON's types."""
    return {
        "host": lost.host,
        "ranks": list(lost.ranks),
        "reason": lost.reason,
        "exit_code": lost.exit_code,
        "at_s": round(lost.at_s, 6),
    }


def _describe_failure(failure: RankEnd | LostHost) -> dict[str, object]:
    if isinstance(failure, LostHost):
        return {"kind": "host", **describe_lost(failure)}
    return {
        "kind": "rank",
        **describe_end(failure),
        "evidence": failure.evidence,
        "lost_its_peer": failure.is_hearsay,
        "traceback": failure.traceback,
        "stderr_tail": list(failure.stderr_tail),
    }


def replace_json(path: str, content: Mapping[str, object]) -> None:
    """Write a file that only its owner can read; nobody ever sees half of it.

    Raises:
        OSError: It cannot be written; what was there is still there.
    """
    beside = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(beside, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            # What no UTF-8 stands for is written as JSON's escapes.
            file.write(json.dumps(content, indent=1).encode() + b"\n")
        Path(beside).replace(path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise


class ErrorFile(Through):
    """Writes how the job ended, whether well or not, to a file.

    A later generation's report takes the place of an earlier one's.

    Args:
        inner: Gets everything.
        path: The file, in a directory that is there.

    Raises:
        UsageError: No file can be made there.
    """

    def __init__(self, inner: Sink, path: str) -> None:
        super().__init__(inner)
        self._path = path
        self._generation: Generation | None = None
        directory = absolute_path(path).parent
        if not os.access(directory, os.W_OK | os.X_OK) or Path(path).is_dir():
            raise UsageError(
                f"--error-file must be a file in a directory that can be written, got "
                f"{path!r}. Create {str(directory)!r} or name another."
            )

    def begin(self, generation: Generation) -> None:
        """Take note of which start it is."""
        self._generation = generation
        super().begin(generation)

    def finished(self, verdict: Verdict) -> None:
        """Write the report."""
        try:
            write_report(self._path, verdict.exit_code, "", verdict, self._generation)
        except OSError as error:
            self.notice(f"--error-file {self._path} was not written: {error.strerror}")
        super().finished(verdict)


def write_report(
    path: str,
    exit_code: int,
    message: str,
    verdict: Verdict | None = None,
    generation: Generation | None = None,
) -> None:
    """Write the file of ``--error-file``.

    Args:
        path: Where.
        exit_code: Of the whole job.
        message: Why nothing was started, or how the launcher failed, or empty.
        verdict: How the ranks ended, where they were started.
        generation: Which start of them it was.

    Raises:
        OSError: It cannot be written.
    """
    content = {
        "schema": SCHEMA,
        "job_id": None if generation is None else generation.job_id,
        "epoch": None if generation is None else generation.epoch,
        "exit_code": exit_code,
        "message": message,
        "verdict": None if verdict is None else describe_verdict(verdict),
    }
    replace_json(path, content)
