"""The agent's connections to ranks and programs: output, store, channels."""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from ronde.launch.bootstrap import explain_shortage
from ronde.launch.signals import Watched
from ronde.launch.wire import messages
from ronde.store.local_socket import (
    is_own,
    listen,
    live_directories,
    temporary_directory,
)
from ronde.store.protocol import MAX_FRAME_BYTES, max_connections
from ronde.world.environment import MAX_STATUS_BYTES

_FULL_BYTES = 64 << 10
_DRAIN_READS = 32
_READ_BYTES = 32 << 10  # small, so that messages need not wait long
_MAX_UNSENT_BYTES = 32 << 20
_PREFIX = "ronde-agent-"
_TRACEBACK = b"Traceback (most recent call last):"
_PIPE_BYTES = 64 << 10
# As JSON a byte may take six.
_MAX_TEXT_BYTES = MAX_FRAME_BYTES // 8
# With site-packages, which the agent lacks: some programs import torch.
_PROGRAM = (
    "import sys; from importlib import import_module; "
    "sys.path.append(sys.argv[1]); import_module(sys.argv[2]).main()"
)
MAX_LINE_BYTES = 16 << 20  # of a program or its controller
_OBSERVER = "ronde.monitor.observer"
_ASKED_S = 6.0  # after a question, its watcher may still be there
_LAST_S = 3.0
_STATUS_EVERY_S = 1.0
_MAX_EXIT_NOTICES = 16


class OutputSender(messages.MessageWriter):
    """Sends messages first, then store traffic, then output while credit lasts.

    If the terminal stalls, the credit runs out, and the ranks' writes block.
    """

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        super().__init__(write)
        self._outputs: deque[messages.Output] = deque()
        self._last_message: messages.FromAgent | None = None
        self._is_discarding = False
        self._output_bytes = 0
        self._credit_bytes = messages.FIRST_CREDIT_BYTES

    @property
    def is_full(self) -> bool:
        return self._output_bytes >= _FULL_BYTES

    def send_last(self, message: messages.FromAgent) -> None:
        self._last_message = message
        self.flush()

    def put_output(self, output: messages.Output) -> None:
        if not self._is_discarding:
            self._outputs.append(output)
            self._output_bytes += len(output.data)
            self.flush()

    def discard(self) -> None:
        self._is_discarding = True
        self._outputs.clear()
        self._output_bytes = 0

    def grant(self, num_bytes: int) -> None:
        self._credit_bytes += num_bytes
        self.flush()

    def flush(self) -> None:
        super().flush()
        while self._outputs and self._credit_bytes > 0 and not self.is_writing:
            output = self._outputs.popleft()
            # Messages can only overtake output that is still queued here.
            now = output.data[: self._credit_bytes]
            if later := output.data[self._credit_bytes :]:
                self._outputs.appendleft(output._replace(data=later))
            self._output_bytes -= len(now)
            self._credit_bytes -= len(now)
            self.send(output._replace(data=now))
        if self._last_message is not None and not self._outputs:
            message, self._last_message = self._last_message, None
            self.send(message)


class OutputPipe:
    """The agent's end of one output stream of a rank."""

    def __init__(
        self, rank: int, stream: messages.Stream, file: IO[bytes], sender: OutputSender
    ) -> None:
        self.rank, self.stream, self.sender = rank, stream, sender
        self.file = file  # closed at its end
        self.traceback_s = 0.0  # last Python traceback on stderr, monotonic; 0 for none
        self._before = b""
        os.set_blocking(file.fileno(), False)

    def read(self) -> bool:
        """Read once and queue the output; return False if there was none."""
        try:
            # The pipe may have been drained and closed since the poll.
            is_open = not self.file.closed
            data = os.read(self.file.fileno(), _PIPE_BYTES) if is_open else b""
        except BlockingIOError:
            return False
        if not data:
            self.file.close()
            return False
        if self.stream is messages.Stream.STDERR:
            text = self._before + data
            if _TRACEBACK in text:
                self.traceback_s = time.monotonic()
            self._before = text[1 - len(_TRACEBACK) :]
        self.sender.put_output(messages.Output(self.rank, self.stream, data))
        return True

    def drain(self) -> None:
        for _ in range(_DRAIN_READS):
            if not self.read():
                return


