"""The controller's connection to a host: the agent's start, messages and loss."""

import fcntl
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, cast

from ronde.errors import Failure, HostFailure, LaunchError
from ronde.launch.bootstrap import start_local_agent
from ronde.launch.host import LOOK_S, Host, LookUp, is_here
from ronde.launch.limits import (
    EXIT_INTERNAL,
    EXIT_NO_FORK,
    EXIT_UNREACHABLE,
    USUAL,
    Timeouts,
)
from ronde.launch.signals import raise_if_stopped, wait_for
from ronde.launch.wire import messages
from ronde.processes import end_with

if TYPE_CHECKING:
    from ronde.launch.hosts.spawner import HelloReader, Spawner

_READ_BYTES = 256 << 10
_PIPE_BYTES = 256 << 10
_LAST_WORDS_BYTES = 4096
_RELAYED_BYTES = 32 << 10
# Limit on an agent's unread output: low on networks, so that messages are not late.
_CREDIT_HERE_BYTES = 2 << 20
_CREDIT_BYTES = 128 << 10
_NEVER = float("inf")
_SSH_FAILED = 255
_MANY = 8  # hosts whose names are looked up in parallel
_SENTINEL_BYTES = 32
Received = messages.FromAgent | messages.Output | messages.Relayed


class AgentTransport(messages.Transport, Protocol):
    """A connection to an agent; ``close`` makes the agent end its ranks and exit."""

    @property
    def error_fd(self) -> int: ...  # its standard error, or -1

    # Return the exit code of the process that connects, as Popen has it; 0 without one,
    # None if it still runs.
    def wait(self, timeout_s: float) -> int | None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class ProcessTransport(messages.PipeTransport):
    """The three pipes of a local agent, or of the ssh that runs a remote one."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid
        pipes = (process.stdin, process.stdout, process.stderr)
        self._files = cast("tuple[IO[bytes], IO[bytes], IO[bytes]]", pipes)
        write_fd, read_fd, self.error_fd = (file.fileno() for file in self._files)
        super().__init__(read_fd, write_fd)
        os.set_blocking(self.error_fd, False)
        # Longer reads of output. The user may be over the limit for pipes.
        with suppress(OSError):
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def wait(self, timeout_s: float) -> int | None:
        if self._process.poll() is None:
            try:
                process_fd = os.pidfd_open(self.pid)
            except OSError:  # some containers forbid them
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
                return self._process.returncode
            wait_for([process_fd], [], timeout_s)
            os.close(process_fd)
        return self._process.poll()

    def close(self) -> None:
        for file in self._files:
            file.close()
        self.read_fd = self.write_fd = self.error_fd = -1
        # The process must notice this end even if it was stopped.
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()


class HostLoss(NamedTuple):
    """The reason for a host's loss, and the exit code of a job that it makes fail."""

    reason: str  # in half a sentence
    exit_code: int  # of the job, if this is why it failed


