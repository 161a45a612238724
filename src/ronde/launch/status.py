"""Status of this user's jobs on this host: the library behind ``ronde ps``.

    for job in list_jobs():
        for now in watch(job.socket):  # about once a second, until the job is over
            print(now.version, [row.status and row.status.step for row in now.workers])

A controller serves its job's table on a unix socket in a private directory of its user.
Each line there is one version: a JSON object of the fields of a ``JobStatus``.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from ronde.errors import LaunchError
from ronde.launch.job.status import PREFIX, SOCKET
from ronde.plain_values import PlainValueError, from_plain
from ronde.status.table import JobInfo, JobStatus, WorkerInfo
from ronde.status.values import decode_status
from ronde.store.local_socket import dial, is_of_this_process, live_directories

_ANSWER_S = 10.0


def find_sockets() -> list[Path]:
    """Return the sockets of this user's jobs on this host; remove stale ones."""
    paths = (directory / SOCKET for directory in live_directories(PREFIX))
    return sorted(path for path in paths if path.is_socket())


def list_jobs() -> list[JobStatus]:
    """Return the newest table of each of this user's jobs on this host.

    Jobs that end meanwhile or do not answer are left out.
    """
    found: list[JobStatus] = []
    for path in find_sockets():
        with suppress(OSError), closing(watch(path)) as versions:
            found += islice(versions, 1)  # none, if the job ends just now
    return sorted(found, key=lambda each: each.job.started_at)


def watch(socket: Path) -> Generator[JobStatus]:
    """Yield the newest version of a table, about once a second, until the job is over.

    Raises:
        OSError: The job is gone, belongs to another user, or does not answer for 10 s.
        LaunchError: The job runs with another version of ronde.
    """
    with JobConnection(socket) as job:
        for version in job:
            if isinstance(version, JobStatus):
                yield version


class HostAnswer(NamedTuple):
    """The answer of one host's observer to a question."""

    host: str
    answer: dict[str, object]


class JobConnection:
    """A connection to a job's table: a context manager and an iterator.

    It yields a new table about once a second, and answers as they come.

    Raises:
        OSError: As ``watch``.
        LaunchError: As ``watch``.
    """

    def __init__(self, socket: Path) -> None:
        self._path = socket
        self._sock = dial(str(socket), _ANSWER_S)
        self._lines = self._sock.makefile("rb")
        self.is_of_this_process = is_of_this_process(self._sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._sock.close()

    def send(self, question: Mapping[str, object]) -> None:
        """Ask the observers on the job's hosts; each answers once."""
        self._sock.sendall(json.dumps(question).encode() + b"\n")

    def __iter__(self) -> Iterator[JobStatus | HostAnswer]:
        for line in self._lines:
            if line.endswith(b"\n"):  # else the job ended within it
                yield _decode(self._path, line)


def _decode(socket: Path, line: bytes) -> JobStatus | HostAnswer:
    try:
        plain: dict[str, Any] = json.loads(line)
        if "answer" in plain:
            plain["answer"].pop("reader", None)
            return HostAnswer(plain["host"], plain["answer"])
        workers = [
            from_plain(WorkerInfo, {**row, "status": None})._replace(
                status=decode_status(row["status"])
            )
            for row in plain["workers"]
        ]
        job = from_plain(JobInfo, plain["job"])
        return JobStatus(socket, int(plain["version"]), job, tuple(workers))
    except (ValueError, KeyError, TypeError, PlainValueError) as error:
        raise LaunchError(
            f"the job at {socket} runs another version of ronde: {error}"
        ) from None
