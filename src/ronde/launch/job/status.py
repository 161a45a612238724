"""The table of a job's statuses, served on a unix socket.

A reader gets the newest version of the table as a line of JSON, at most once a second:
see ``ronde.launch.status``. A reader that stalls misses versions, and is dropped
after some seconds. No write blocks.

A reader may also send questions, each a JSON object on a line of its own. A question
goes to the observer on each host of the job; the first one starts the observers. Each
observer's answer comes back as one more line, with the host's name.
"""

import itertools
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

from ronde.launch.signals import wait_for
from ronde.launch.wire import messages
from ronde.status.table import JobInfo, WorkerInfo
from ronde.store.local_socket import (
    is_own,
    listen,
    live_directories,
    remove,
    temporary_directory,
)

PREFIX = "ronde-job-"
SOCKET = "status"
_EVERY_S = 1.0
_STALL_S = 10.0
_LAST_S = 2.0
_MAX_READERS = 64
_READ_BYTES = 64 << 10
_MAX_QUESTION_BYTES = 1 << 20


_numbers = itertools.count(1)


class _Reader:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = next(_numbers)
        self.received = b""  # of a question
        self.answers: list[bytes] = []  # to send after ``unsent``
        self.unsent = memoryview(b"")
        self.is_answered = False  # ``unsent`` is the rest of an answer
        self.is_awaited = False  # at the job's end
        self.next_at_s = 0.0
        self.took_at_s = time.monotonic()  # of its last read