class PolledSocket:
    """A non-blocking socket with a buffer for unsent bytes."""

    def __init__(self, sock: socket.socket, max_line_bytes: int = 0) -> None:
        sock.setblocking(False)  # noqa: FBT003  the socket's own method
        self.sock = sock
        self.unsent = bytearray()
        self.is_reading = True
        self._max_line_bytes = max_line_bytes
        self._unread = b""

    def events(self, *, is_held_back: bool = False) -> int:
        reading = select.POLLIN if self.is_reading and not is_held_back else 0
        return reading | (select.POLLOUT if self.unsent else 0)

    def send(self, data: bytes = b"") -> bool:
        self.unsent += data
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()
            return False
        return True

    def receive_lines(self) -> tuple[list[bytes], list[int]] | None:
        """Return complete lines and received descriptors; None if there is no data.

        Reading ends when the peer closes the socket or sends a line that is too long.
        """
        data, fds = b"", list[int]()
        try:
            if self.is_reading:
                data, fds, *_ = socket.recv_fds(self.sock, _PIPE_BYTES, 1)
        except BlockingIOError:
            return None
        except OSError:
            pass
        *lines, self._unread = (self._unread + data).split(b"\n")
        self.is_reading = bool(data) and len(self._unread) <= self._max_line_bytes
        return lines, fds


def name_directory() -> Path:
    return temporary_directory() / f"{_PREFIX}{os.urandom(8).hex()}"


class StoreRelay:
    """Relays the store connections of one generation's ranks to the controller.

    A store in the controller needs no open port, and survives a lost rank or host.
    """

    def __init__(
        self, directory: Path, epoch: int, num_ranks: int, sender: OutputSender
    ) -> None:
        self._epoch = epoch
        self._max_connections = max_connections(num_ranks)
        self._sender = sender
        self._by_number: dict[int, PolledSocket] = {}
        self._count = 0
        if not directory.exists():
            live_directories(_PREFIX)  # removes those of killed agents
            directory.mkdir(mode=0o700)
        self.path = directory / f"store.{epoch}"
        self._listener = listen(self.path)
        self._listener.setblocking(False)  # noqa: FBT003  the socket's own method

    def watched(self) -> Watched:
        yield self._listener.fileno(), select.POLLIN, self._accept
        is_held_back = self._is_held_back
        for number, polled in self._by_number.items():
            if events := polled.events(is_held_back=is_held_back):
                yield polled.sock.fileno(), events, partial(self._serve, number)

    @property
    def _is_held_back(self) -> bool:
        return self._sender.relayed_bytes >= _FULL_BYTES

    def deliver(self, relayed: messages.Relayed) -> None:
        number = relayed.connection
        if relayed.epoch != self._epoch or number not in self._by_number:
            return
        polled = self._by_number[number]
        is_open = bool(relayed.data) and polled.send(relayed.data)
        if not is_open or len(polled.unsent) > _MAX_UNSENT_BYTES:
            self._close(number)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            self.path.unlink(missing_ok=True)
        for number in list(self._by_number):
            self._close(number)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it closed again, or no descriptor is free: then it waits
        if not is_own(sock) or len(self._by_number) >= self._max_connections:
            sock.close()
            return
        self._count += 1
        self._by_number[self._count] = PolledSocket(sock)

    def _serve(self, number: int) -> None:
        polled = self._by_number.get(number)
        if polled is None:
            return  # it was closed since the poll
        data = b""
        if polled.send():
            if self._is_held_back:
                return
            try:
                data = polled.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                pass
        if data:
            self._sender.relay(messages.Relayed(self._epoch, number, data))
        else:
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._by_number:
            self._by_number.pop(number).sock.close()
            self._sender.relay(messages.Relayed(self._epoch, number, b""))