class AgentNode(messages.MessageWriter):
    """A host, with the connection to its agent.

    Times are monotonic. An agent that ``is_here`` is a child process: it needs no
    pings, since its exit is noticed at once.
    """

    def __init__(
        self,
        host: Host,
        transport: AgentTransport,
        hello_reader: "HelloReader | None" = None,
        *,
        is_here: bool,
        timeouts: Timeouts = USUAL,
    ) -> None:
        super().__init__(self._write_some)
        self.host = host  # as the user named it
        self.name = host.name
        self.transport = transport
        self.hello_reader = hello_reader
        self.is_here = is_here
        self.timeouts = timeouts
        self.hello: messages.Hello | None = None
        self.ranks: frozenset[int] = frozenset()  # ids of its workers
        self.owed_bytes = 0  # output received since the last credit
        self.heard_at_s = 0.0  # when its last message came
        self.silent_by_s = _NEVER  # when it is lost unless a message comes
        self.has_more_time = False  # it was silent, but its host answers
        self.is_over = False  # closed or lost
        self.has_errors = transport.error_fd >= 0
        self._credit_bytes = messages.FIRST_CREDIT_BYTES
        self._reader = messages.MessageDecoder(
            (*messages.FROM_AGENT, messages.Output, messages.Relayed)
        )
        self._last_words = b""
        self._pinged_at_s = 0.0
        self._round_trip_s = _NEVER
        self.clock_offset_s = 0.0
        self._is_watched = False

    def _write_some(self, data: memoryview) -> int:
        try:
            return len(data) if self.is_over else self.transport.write(data)
        except BrokenPipeError:
            return len(data)  # its end is noticed by reading

    def relay(self, relayed: messages.Relayed) -> None:
        """Send a reply of the store in chunks, so that messages can overtake it."""
        data = relayed.data
        for at in range(0, max(len(data), 1), _RELAYED_BYTES):
            super().relay(relayed._replace(data=data[at : at + _RELAYED_BYTES]))

    def receive(self) -> list[Received] | None:
        data, reader = self.transport.read(), self.hello_reader
        if data == b"":
            return None
        if data and reader is not None and reader.found is None:
            data = reader.feed(data)
        return self._reader.feed(data or b"")

    def find_problem(self) -> Failure | None:
        reader = self.hello_reader
        if reader is None or reader.found is None:
            return None
        return reader.found.problem(self.host, reader.program)

    def read_errors(self) -> None:
        if self.is_over:
            return
        with suppress(BlockingIOError):
            data = os.read(self.transport.error_fd, _READ_BYTES)
            self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
            self.has_errors = bool(data)

    @property
    def last_words(self) -> str:
        return self._last_words.decode("utf-8", "backslashreplace").strip()

    @property
    def known_hello(self) -> messages.Hello:
        if self.hello is None:
            raise AssertionError("the agent has not sent Hello yet")
        return self.hello

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(i.address for i in self.hello.interfaces) if self.hello else ()

    def require_own(self, rank: int) -> None:
        if rank not in self.ranks:
            raise LaunchError(
                f"agent on {self.name} reported rank {rank}, which it does not run."
            )

    def watch(self, *, is_watched: bool) -> None:
        if is_watched and self._is_watched:
            return
        self._is_watched = is_watched and not self.is_here
        self.heard()

    def heard(self) -> None:
        limit_s = self.timeouts.lease_s if self._is_watched else _NEVER
        self.heard_at_s = time.monotonic()
        self.silent_by_s = self.heard_at_s + limit_s
        self.has_more_time = False

    def give_more_time(self) -> None:
        self.has_more_time = True
        self.silent_by_s = self.heard_at_s + 2 * self.timeouts.lease_s

    def ping(self, now_s: float) -> float:
        if self.is_here or self.is_over:
            return _NEVER
        if now_s >= self._pinged_at_s + self.timeouts.ping_s:
            self._pinged_at_s = now_s
            own = _own_addresses() if self.timeouts.probes_silent else ()
            self.send(messages.Ping(now_s, self.timeouts.lease_s, own))
        return self._pinged_at_s + self.timeouts.ping_s

    def limit_credit(self, num_bytes: int) -> None:
        most = _CREDIT_HERE_BYTES if self.is_here else _CREDIT_BYTES
        limit = max(min(num_bytes, most), messages.FIRST_CREDIT_BYTES)
        self.owed_bytes += limit - self._credit_bytes
        self._credit_bytes = limit

    def grant(self) -> None:
        if self.owed_bytes >= self._credit_bytes // 4:
            self.send(messages.Credit(self.owed_bytes))
            self.owed_bytes = 0

    def on_pong(self, pong: messages.Pong) -> None:
        """Estimate the offset of the agent's clock from the fastest answer so far."""
        now_s = time.monotonic()
        round_trip_s = now_s - pong.sent_at_s
        if 0 <= round_trip_s < self._round_trip_s:
            self._round_trip_s = round_trip_s
            self.clock_offset_s = pong.here_s - (pong.sent_at_s + now_s) / 2

    def explain_end(self) -> HostLoss:
        last_s = time.monotonic() + self.timeouts.end_s
        while self.has_errors and wait_for([self.transport.error_fd], [], 0.1):
            self.read_errors()
            if time.monotonic() > last_s:
                break
        code = self.transport.wait(self.timeouts.end_s)
        errors = self.last_words.splitlines()
        last = f"; last error: {errors[-1].strip()}" if errors else ""
        if self.is_here:
            reason = f"its agent exited with code {code}{last}"
            return HostLoss(reason, EXIT_INTERNAL)
        # Source: ssh(1), exit status: other codes are the remote program's.
        if code is None or not 0 < code < _SSH_FAILED:
            return HostLoss(f"the connection to it ended{last}", EXIT_UNREACHABLE)
        return HostLoss(f"its agent exited with code {code}{last}", EXIT_INTERNAL)

    def close(self) -> None:
        self.is_over = True
        self.transport.close()


@functools.cache
def _own_addresses() -> tuple[str, ...]:
    # Imported late, for jobs on several hosts.
    from ronde.addresses import read_interfaces

    return tuple(each.address for each in read_interfaces())