class StatusService:
    """Keeps the newest status of each worker, and serves the table of all."""

    def __init__(
        self, job_id: str, argv: Sequence[str], stall_s: float = _STALL_S
    ) -> None:
        head, pid = os.uname().nodename, os.getpid()
        self._job = JobInfo(job_id, tuple(argv), time.time(), head, pid, restarts=0)
        self._stall_s = stall_s
        self._rows: Callable[[], Iterable[WorkerInfo]] = tuple
        self._send: Callable[[messages.Observe], object] = lambda _message: None
        self._statuses: dict[int, tuple[str, float]] = {}  # text, time
        self._version, self._line, self._built_at_s = 0, b"", 0.0
        self._readers: list[_Reader] = []
        live_directories(PREFIX)  # removes those of killed controllers
        self.directory = temporary_directory() / f"{PREFIX}{os.urandom(8).hex()}"
        self.directory.mkdir(mode=0o700)
        try:
            self._listener = listen(self.directory / SOCKET)
        except OSError:
            remove(self.directory)
            raise
        self._listener.setblocking(False)  # noqa: FBT003  the socket's own method

    def begin(
        self,
        epoch: int,
        rows: Callable[[], Iterable[WorkerInfo]],
        send: Callable[[messages.Observe], object],
    ) -> None:
        """Serve a new attempt's table; ``send`` sends a message to all agents."""
        self._job, self._rows = self._job._replace(restarts=epoch), rows
        self._send = send
        self._statuses.clear()

    def on_statuses(self, statuses: messages.Statuses) -> None:
        now_s = time.monotonic()
        for worker, text, age_s in statuses.statuses:
            with suppress(ValueError, RecursionError):  # a rank may write anything
                if isinstance(json.loads(text, parse_constant=_refuse), dict):
                    self._statuses[worker] = text, now_s - age_s

    def on_observed(self, host: str, line: str) -> None:
        """Send an answer to the reader that asked, if it is still connected."""
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            number = json.loads(line)["reader"]
            for reader in self._readers:
                if reader.number == number:
                    answer = f'{{"host": {json.dumps(host)}, "answer": {line}}}\n'
                    reader.answers.append(answer.encode(errors="replace"))
                    self._write(reader)

    @property
    def due_s(self) -> float:
        return min((self._due_of(each) for each in self._readers), default=float("inf"))

    def watched(self) -> Iterator[tuple[int, int, Callable[[], object]]]:
        yield self._listener.fileno(), select.POLLIN, self._accept
        for reader in self._readers:
            events = select.POLLIN | (select.POLLOUT if reader.unsent else 0)
            yield reader.sock.fileno(), events, lambda of=reader: self._serve(of)

    def advance(self) -> None:
        """Send the newest table to idle readers; drop stalled readers."""
        now_s = time.monotonic()
        for reader in [each for each in self._readers if now_s >= self._due_of(each)]:
            if reader.unsent:
                self._write(reader)  # it may have read since the loop's last turn
                if now_s >= self._due_of(reader):
                    self._drop(reader)
                continue
            if now_s >= self._built_at_s + _EVERY_S:
                self._build(now_s)
            reader.unsent = memoryview(self._line)
            reader.next_at_s, reader.took_at_s = now_s + _EVERY_S, now_s
            self._write(reader)

    def close(self) -> None:
        """Send idle readers the last table, with the ends of the workers.

        Answers that a reader wants at the end (``until_end``) are awaited for at most
        2 s, until it has read them.
        """
        self._send = lambda _message: None  # the agents are gone
        if self._readers:
            self._build(time.monotonic())
        ends_s = time.monotonic() + _LAST_S
        awaited = [reader for reader in self._readers if reader.is_awaited]
        while late := [each for each in awaited if each.answers or each.is_answered]:
            fds = [reader.sock.fileno() for reader in late]
            if not wait_for([], fds, ends_s - time.monotonic()):
                break
            for reader in late:
                self._write(reader)
        for reader in list(self._readers):
            if not reader.unsent:
                reader.unsent = memoryview(self._line)
                self._write(reader)
            self._drop(reader)
        self._listener.close()
        remove(self.directory)

    def _due_of(self, reader: _Reader) -> float:
        return reader.took_at_s + self._stall_s if reader.unsent else reader.next_at_s

    def _build(self, now_s: float) -> None:
        self._version, self._built_at_s = self._version + 1, now_s
        workers, rows = list[str](), list(self._rows())
        # Forget workers that have left.
        left = self._statuses.keys() - {row.worker for row in rows}
        for worker in left:
            del self._statuses[worker]
        for row in rows:
            text, at_s = self._statuses.get(row.worker, ("null", now_s))
            aged = row._replace(status_age_s=round(now_s - at_s, 3))
            # The status, the last field, stays as it was sent.
            known = json.dumps(aged._asdict()).removesuffix("null}")
            workers.append(known + text + "}")
        head = f'{{"version": {self._version}, "job": {json.dumps(self._job._asdict())}'
        line = f'{head}, "workers": [{", ".join(workers)}]}}\n'
        self._line = line.encode(errors="replace")

    def _accept(self) -> None:
        with suppress(OSError):  # it closed again, or no descriptor is free
            sock, _ = self._listener.accept()
            if not is_own(sock) or len(self._readers) >= _MAX_READERS:
                sock.close()
                return
            sock.setblocking(False)  # noqa: FBT003  the socket's own method
            self._readers.append(_Reader(sock))

    def _serve(self, reader: _Reader) -> None:
        if reader not in self._readers:
            return  # it was dropped since the poll
        self._write(reader)
        try:
            data = reader.sock.recv(_READ_BYTES)
            *lines, reader.received = (reader.received + data).split(b"\n")
            is_open = bool(data) and len(reader.received) <= _MAX_QUESTION_BYTES
            for line in lines:
                question = {**json.loads(line), "reader": reader.number}
                reader.is_awaited |= question.get("until_end") is True
                self._send(messages.Observe(json.dumps(question)))
        except (ValueError, TypeError, RecursionError):
            is_open = False  # it sent something else than JSON objects
        except OSError as error:
            is_open = isinstance(error, BlockingIOError)
        if not is_open:
            self._drop(reader)

    def _write(self, reader: _Reader) -> None:
        try:
            while reader.unsent or reader.answers:
                if not reader.unsent:
                    reader.unsent = memoryview(reader.answers.pop(0))
                    reader.is_answered = True
                reader.unsent = reader.unsent[reader.sock.send(reader.unsent) :]
                reader.took_at_s = time.monotonic()
            reader.is_answered = False
        except BlockingIOError:
            pass  # it is full
        except OSError:  # its end is read later
            reader.answers.clear()
            reader.is_answered = False

    def _drop(self, reader: _Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
            reader.sock.close()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