class RankChannels:
    """The agent's ends of its ranks' channels: see Note [One channel a rank].

    The newest status of each rank is sent to the controller once a second; exit notices
    are kept for ``read_exits``. In an elastic job, channels also carry membership
    messages, and ``on_death`` is called with a worker's number once the kernel begins
    to end that worker. If a rank does not read, its channel is closed.
    """

    def __init__(
        self, sender: OutputSender, on_death: Callable[[int], object] | None
    ) -> None:
        self._sender = sender
        self._by_rank: dict[int, PolledSocket] = {}
        self._texts: list[messages.WorkerText] = []
        self._num_bytes = 0
        self._statuses: dict[int, tuple[str, float]] = {}  # text, time of reading
        self._send_at_s = 0.0
        self._exits: dict[int, deque[bytes]] = {}
        self._on_death = on_death
        self._deaths, self._deaths_in = socket.socketpair()

    @property
    def due_s(self) -> float:
        return self._send_at_s if self._statuses else float("inf")

    def open(self, rank: int) -> socket.socket:
        own, other = socket.socketpair()
        self._by_rank[rank] = PolledSocket(own, _MAX_TEXT_BYTES)
        return other

    def watched(self) -> Watched:
        yield self._deaths.fileno(), select.POLLIN, self._read_deaths
        is_held_back = self._is_held_back
        for rank, channel in self._by_rank.items():
            if events := channel.events(is_held_back=is_held_back):
                yield channel.sock.fileno(), events, partial(self._serve, rank)

    @property
    def _is_held_back(self) -> bool:
        return self._sender.waiting_bytes >= _FULL_BYTES

    def send(self, ranks: Sequence[int], text: str) -> None:
        line = b"member " + text.encode() + b"\n"
        for rank in ranks or list(self._by_rank):
            if channel := self._by_rank.get(rank):
                channel.send(line)
                if len(channel.unsent) > _MAX_UNSENT_BYTES:
                    self.finish(rank)

    def flush(self) -> None:
        if self._texts:
            self._sender.send(messages.WorkerTexts(tuple(self._texts)))
            self._texts.clear()
            self._num_bytes = 0
        now_s = time.monotonic()
        if now_s >= self.due_s:
            self._send_at_s = now_s + _STATUS_EVERY_S
            if not self._is_held_back:
                found = [
                    messages.StatusText(rank, text, now_s - at_s)
                    for rank, (text, at_s) in self._statuses.items()
                ]
                self._sender.send(messages.Statuses(tuple(found)))
                self._statuses.clear()

    def finish(self, rank: int) -> None:
        self.drain(rank)
        self._statuses.pop(rank, None)
        if channel := self._by_rank.pop(rank, None):
            channel.sock.close()

    def drain(self, rank: int) -> None:
        if channel := self._by_rank.get(rank):
            for _ in range(_DRAIN_READS):
                if not self._read(rank, channel):
                    break
            self.flush()

    def read_exits(self) -> list[tuple[int, float, int]]:
        """Return new exit notices as tuples of worker, time and pid."""
        for rank, channel in self._by_rank.items():
            self._read(rank, channel)
        found: list[tuple[int, float, int]] = []
        for rank, notices in self._exits.items():
            for notice in notices:
                with suppress(ValueError):
                    at_s, pid = notice.split()
                    found.append((rank, float(at_s), int(pid)))
        self._exits.clear()
        return found

    def close(self) -> None:
        for channel in self._by_rank.values():
            channel.sock.close()
        self._by_rank.clear()
        self._deaths.close()
        self._deaths_in.close()

    def _await_death(self, rank: int, mutex: int) -> None:
        # Imported late: a plain job needs no ctypes.
        from ronde.membership.robust_mutex import await_owner_death

        if await_owner_death(mutex):
            with suppress(OSError):  # the job is over
                self._deaths_in.send(b"%d\n" % rank)

    def _read_deaths(self) -> None:
        if self._deaths.fileno() >= 0 and self._on_death is not None:
            for word in self._deaths.recv(_READ_BYTES).split():
                self._on_death(int(word))

    def _serve(self, rank: int) -> None:
        if channel := self._by_rank.get(rank):
            channel.send()
            if not self._is_held_back:
                self._read(rank, channel)

    def _read(self, rank: int, channel: PolledSocket) -> bool:
        received = channel.receive_lines()
        if received is None:
            return False
        lines, fds = received
        for fd in fds:
            if self._on_death is None:
                os.close(fd)
            else:
                threading.Thread(
                    target=self._await_death, args=(rank, fd), daemon=True
                ).start()
        for line in lines:
            # Any process of the rank may write anything here.
            kind, _, text = line.partition(b" ")
            if kind == b"exit":
                notices = self._exits.setdefault(rank, deque(maxlen=_MAX_EXIT_NOTICES))
                notices.append(text)
            elif kind == b"status" and len(text) <= MAX_STATUS_BYTES:
                self._statuses[rank] = text.decode(errors="replace"), time.monotonic()
            elif kind == b"member" and self._on_death is not None:
                decoded = text.decode(errors="backslashreplace")
                self._texts.append(messages.WorkerText(rank, decoded))
                self._num_bytes += len(text)
        if self._num_bytes >= _FULL_BYTES:
            self.flush()
        return channel.is_reading


