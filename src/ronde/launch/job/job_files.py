"""Files of a job: its ranks' output, and the report of its end."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.job.failure import JobResult, LostHost, RankEnd, signal_name
from ronde.launch.job.output import (
    NO_ATTEMPT,
    Attempt,
    JobFile,
    NewWorker,
    OutputSink,
    attempt_dir,
)
from ronde.launch.program import absolute_path
from ronde.launch.signals import interrupter
from ronde.launch.wire.messages import Output, Stream

SCHEMA = 1  # version of the reports' form
_MAX_OPEN = 128
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL


def describe_result(result: JobResult) -> dict[str, object]:
    number = result.interrupted_by
    views = {"views": [each._asdict() for each in result.views]}
    return {
        **(views if result.views else {}),
        "exit_code": result.exit_code,
        "interrupted_by": None if number is None else interrupter(number),
        "cause": _describe_failure(result.cause) if result.cause else None,
        "also_failed": [_describe_failure(end) for end in result.also_failed],
        "also_lost": [_describe_failure(lost) for lost in result.also_lost],
        "ended": [_describe_end(end) for end in result.ended],
    }


def _describe_end(end: RankEnd) -> dict[str, object]:
    return {
        "rank": end.rank,
        "host": end.host,
        "pid": end.pid,
        "exit_code": end.exit_code,
        "signal": signal_name(-end.status) if end.status < 0 else None,
        "at_s": round(end.at_s, 6),
        "was_stopped": end.was_stopped,
    }


def _describe_failure(failure: RankEnd | LostHost) -> dict[str, object]:
    if isinstance(failure, LostHost):
        return {"kind": "host", **failure._asdict(), "at_s": round(failure.at_s, 6)}
    return {
        "kind": "rank",
        **_describe_end(failure),
        "evidence": failure.evidence,
        "lost_its_peer": failure.is_secondary,
        "traceback": failure.traceback,
        "stderr_tail": list(failure.stderr_tail),
    }


def replace_json(path: str, content: Mapping[str, object]) -> None:
    beside = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(beside, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
        Path(beside).replace(path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise


class _Report(JobFile):
    def _write_end(self, path: str, result: JobResult) -> None:
        try:
            write_report(path, result.exit_code, "", result, self._attempt)
        except OSError as error:
            self._notice(f"{path} was not written: {error.strerror}")


class ErrorFile(_Report):
    """The file of ``--error-file``: a report of the latest attempt."""

    def __init__(self, sink: OutputSink, path: str) -> None:
        super().__init__(sink, path)
        directory = absolute_path(path).parent
        if not os.access(directory, os.W_OK | os.X_OK) or Path(path).is_dir():
            raise UsageError(
                f"--error-file must be a file in a writable directory, got {path!r}. "
                f"Create {str(directory)!r} or name another."
            )

    def finished(self, result: JobResult) -> None:
        self._write_end(self._path, result)


def write_report(
    path: str,
    exit_code: int,
    message: str,
    result: JobResult | None = None,
    attempt: Attempt = NO_ATTEMPT,
) -> None:
    content = {
        "schema": SCHEMA,
        "job_id": attempt.job_id or None,
        "epoch": attempt.epoch if attempt.job_id else None,
        "exit_code": exit_code,
        "message": message,
        "verdict": describe_result(result) if result else None,
    }
    replace_json(path, content)


class RankLogs(_Report):
    """The files of ``--log-dir``: each rank's output, unchanged.

    ``DIR/<job id>/attempt_<epoch>/`` has ``<rank>/{stdout,stderr}.log``, their list
    ``index.json``, and the report ``end.json``. After an error, no more is written to
    the file that failed, and one notice names its rank.
    """

    def __init__(self, sink: OutputSink, directory: str) -> None:
        super().__init__(sink, "")
        self._directory = directory
        self._open: dict[tuple[int, Stream], int] = {}
        self._given_up: set[tuple[int, Stream]] = set()

    def begin(self, attempt: Attempt) -> None:
        self._close()
        super().begin(attempt)
        self._given_up.clear()
        ranks = range(len(attempt.hosts))
        self._path = attempt_dir(self._directory, attempt)
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            Path(self._path).parent.mkdir(mode=0o700, exist_ok=True)
            Path(self._path).mkdir(mode=0o700)
            for rank in ranks:
                self._make_files(rank)
            self._write_index()
        except OSError as error:
            if attempt.epoch == 0:
                raise UsageError(
                    f"cannot write to --log-dir {self._directory!r}: {error.strerror}. "
                    "Create it or name another."
                ) from None
            self._given_up.update((rank, stream) for rank in ranks for stream in Stream)
            self._notice(f"no log files are written any more: {error.strerror}")

    def add_worker(self, new: NewWorker) -> None:
        super().add_worker(new)
        try:
            self._make_files(new.worker)
            self._write_index()
        except OSError as error:
            self._given_up.update((new.worker, stream) for stream in Stream)
            self._notice(f"worker {new.worker} has no log files: {error.strerror}")

    def _make_files(self, rank: int) -> None:
        Path(self._path, str(rank)).mkdir(mode=0o700)
        for stream in Stream:
            name = f"{self._path}/{_file_name(rank, stream)}"
            os.close(os.open(name, _CREATE, 0o600))

    def output(self, output: Output) -> None:
        key = (output.worker, output.stream)
        try:
            rest = memoryview(b"" if key in self._given_up else output.data)
            while rest:
                rest = rest[os.write(self._fd(key), rest) :]
        except OSError as error:
            is_first = all(rank != output.worker for rank, _ in self._given_up)
            self._given_up.add(key)
            if is_first:
                self._notice(
                    f"{output.stream.name.lower()}.log of rank {output.worker} cannot "
                    f"be written ({error.strerror}); it is shown here only"
                )

    def finished(self, result: JobResult) -> None:
        self._close()
        if self._path:
            self._write_end(f"{self._path}/end.json", result)

    def _write_index(self) -> None:
        attempt = self._attempt
        ranks = [
            {
                "rank": rank,
                "host": host,
                **{s.name.lower(): _file_name(rank, s) for s in Stream},
            }
            for rank, host in enumerate(attempt.hosts)
        ]
        content = {
            "schema": SCHEMA,
            "job_id": attempt.job_id,
            "epoch": attempt.epoch,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ranks": ranks,
        }
        replace_json(f"{self._path}/index.json", content)

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _fd(self, key: tuple[int, Stream]) -> int:
        fd = self._open.pop(key, None)
        if fd is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            fd = os.open(f"{self._path}/{_file_name(*key)}", _OPEN)
        self._open[key] = fd  # the latest is the last
        return fd


def _file_name(rank: int, stream: Stream) -> str:
    return f"{rank}/{stream.name.lower()}.log"
