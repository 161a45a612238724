"""A host of a job as its controller sees it: its agent, from the start to the end."""

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
from ronde.launch.host import LOOK_S, LOOK_UP_S, Host, LookUp, is_here
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
# Output that may be under way: little on a network, so that messages are not late.
_CREDIT_HERE_BYTES = 2 << 20
_CREDIT_BYTES = 128 << 10
_NEVER = float("inf")
_SSH_FAILED = 255
_MANY = 8  # hosts whose names are looked up at once, and not one after the other
_MAX_EXPLAINED = 8
_SENTINEL_BYTES = 32
Received = messages.FromAgent | messages.Output | messages.Relayed


class AgentTransport(messages.Transport, Protocol):
    """The way to an agent."""

    @property
    def error_fd(self) -> int: ...  # the other side's complaints; -1 where none come

    # The exit code of what carries the bytes, minus the number of a signal, 0 where
    # there is no process; None if it goes on.
    def wait(self, timeout_s: float) -> int | None: ...

    def close(self) -> None: ...  # the agent then ends everything and itself

    def kill(self) -> None: ...  # the agent may live on


class ProcessTransport(messages.PipeTransport):
    """The three pipes of a process: the agent itself, or the ssh that leads to it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid
        pipes = (process.stdin, process.stdout, process.stderr)
        self._files = cast("tuple[IO[bytes], IO[bytes], IO[bytes]]", pipes)
        write_fd, read_fd, self.error_fd = (file.fileno() for file in self._files)
        super().__init__(read_fd, write_fd)
        os.set_blocking(self.error_fd, False)
        # Fewer and longer reads of what the ranks write. Users may be over their limit.
        with suppress(OSError):
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def wait(self, timeout_s: float) -> int | None:
        if self._process.poll() is None:
            try:
                process_fd = os.pidfd_open(self.pid)
            except OSError:  # not every kernel and container has them
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
        # Somebody may have stopped it, and it has to see this end.
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()


class HostLoss(NamedTuple):
    """Why a host is gone."""

    reason: str  # in half a sentence
    exit_code: int  # of the job, if this is why it failed


class AgentNode(messages.MessageWriter):
    """A host, the frames to and from its agent, and what is known of it.

    Times are monotonic. Of an agent that ``is_here``, started without going over a
    network, only the end can be missed, and that is seen at once.
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
        self.ranks: frozenset[int] = frozenset()  # those that run there now
        self.owed_bytes = 0  # output that came since credit was last given
        self.heard_at_s = 0.0  # when something came from it
        self.silent_by_s = _NEVER  # when it counts as lost if nothing comes
        self.is_doubted = False  # nothing came for ``lease_s``, but its host answers
        self.is_over = False  # it is gone, whoever wanted that
        self.has_errors = transport.error_fd >= 0
        self._credit_bytes = messages.FIRST_CREDIT_BYTES  # output that may be under way
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
            return self.transport.write(data)
        except BrokenPipeError:
            return len(data)  # an agent that is gone does not get it

    def relay(self, relayed: messages.Relayed) -> None:
        """Send the store's reply, in pieces between which messages come first."""
        data = relayed.data
        for at in range(0, max(len(data), 1), _RELAYED_BYTES):
            super().relay(relayed._replace(data=data[at : at + _RELAYED_BYTES]))

    def receive(self) -> list[Received] | None:
        data, greeter = self.transport.read(), self.hello_reader
        if data == b"":
            return None
        if data and greeter is not None and greeter.found is None:
            data = greeter.feed(data)
        return self._reader.feed(data or b"")

    def find_problem(self) -> Failure | None:
        reader = self.hello_reader
        if reader is None or reader.found is None:
            return None
        return reader.found.problem(self.host, reader.program)

    def read_errors(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self.transport.error_fd, _READ_BYTES)
            self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
            self.has_errors = bool(data)

    @property
    def last_words(self) -> str:
        return self._last_words.decode("utf-8", "backslashreplace").strip()

    @property
    def met(self) -> messages.Hello:
        if self.hello is None:
            raise AssertionError("a node that was connected has sent its hello")
        return self.hello

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(i.address for i in self.hello.interfaces) if self.hello else ()

    def require_own(self, rank: int) -> None:
        if rank not in self.ranks:
            raise LaunchError(
                f"agent of {self.name} must report its own ranks, got rank {rank}."
            )

    def watch(self, *, is_watched: bool) -> None:
        """Begin or stop to count its silence; counting that runs goes on."""
        if is_watched and self._is_watched:
            return
        self._is_watched = is_watched and not self.is_here
        self.heard()

    def heard(self) -> None:
        limit_s = self.timeouts.lease_s if self._is_watched else _NEVER
        self.heard_at_s = time.monotonic()
        self.silent_by_s = self.heard_at_s + limit_s
        self.is_doubted = False

    def doubt(self) -> None:
        """Wait as long again: its host answers."""
        self.is_doubted = True
        self.silent_by_s = self.heard_at_s + 2 * self.timeouts.lease_s

    def ping(self, now_s: float) -> float:
        """Send a ping if one is due; return when the next one is."""
        if self.is_here or self.is_over:
            return _NEVER
        if now_s >= self._pinged_at_s + self.timeouts.ping_s:
            self._pinged_at_s = now_s
            asked = _own_addresses() if self.timeouts.is_doubting else ()
            self.send(messages.Ping(now_s, self.timeouts.lease_s, asked))
        return self._pinged_at_s + self.timeouts.ping_s

    def limit_credit(self, num_bytes: int) -> None:
        """Let so much output be under way from it at most."""
        most = _CREDIT_HERE_BYTES if self.is_here else _CREDIT_BYTES
        limit = max(min(num_bytes, most), messages.FIRST_CREDIT_BYTES)
        self.owed_bytes += limit - self._credit_bytes
        self._credit_bytes = limit

    def grant(self) -> None:
        if self.owed_bytes >= self._credit_bytes // 4:
            self.send(messages.Credit(self.owed_bytes))
            self.owed_bytes = 0

    def take_pong(self, pong: messages.Pong) -> None:
        """Learn how its clock differs; the quickest answer knows best."""
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
        complaints = self.last_words.splitlines()
        last = f"; last error: {complaints[-1].strip()}" if complaints else ""
        if self.is_here:
            reason = f"its agent is gone (exit code {code}){last}"
            return HostLoss(reason, EXIT_INTERNAL)
        # Source: ssh(1), exit status: else it is one from there, after all had ended.
        if code is None or not 0 < code < _SSH_FAILED:
            return HostLoss(f"the connection to it ended{last}", EXIT_UNREACHABLE)
        return HostLoss(f"its agent ended with exit code {code}{last}", EXIT_INTERNAL)

    def close(self) -> None:
        self.is_over = True
        self.transport.close()