def start_remote_agent(
    spawner: "Spawner", host: Host, python: str, timeouts: Timeouts = USUAL
) -> AgentNode:
    # Imported late, for jobs on several hosts.
    from ronde.launch.hosts.spawner import BOOTSTRAP, HelloReader

    process = subprocess.Popen(
        spawner.command(host, [python, "-E", "-S", "-c", BOOTSTRAP]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        # The controller has one thread, so that code between fork and exec is safe.
        preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    )
    transport = ProcessTransport(process)
    sentinel = os.urandom(_SENTINEL_BYTES).hex()
    here = Path(__file__)
    program = here.with_name("remote_bootstrap.py").read_text(encoding="utf-8")
    call = f"bootstrap({sentinel!a}, {str(here.parents[3])!a})"
    # It fits into the pipe. If ssh has ended, reading shows why.
    with suppress(BrokenPipeError):
        transport.write(memoryview(f"exec({program!a}); {call}\n".encode()))
    reader = HelloReader(spawner.name, sentinel[::-1].encode())
    return AgentNode(host, transport, reader, is_here=False, timeouts=timeouts)


class AgentStarter:
    """Starts agents; without ``make_spawner``, all host names mean this machine.

    With ``has_aliases``, several names may mean this machine, each with its own agent.
    """

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        make_spawner: "Callable[[], Spawner] | None" = None,
        python: str = sys.executable,
        timeouts: Timeouts = USUAL,
        *,
        has_aliases: bool = False,
    ) -> None:
        self.timeouts = timeouts
        self._has_aliases = has_aliases
        self._local: subprocess.Popen[bytes] | None = local
        self._make_spawner = make_spawner
        self._python = python
        self._here: set[str] = set()
        self._found: dict[str, tuple[str, ...]] = {}
        self._look_ups: dict[str, LookUp] = {}

    @functools.cached_property
    def spawner(self) -> "Spawner":
        if self._make_spawner is None:
            raise AssertionError(
                "AgentStarter has no spawner: all hosts are this machine"
            )
        return self._make_spawner()

    def is_here(self, host: Host) -> bool:
        if self._make_spawner is None:
            return True
        is_open = self._has_aliases or not self._here
        if is_open and is_here(host, self._found.get(host.name)):
            self._here.add(host.name)
        return host.name in self._here

    def look_up(self, hosts: Sequence[Host], stop_fd: int) -> None:
        """Resolve names in parallel if there are many; ``is_here`` uses the results."""
        names = [host.name for host in hosts if host.name not in self._found]
        if self._make_spawner is None or len(names) < _MANY:
            return
        look_up = LookUp(names)
        while not look_up.is_over(LOOK_S):
            raise_if_stopped(stop_fd)
        self._found |= {name: look_up.answers.get(name, ()) for name in names}

    def is_looked_up(self, host: Host) -> bool:
        """Look up a host's name in a thread; return True once that is done."""
        name = host.name
        if self._make_spawner is None or self._found.get(name):
            return True
        look_up = self._look_ups.pop(name, None) or LookUp([name])
        if not look_up.is_over():
            self._look_ups[name] = look_up
            return False
        # If no name server has answered, ssh asks again.
        self._found[name] = look_up.answers.get(name, ())
        return True

    def start(self, host: Host) -> AgentNode:
        if self.is_here(host):
            local, self._local = self._local or start_local_agent(), None
            transport = ProcessTransport(local)
            return AgentNode(host, transport, is_here=True, timeouts=self.timeouts)
        return start_remote_agent(self.spawner, host, self._python, self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, errors: str) -> Failure:
        if not node.is_here:
            return self.spawner.explain(node.host, exit_code, errors)
        if exit_code == EXIT_NO_FORK and not self._has_aliases:
            raise LaunchError(errors.strip())
        return Failure(f"its agent ended with exit code {exit_code}: {errors}", "")

    def explain_silence(
        self, failures: Sequence[HostFailure], hosts: Sequence[Host]
    ) -> list[HostFailure]:
        """Return the failures; that of the first silent host gets a better reason."""
        # Imported late: most hosts answer.
        from ronde.launch.hosts.spawner import NO_ANSWER

        found, by_name = list(failures), {host.name: host for host in hosts}
        for index, each in enumerate(failures):
            if each.failure.reason.startswith(NO_ANSWER):
                # It takes seconds, and other hosts mostly have the same reason.
                better = self.spawner.explain_silence(by_name[each.host])
                found[index] = each._replace(failure=better or each.failure)
                break
        return found
