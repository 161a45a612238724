"""What goes from ranks and programs to the controller: output, bytes for the store."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, cast

from ronde.launch.wire import messages
from ronde.membership.robust_mutex import await_owner_death
from ronde.store.local_socket import (
    is_own,
    listen,
    own_directories,
    remove,
    remove_stale,
    temporary_directory,
)
from ronde.store.protocol import MAX_FRAME_BYTES, max_connections

_FULL_BYTES = 64 << 10
_DRAIN_READS = 32
_READ_BYTES = 32 << 10
"""A frame's worth: little enough not to hold up what is more urgent."""
_MAX_UNSENT_BYTES = 32 << 20
_PREFIX = "ronde-agent-"
_TRACEBACK = b"Traceback (most recent call last):"
_PIPE_BYTES = 64 << 10
# Of what a rank writes: as JSON a byte may take six.
_MAX_TEXT_BYTES = MAX_FRAME_BYTES // 8
# With site-packages, which the agent does without: torch's version is asked for.
_PROGRAM = (
    "import sys; from importlib import import_module; "
    "sys.path.append(sys.argv[1]); import_module(sys.argv[2]).main()"
)
MAX_LINE_BYTES = 16 << 20  # of what a program or its controller writes at once

Watched = Iterator[tuple[int, int, Callable[[], object]]]
"""Descriptors to poll, the events of each, and what to call then."""


