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
from typing import Any, NamedTuple

from ronde.membership import (
    FROM_RANK,
    NO_VIEW,
    AskStep,
    AtStep,
    BeginView,
    Dismiss,
    Done,
    EndView,
    Entered,
    Event,
    Finish,
    FinishAll,
    HostReady,
    HostsFound,
    Kill,
    Leave,
    MemberDone,
    MemberLost,
    MemberSettled,
    Membership,
    Order,
    PauseView,
    Rules,
    Save,
    Settled,
    StartProcess,
    Stop,
    StopAfter,
    Tick,
    ToRank,
    ViewBegins,
    ViewEnded,
    ViewPhase,
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
        self._membership = Membership(rules)
        self._slots = size
        self._idle: dict[int, _Process] = {}  # by the number that they will have
        self._unmet: set[int] = set()  # numbers that no process is there for
        self._members: dict[int, _Process] = {}
        self._stopped_pids: list[int] = []
        self._awaited: dict[int, int | None] = {}  # steps, after ``AskStep``
        self._reason = ""
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
                self._apply(Tick())
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
        reason = f"process {process.number} on {HOST} {how}"
        self._apply(MemberLost(process.number, code, reason))

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
            self._send((number,), Save(self._membership.view))
            return
        if line == "!grow":
            self._slots += 1
            self._apply(HostReady(HOST, self._slots))
            return
        kind, _, text = line.partition(" ")
        if kind != "member":
            return
        match decode_text(text, FROM_RANK):
            case Settled(step=step, reason=reason):
                self._note(f"settled {number} at {step}: {reason}")
                self._apply(MemberSettled(number, step, reason))
            case AtStep(step=step):
                self._awaited[number] = step
                self._answer()
            case Entered():
                self._note(f"running {number}")
            case Done(step=step):
                self._note(f"done {number}")
                self._apply(MemberDone(number, step))

    def _answer(self) -> None:
        steps = [s for n, s in self._awaited.items() if n in self._members]
        if steps and None not in steps:
            last = max(s for s in steps if s is not None) + 1
            stop = StopAfter(self._membership.view, last, self._reason)
            self._send(tuple(self._awaited), stop)
            self._awaited = {}

    def _note(self, what: str) -> None:
        self.notes.append(Note(time.monotonic(), what, self._membership.view))

    def _send(self, numbers: tuple[int, ...], message: ToRank) -> None:
        for number in numbers:
            if process := self._members.get(number):
                with suppress(OSError):
                    process.sock.sendall(f"member {encode_text(message)}\n".encode())

    def _apply(self, event: Event) -> None:
        for order in self._membership.apply(event, time.monotonic()):
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        view = self._membership.view
        match order:
            case StartProcess(place=place):
                self._unmet.add(place.number)
                self._pair()
            case Kill(number=number):
                os.kill(self._members.pop(number).pid, signal.SIGKILL)
            case EndView(numbers=numbers, reason=reason):
                self._awaited = {}
                self._send(numbers, ViewEnded(view, reason))
            case PauseView(numbers=numbers, reason=reason):
                self._awaited, self._reason = dict.fromkeys(numbers), reason
                self._send(numbers, AskStep(view))
            case BeginView():
                self._begin(order)
            case Dismiss(number=number, reason=reason):
                self._send((number,), Leave(reason))
                self._members.pop(number, None)
            case FinishAll():
                self._note("finished")
                self._send(tuple(self._members), Finish())
                self._kill(self._stopped_pids)
            case Stop(reason=reason):
                self.stopped = reason
                self._kill([process.pid for process in self._members.values()])
            case _:
                pass

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _begin(self, order: BeginView) -> None:
        self._note(f"begins {len(order.members)}")
        new = {place.number for place in order.new}
        key = secrets.token_hex(16)
        rest: dict[str, Any] = order._asdict()
        rest = {n: rest[n] for n in ("source", "step", "is_equal", "reason")}
        whole = ViewBegins(order.view, key, NO_VIEW, (), order.members, **rest)
        self._send(tuple(new), whole)
        change = whole._replace(base=order.view - 1, gone=order.gone, new=order.new)
        others = tuple(p.number for p in order.members if p.number not in new)
        self._send(others, change)


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