@functools.cache
def _own_addresses() -> tuple[str, ...]:
    # Imported where it is needed: a job on one host starts without.
    from ronde.addresses import read_interfaces

    return tuple(each.address for each in read_interfaces())


def start_remote_agent(
    spawner: "Spawner", host: Host, python: str, timeouts: Timeouts = USUAL
) -> AgentNode:
    # Imported where it is needed: a job on one host starts without.
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
    # It is shorter than any pipe; who has gone already does not get it.
    with suppress(BrokenPipeError):
        transport.write(memoryview(f"exec({program!a}); {call}\n".encode()))
    reader = HelloReader(spawner.name, sentinel[::-1].encode())
    return AgentNode(host, transport, reader, is_here=False, timeouts=timeouts)


class AgentStarter:
    """Starts agents; ``make_spawner`` is None where all hosts are this machine.

    With ``has_aliases`` several hosts may be this machine, each with its own agent.
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
        self._asked: dict[str, LookUp] = {}

    @functools.cached_property
    def spawner(self) -> "Spawner":
        if self._make_spawner is None:
            raise AssertionError("all hosts were to be this machine")
        return self._make_spawner()

    def is_here(self, host: Host) -> bool:
        if self._make_spawner is None:
            return True
        is_open = self._has_aliases or not self._here
        if is_open and is_here(host, self._found.get(host.name)):
            self._here.add(host.name)
        return host.name in self._here

    def look_up(self, hosts: Sequence[Host], stop_fd: int) -> dict[str, Failure]:
        """Look up the names of many hosts; return why some need not be connected to."""
        names = [host.name for host in hosts if host.name not in self._found]
        if self._make_spawner is None or len(names) < _MANY:
            return {}
        asked = LookUp(names)
        while not asked.is_over(LOOK_S):
            raise_if_stopped(stop_fd)
        answers = dict(asked.answers)
        self._found |= {name: answers.get(name, ()) for name in names}
        # Imported where it is needed: few jobs have so many hosts.
        from ronde.launch.hosts.spawner import UNKNOWN_NAME

        absent = [name for name, found in answers.items() if not found]
        is_vain = bool(absent) or not answers
        if not is_vain or not self.spawner.leads_by_name(names[0]):
            return {}
        silent = Failure(
            f"no name server answers within {LOOK_UP_S:g} s",
            "name addresses, or see /etc/resolv.conf",
        )
        return dict.fromkeys(absent, UNKNOWN_NAME) | {
            name: silent for name in names if name not in answers
        }

    def is_looked_up(self, host: Host) -> bool:
        """Look its name up in a thread, so that ``start`` does not wait for that."""
        name = host.name
        if self._make_spawner is None or self._found.get(name):
            return True
        asked = self._asked.pop(name, None) or LookUp([name])
        if not asked.is_over():
            self._asked[name] = asked
            return False
        # Where no name server has answered, what leads there asks once more.
        self._found[name] = asked.answers.get(name, ())
        return True

    def start(self, host: Host) -> AgentNode:
        if self.is_here(host):
            local, self._local = self._local or start_local_agent(), None
            transport = ProcessTransport(local)
            return AgentNode(host, transport, is_here=True, timeouts=self.timeouts)
        return start_remote_agent(self.spawner, host, self._python, self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, complaints: str) -> Failure:
        if not node.is_here:
            return self.spawner.explain(node.host, exit_code, complaints)
        if exit_code == EXIT_NO_FORK and not self._has_aliases:
            raise LaunchError(complaints.strip())
        return Failure(f"its agent ended with exit code {exit_code}: {complaints}", "")

    def explain_silence(
        self, failures: Sequence[HostFailure], hosts: Sequence[Host]
    ) -> list[HostFailure]:
        """Return failures; of hosts that did not answer, with the reason if found."""
        # Imported where they are needed: most hosts answer.
        from concurrent.futures import ThreadPoolExecutor

        from ronde.launch.hosts.spawner import NO_ANSWER

        reasons = {each.host: each.failure.reason for each in failures}
        silent = [h for h in hosts if reasons.get(h.name, "").startswith(NO_ANSWER)]
        # It takes seconds a host, and many hosts mostly have one reason.
        silent = silent[:_MAX_EXPLAINED]
        with ThreadPoolExecutor(_MAX_EXPLAINED) as pool:
            found = zip(
                silent, pool.map(self.spawner.explain_silence, silent), strict=True
            )
            by_name = {host.name: failure for host, failure in found}
        return [HostFailure(e.host, by_name.get(e.host) or e.failure) for e in failures]