class OutputSender(messages.MessageWriter):
    """Messages at once, then what goes to the store, then output for which is credit.

    A terminal that takes nothing more uses up the credit and so, in the end, blocks
    the ranks that write to it. Messages overtake the output that waits.
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
            # What is handed over can be overtaken by nothing any more.
            now = output.data[: self._credit_bytes]
            if later := output.data[self._credit_bytes :]:
                self._outputs.appendleft(output._replace(data=later))
            self._output_bytes -= len(now)
            self._credit_bytes -= len(now)
            self.send(output._replace(data=now))
        if self._last_message is not None and not self._outputs:
            message, self._last_message = self._last_message, None
            self.send(message)


@dataclass(slots=True)
class OutputPipe:
    """The agent's end of one of a rank's output streams."""

    rank: int
    stream: messages.Stream
    file: IO[bytes]  # closed once all writers are gone and all is read
    sender: OutputSender
    # when the last Python traceback was read from stderr, monotonic; 0 for never
    traceback_s: float = 0.0
    _before: bytes = b""

    def __post_init__(self) -> None:
        os.set_blocking(self.file.fileno(), False)

    def read(self) -> bool:
        """Pass on what is there; False when nothing is now. Closes at the end."""
        try:
            # It may have been drained to its end after the poll had seen it ready.
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


def name_directory() -> Path:
    """Return where an agent may make its sockets; nobody can guess it before."""
    return temporary_directory() / f"{_PREFIX}{os.urandom(8).hex()}"


class StoreRelay:
    """Takes the connections of one generation's ranks and relays their bytes.

    The store is the controller's, so that no port is open for it and no rank's or
    host's end takes it away; the ranks' host reaches it over what it has anyway.
    """

    def __init__(
        self, directory: Path, epoch: int, num_ranks: int, sender: OutputSender
    ) -> None:
        self._epoch = epoch
        self._max_connections = max_connections(num_ranks)
        self._sender = sender
        self._by_number: dict[int, tuple[socket.socket, bytearray]] = {}
        self._count = 0
        if not directory.exists():
            # Remove the sockets of agents that were killed together with their reapers.
            for other in own_directories(_PREFIX):
                if remove_stale(other):
                    remove(other)
            directory.mkdir(mode=0o700)
        self.path = directory / f"store.{epoch}"
        self._listener = listen(self.path)
        self._listener.setblocking(False)  # noqa: FBT003  the socket's own method

    def watched(self) -> Watched:
        yield self._listener.fileno(), select.POLLIN, self._accept
        reading = 0 if self._is_held_back else select.POLLIN
        for number, (sock, unsent) in self._by_number.items():
            if events := reading | (select.POLLOUT if unsent else 0):
                yield sock.fileno(), events, partial(self._serve, number)

    @property
    def _is_held_back(self) -> bool:
        return self._sender.relayed_bytes >= _FULL_BYTES

    def deliver(self, relayed: messages.Relayed) -> None:
        number = relayed.connection
        if relayed.epoch != self._epoch or number not in self._by_number:
            return
        unsent = self._by_number[number][1]
        unsent += relayed.data
        if not relayed.data or len(unsent) > _MAX_UNSENT_BYTES:
            self._close(number)
        else:
            self._write(number)

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
            # It has gone again, or no descriptor is free: then it waits.
            return
        if not is_own(sock) or len(self._by_number) >= self._max_connections:
            sock.close()
            return
        sock.setblocking(False)  # noqa: FBT003  the socket's own method
        self._count += 1
        self._by_number[self._count] = sock, bytearray()

    def _serve(self, number: int) -> None:
        self._write(number)
        # It may have been closed, now or after the poll had seen it ready.
        if number not in self._by_number or self._is_held_back:
            return
        try:
            data = self._by_number[number][0].recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._sender.relay(messages.Relayed(self._epoch, number, data))
        else:
            self._close(number)

    def _write(self, number: int) -> None:
        sock, unsent = self._by_number.get(number, (None, bytearray()))
        try:
            while sock is not None and unsent:
                del unsent[: sock.send(unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._by_number:
            self._by_number.pop(number)[0].close()
            self._sender.relay(messages.Relayed(self._epoch, number, b""))


@dataclass(slots=True)
class _Channel:
    sock: socket.socket
    unread: bytes = b""
    unwritten: bytearray = field(default_factory=bytearray)
    is_reading: bool = True


class RankChannels:
    """Passes lines on between an elastic job's ranks and its controller.

    Each rank has a socket of its own. What the ranks write in one turn of the agent's
    loop is one message. A rank that is sent more than is kept for it loses its channel.
    ``on_death`` is called with a rank that has begun to die, unless it came too late.
    """

    def __init__(self, sender: OutputSender, on_death: Callable[[int], object]) -> None:
        self._sender = sender
        self._by_rank: dict[int, _Channel] = {}
        self._texts: list[messages.WorkerText] = []
        self._num_bytes = 0
        self._on_death = on_death
        self._deaths, self._deaths_in = socket.socketpair()

    def open(self, rank: int) -> socket.socket:
        """Return the rank's end of its new channel."""
        own, other = socket.socketpair()
        own.setblocking(False)  # noqa: FBT003  the socket's own method
        self._by_rank[rank] = _Channel(own)
        return other

    def watched(self) -> Watched:
        yield self._deaths.fileno(), select.POLLIN, self._read_deaths
        for rank, channel in self._by_rank.items():
            is_reading = channel.is_reading and not self._is_held_back
            events = select.POLLIN if is_reading else 0
            if events := events | (select.POLLOUT if channel.unwritten else 0):
                yield channel.sock.fileno(), events, partial(self._serve, rank)

    @property
    def _is_held_back(self) -> bool:
        return self._sender.waiting_bytes >= _FULL_BYTES

    def send(self, ranks: Sequence[int], text: str) -> None:
        """Write a line to ranks, to all without any; who is gone does not get it."""
        line = text.encode() + b"\n"
        for rank in ranks or list(self._by_rank):
            if channel := self._by_rank.get(rank):
                channel.unwritten += line
                self._write(channel)
                if len(channel.unwritten) > _MAX_UNSENT_BYTES:
                    self.finish(rank)

    def flush(self) -> None:
        if self._texts:
            self._sender.send(messages.WorkerTexts(tuple(self._texts)))
            self._texts.clear()
            self._num_bytes = 0

    def finish(self, rank: int) -> None:
        """Pass on what a rank has written, and close its channel."""
        self.drain(rank)
        if channel := self._by_rank.pop(rank, None):
            channel.sock.close()

    def drain(self, rank: int) -> None:
        """Pass on what a rank has written."""
        if channel := self._by_rank.get(rank):
            for _ in range(_DRAIN_READS):
                if not self._read(rank, channel):
                    break
            self.flush()

    def close(self) -> None:
        for channel in self._by_rank.values():
            channel.sock.close()
        self._by_rank.clear()
        self._deaths.close()
        self._deaths_in.close()

    def _await_death(self, rank: int, mutex: int) -> None:
        if await_owner_death(mutex):
            with suppress(OSError):  # the job is over
                self._deaths_in.send(b"%d\n" % rank)

    def _read_deaths(self) -> None:
        # It may have been closed after the poll had seen it ready.
        if self._deaths.fileno() >= 0:
            for word in self._deaths.recv(_READ_BYTES).split():
                self._on_death(int(word))

    def _serve(self, rank: int) -> None:
        # It may have been closed after the poll had seen it ready.
        if channel := self._by_rank.get(rank):
            self._write(channel)
            if not self._is_held_back:
                self._read(rank, channel)

    def _read(self, rank: int, channel: _Channel) -> bool:
        data, mutexes = b"", list[int]()
        try:
            if channel.is_reading:
                data, mutexes, *_ = socket.recv_fds(channel.sock, _PIPE_BYTES, 1)
        except BlockingIOError:
            return False
        except OSError:
            pass
        for mutex in mutexes:
            threading.Thread(
                target=self._await_death, args=(rank, mutex), daemon=True
            ).start()
        *lines, channel.unread = (channel.unread + data).split(b"\n")
        texts = [line.decode(errors="backslashreplace") for line in lines]
        self._texts += [messages.WorkerText(rank, text) for text in texts]
        self._num_bytes += len(data)
        if self._num_bytes >= _FULL_BYTES:
            self.flush()
        channel.is_reading = bool(data) and len(channel.unread) <= _MAX_TEXT_BYTES
        return channel.is_reading

    def _write(self, channel: _Channel) -> None:
        try:
            while channel.unwritten:
                del channel.unwritten[: channel.sock.send(channel.unwritten)]
        except BlockingIOError:
            pass
        except OSError:
            # It has closed its end.
            channel.unwritten.clear()


