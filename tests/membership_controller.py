"""The controller of an elastic job, for tests: the real policy, and real messages.

Ranks' processes are there from the beginning. Each dials, and is a member as soon as
the policy starts one. Lines that begin with ``!`` are orders of the test's own.
"""

import os
import secrets
import selectors
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ronde.membership import (
    FROM_RANK,
    Entered,
    Event,
    Failed,
    Finish,
    HostReady,
    HostsFound,
    Kill,
    Leave,
    Membership,
    Order,
    Rules,
    Save,
    Send,
    StartWorker,
    Stop,
    TimerExpired,
    ToRank,
    ViewBegins,
    ViewPhase,
    WorkerLost,
    WorkerReport,
    decode_text,
    encode_text,
)

HOST = "localhost"


class Note(NamedTuple):
    """What the controller saw, and when by ``time.monotonic()``."""

    at_s: float
    what: str
    view: int


class _Process:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.number = -1
        self.unread = b""


class Controller:
    """Serves until closed; a thread."""

    def __init__(self, path: Path, size: int, rules: Rules) -> None:
        self.notes: list[Note] = []
        self.stopped = ""  # why the policy has ended the job
        self._membership = Membership(rules, lambda: secrets.token_hex(16))
        self._slots = size
        self._idle: dict[int, _Process] = {}  # by the number that they will have
        self._unmet: set[int] = set()  # numbers that no process is there for
        self._members: dict[int, _Process] = {}
        self._stopped_pids: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._woken, self._closing = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._closing, b"x")
        self._thread.join()

    def _serve(self) -> None:
        self._apply(HostsFound({HOST: self._slots}))
        self._apply(HostReady(HOST, self._slots))
        while True:
            left_s = self._membership.due_s - time.monotonic()
            wait_s = None if left_s > 1e6 else max(0.0, left_s)
            ready = self._selector.select(wait_s)
            if not ready:
                self._apply(TimerExpired())
            for key, _ in ready:
                if key.fd == self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    process = _Process(self._listener.accept()[0])
                    self._selector.register(process.sock, selectors.EVENT_READ, process)
                else:
                    self._read(key.data)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.sock.close()
        self._selector.close()
        self._listener.close()
        os.close(self._woken)
        os.close(self._closing)

    def _pair(self) -> None:
        for number in self._idle.keys() & self._unmet:
            self._unmet.remove(number)
            self._members[number] = process = self._idle.pop(number)
            process.sock.sendall(b"\n")

    def _read(self, process: _Process) -> None:
        data = b""
        with suppress(ConnectionResetError):
            data = process.sock.recv(65536)
        if not data:
            self._selector.unregister(process.sock)
            process.sock.close()
            self._lose(process, "was killed by SIGKILL", -signal.SIGKILL)
            return
        *lines, process.unread = (process.unread + data).split(b"\n")
        for line in lines:
            self._take(process, line.decode())

    def _lose(self, process: _Process, how: str, code: int) -> None:
        if self._members.get(process.number) is not process:
            return
        del self._members[process.number]
        self._note(f"lost {process.number}")
        if self._membership.phase is ViewPhase.FINISHED:
            code = 0
        self._apply(WorkerLost(process.number, code, how))

    def _take(self, process: _Process, line: str) -> None:
        number = process.number
        if number < 0:
            process.number = int(line)
            self._idle[process.number] = process
            self._pair()
            return
        if line == "!stop":
            self._stopped_pids.append(process.pid)
            self._lose(process, "was stopped", -signal.SIGSTOP)
            return
        if line == "!save":
            self._send((number,), Save(self._membership.view.view))
            return
        if line == "!grow":
            self._slots += 1
            self._apply(HostReady(HOST, self._slots))
            return
        kind, _, text = line.partition(" ")
        if kind != "member":
            return
        message = decode_text(text, FROM_RANK)
        name, reason = type(message).__name__.lower(), getattr(message, "reason", "")
        self._note(f"{name} {number} at {message.step}: {reason}")
        if not isinstance(message, (Entered, Failed)):
            self._apply(WorkerReport(number, message))

    def _note(self, what: str) -> None:
        self.notes.append(Note(time.monotonic(), what, self._membership.view.view))

    def _send(self, numbers: tuple[int, ...], message: ToRank) -> None:
        for number in numbers:
            if process := self._members.get(number):
                with suppress(OSError):
                    process.sock.sendall(f"member {encode_text(message)}\n".encode())

    def _apply(self, event: Event) -> None:
        for order in self._membership.apply(event, time.monotonic()):
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        match order:
            case StartWorker(worker=worker):
                self._unmet.add(worker.id)
                self._pair()
            case Kill(worker=number):
                self._unmet.discard(number)
                if process := self._members.pop(number, None):
                    os.kill(process.pid, signal.SIGKILL)
            case Send(workers=numbers, message=message):
                self._tell(numbers, message)
            case Stop(reason=reason):
                self.stopped = reason
                self._kill([process.pid for process in self._members.values()])
            case _:
                pass

    def _tell(self, numbers: tuple[int, ...], message: ToRank) -> None:
        members = self._membership.view.members
        if isinstance(message, ViewBegins) and members[0].id in numbers:
            self._note(f"begins {len(members)}")
        if isinstance(message, Finish):
            self._note("finished")
        self._send(numbers, message)
        if isinstance(message, Leave):
            for number in numbers:
                self._members.pop(number, None)
        if isinstance(message, Finish):
            self._kill(self._stopped_pids)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def controlling(
    size: int, rules: Rules | None = None
) -> Generator[tuple[Controller, str]]:
    """Serve an elastic job that begins with ``size`` ranks; yield where to dial."""
    with tempfile.TemporaryDirectory(prefix="ronde-members-") as folder:
        path = Path(folder) / "socket"
        controller = Controller(path, size, rules or Rules(1, 64))
        try:
            yield controller, str(path)
        finally:
            controller.close()


def become_member(path: str, number: int) -> "Channel":
    """Have this process wait until it is that member; return its end of the channel."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    channel.sendall(f"{number}\n".encode())
    channel.recv(1)
    fd = channel.detach()
    os.environ["RONDE_CHANNEL"] = f"{fd}:{os.fstat(fd).st_ino}:{number}:elastic"  # noqa: TID251  as an agent does
    return Channel(fd, number)


class Channel(NamedTuple):
    """A rank's end of the channel, for orders of the test's own."""

    fd: int
    number: int

    def order(self, text: str) -> None:
        os.write(self.fd, f"!{text}\n".encode())