class RemoteProgram:
    """A program that exchanges lines with the controller.

    It runs the ``main`` of a module, which must read standard input to its end.
    """

    def __init__(
        self, module: str, on_line: Callable[[str], object], *arguments: str
    ) -> None:
        self._on_line = on_line
        own, other = socket.socketpair()
        self._socket = PolledSocket(own, MAX_LINE_BYTES)
        package_dir = __file__.rpartition("/ronde/launch/")[0]
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, package_dir, module, *arguments],
                stdin=other.fileno(),
                stdout=other.fileno(),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def watched(self) -> Watched:
        if events := self._socket.events():
            yield self._socket.sock.fileno(), events, self._serve

    def write(self, line: str) -> None:
        self._socket.send(line.encode() + b"\n")

    @property
    def has_ended(self) -> bool:
        return not self._socket.is_reading

    def close_input(self) -> None:
        with suppress(OSError):
            self._socket.sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        while self._socket.is_reading and self._read():
            pass
        # A process that the program started may still hold its output.
        self._socket.is_reading = False
        self._socket.sock.close()
        # The agent has reaped it: Popen must not wait for it.
        self._process.returncode = 0

    def _serve(self) -> None:
        if self._socket.sock.fileno() >= 0:
            self._socket.send()
            self._read()

    def _read(self) -> bool:
        received = self._socket.receive_lines()
        for line in received[0] if received else ():
            self._on_line(line.decode(errors="backslashreplace"))
        return received is not None


class ObserverProgram:
    """The observer of this host, which is started for the first question.

    A question with a true ``until_end`` has answers at the job's end as well.
    """

    def __init__(self, sender: OutputSender) -> None:
        self._sender = sender
        self._program: RemoteProgram | None = None
        self._asked_s = float("-inf")  # for answers at the end
        self.due_s = float("inf")  # of ``finish``

    def watched(self) -> Watched:
        return self._program.watched() if self._program is not None else iter(())

    def ask(self, line: str, pids: Mapping[int, int]) -> None:
        try:
            if self._program is None and pids:
                self._program = RemoteProgram(
                    _OBSERVER, lambda line: self._sender.send(messages.Observed(line))
                )
        except OSError as error:
            why = explain_shortage(error) or str(error.strerror)
            self._sender.send(messages.Notice(f"the observer does not start: {why}"))
        if self._program is not None:
            question = json.loads(line)
            self._program.write(json.dumps({**question, "pids": pids}))
            if question.get("until_end") is True:
                self._asked_s = time.monotonic()

    def finish(self) -> bool:
        """Return True once the answers at the end are there, after 3 s at most."""
        now_s = time.monotonic()
        if self._program is None or now_s > self._asked_s + _ASKED_S:
            return True
        if self.due_s == float("inf"):
            self.due_s = now_s + _LAST_S
            self._program.close_input()
        return now_s >= self.due_s or self._program.has_ended

    def kill(self) -> None:
        self.due_s = float("inf")
        if self._program is not None:
            self._program.kill()
            self._program = None

    def note_end(self, pid: int) -> None:
        if self._program is not None and pid == self._program.pid:
            self._program.close()
            self._program = None