class RemoteProgram:
    """Runs a program that the controller exchanges lines with, in the agent's loop.

    The program is a module's ``main``, which reads lines on its standard input until
    that ends, and writes lines on its standard output.
    """

    def __init__(self, module: str, sender: OutputSender) -> None:
        self._sender = sender
        self._unread = b""
        self._unwritten = bytearray()
        self._is_reading = True
        package_dir = __file__.rpartition("/ronde/launch/")[0]
        # Its group is its own, so that nothing typed at a terminal reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, package_dir, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        pipes = cast(
            "tuple[IO[bytes], ...]", (self._process.stdout, self._process.stdin)
        )
        self._files = pipes
        self._pipes = messages.PipeTransport(*(pipe.fileno() for pipe in pipes))

    def watched(self) -> Watched:
        if self._is_reading:
            yield self._pipes.read_fd, select.POLLIN, self._read
        if self._unwritten:
            yield self._pipes.write_fd, select.POLLOUT, self._write

    def write(self, line: str) -> None:
        self._unwritten += line.encode() + b"\n"
        self._write()

    def close(self) -> None:
        while self._is_reading and self._read():
            pass
        # Something that it has started may hold its output.
        self._is_reading = False
        self._unwritten.clear()
        for file in self._files:
            file.close()
        # The agent has reaped it, and nobody is to wait for it again.
        self._process.returncode = 0

    def _read(self) -> bool:
        data = self._pipes.read() if self._is_reading else None
        if data is None:
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="backslashreplace")
            self._sender.send(messages.ProgramLine(text))
        # More would fill the memory of both hosts.
        self._is_reading = bool(data) and len(self._unread) <= MAX_LINE_BYTES
        return True

    def _write(self) -> None:
        try:
            with memoryview(self._unwritten) as unwritten:
                written = self._pipes.write(unwritten)
            del self._unwritten[:written]
        except BrokenPipeError:
            # Why it ended is reported when it is reaped.
            self._unwritten.clear()
