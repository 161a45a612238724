"""An agent on every host: started side by side, and heard before anything else."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from ronde.errors import Failure, HostError, HostFailure, LaunchError
from ronde.launch.agent_start.bootstrap import start_local_agent
from ronde.launch.event_loop import EventLoop, Handler
from ronde.launch.hosts.host import LOOK_UP_S, Host, is_here, look_up
from ronde.launch.limits import (
    EXIT_NO_FORK,
    USUAL,
    Timeouts,
    explain_shortage,
    raise_open_files_limit,
)
from ronde.launch.messages import PROTOCOL, FromAgent, Hello
from ronde.launch.node import AgentNode, HostLoss, ProcessTransport
from ronde.launch.process_tree import end_with
from ronde.launch.spawners.base import (
    BOOTSTRAP,
    UNKNOWN_NAME,
    HelloReader,
    Spawner,
    last_line,
)
from ronde.units import counted

_SENTINEL_BYTES = 32
_MANY = 8  # hosts whose names are looked up at once, and not one after the other
_FDS_PER_HOST = 3
_OTHER_FDS = 64
MAX_STARTING = 64
"""Connections that are being made at a time; sshd refuses more from one client."""
_NUM_TRIES = 4
_PAUSE_S = 0.5
_EXIT_S = 0.5
_UNKNOWN = 255


def start_remote_agent(
    spawner: Spawner, host: Host, python: str, timeouts: Timeouts = USUAL
) -> AgentNode:
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
    """Starts agents; ``make_spawner`` is None where all hosts are this machine."""

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        make_spawner: Callable[[], Spawner] | None = None,
        python: str = sys.executable,
        timeouts: Timeouts = USUAL,
    ) -> None:
        self.timeouts = timeouts
        self._local: subprocess.Popen[bytes] | None = local
        self._make_spawner = make_spawner
        self._python = python
        self._here = ""
        self._found: dict[str, tuple[str, ...]] = {}

    @functools.cached_property
    def spawner(self) -> Spawner:
        if self._make_spawner is None:
            raise AssertionError("all hosts were to be this machine")
        return self._make_spawner()

    def is_here(self, host: Host) -> bool:
        if self._make_spawner is None:
            return True
        if not self._here and is_here(host, self._found.get(host.name)):
            self._here = host.name
        return host.name == self._here

    def look_up(self, hosts: Sequence[Host], stop_fd: int) -> dict[str, Failure]:
        """Look up the names of many hosts; return why some need not be connected to."""
        names = [host.name for host in hosts if host.name not in self._found]
        if self._make_spawner is None or len(names) < _MANY:
            return {}
        answers = look_up(names, stop_fd)
        self._found |= {name: answers.get(name, ()) for name in names}
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

    def start(self, host: Host) -> AgentNode:
        if self.is_here(host):
            local, self._local = self._local or start_local_agent(), None
            return AgentNode(host, ProcessTransport(local), is_here=True)
        return start_remote_agent(self.spawner, host, self._python, self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, complaints: str) -> Failure:
        if not node.is_here:
            return self.spawner.explain(node.host, exit_code, complaints)
        if exit_code == EXIT_NO_FORK:
            raise LaunchError(complaints.strip())
        return Failure(f"its agent ended with exit code {exit_code}: {complaints}", "")


@dataclass(slots=True, eq=False)
class _Attempt:
    index: int
    host: Host
    failure: Failure | None
    tries: int = 0
    node: AgentNode | None = None
    due_s: float = 0.0  # when to try it, or to give it up

    def __lt__(self, other: "_Attempt") -> bool:
        return (self.due_s, self.index) < (other.due_s, other.index)


class AgentConnector(Handler):
    """Brings an agent to each host, so many at a time."""

    def __init__(self, loop: EventLoop, starter: AgentStarter) -> None:
        super().__init__(loop)
        self._starter = starter
        # A heap: no event may cost the time of looking at thousands of hosts.
        self._waiting: list[_Attempt] = []
        self._starting: dict[AgentNode, _Attempt] = {}
        self._greeted: dict[AgentNode, _Attempt] = {}
        self._patient_until_s = 0.0

    def run(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[AgentNode]:
        """Return a node for each host, in their order, each with its hello."""
        known = self._starter.look_up(hosts, self._loop.signal_fd)
        attempts = [_Attempt(i, h, known.get(h.name)) for i, h in enumerate(hosts)]
        raise_open_files_limit(len(hosts) * _FDS_PER_HOST + _OTHER_FDS)
        self._patient_until_s = time.monotonic() + patience_s
        progress = self._loop.progress
        progress.begin("to answer (login, start of Python there)", self._awaited)
        self._waiting = [a for a in attempts if a.failure is None]
        while self._waiting or self._starting:
            self._start_some()
            self._loop.serve(self, self._has_work, self._due_s)
            self._give_up_late()
        failed = [HostFailure(a.host.name, a.failure) for a in attempts if a.failure]
        if failed:
            ready = [a.host.name for a in attempts if not a.failure]
            progress.end(f"{len(ready)} of {len(hosts)} hosts answered")
            message = f"{len(failed)} of {len(hosts)} hosts cannot take part."
            raise HostError(message, failed, ready)
        progress.end(f"{counted(len(hosts), 'host')} answered")
        return [attempt.node for attempt in attempts if attempt.node is not None]

    def _awaited(self) -> list[str]:
        return [a.host.name for a in (*self._starting.values(), *self._waiting)]

    def _is_next_due(self) -> bool:
        has_room = bool(self._waiting) and len(self._starting) < MAX_STARTING
        return has_room and self._waiting[0].due_s <= time.monotonic()

    def _has_work(self) -> bool:
        return self._is_next_due() or not (self._waiting or self._starting)

    def _due_s(self) -> float:
        waiting = (*self._starting.values(), *self._waiting[:1])
        return min((a.due_s for a in waiting), default=float("inf"))

    def _start_some(self) -> None:
        while self._is_next_due():
            attempt = heappop(self._waiting)
            attempt.tries += 1
            begun_s = time.monotonic()
            try:
                node = attempt.node = self._starter.start(attempt.host)
            except OSError as error:
                attempt.failure = Failure(explain_shortage(error) or str(error), "")
                if error.filename:
                    attempt.failure = Failure(
                        f"{error.filename} does not start: {error.strerror}",
                        "install it, or choose another --launcher",
                    )
                continue
            now_s = time.monotonic()
            self._loop.progress.took(f"{node.name} was looked up", now_s - begun_s)
            attempt.due_s = now_s + self._loop.timeouts.connect_s
            self._loop.nodes.append(node)
            self._starting[node] = attempt

    def _give_up_late(self) -> None:
        now_s = time.monotonic()
        for node in [n for n, a in self._starting.items() if now_s > a.due_s]:
            # It stays on the loop: what it has started is looked for at the end.
            node.transport.kill()
            node.close()
            self._starting.pop(node).failure = self._explain_silence(node)

    def _explain_silence(self, node: AgentNode) -> Failure:
        cure = self._starter.explain(node, _UNKNOWN, "timed out").cure
        limit_s = self._loop.timeouts.connect_s
        last = last_line(_complaints(node))
        if not last:
            return Failure(f"no answer from it within {limit_s:g} s", cure)
        return Failure(
            f"no agent began within {limit_s:g} s; it wrote: {last}",
            "see that its login scripts read nothing and end",
        )

    def take(self, node: AgentNode, message: FromAgent) -> None:
        if not isinstance(message, Hello):
            raise LaunchError(f"agent of {node.name} must send Hello first.")
        attempt = self._greeted[node] = self._starting.pop(node)
        problem = node.find_problem()
        if problem is None and message.protocol != PROTOCOL:
            problem = Failure(
                f"its ronde speaks protocol {message.protocol}, this one {PROTOCOL}",
                "install the same version of ronde on every host",
            )
        if problem is None:
            node.hello = message
            return
        node.close()
        self._loop.nodes.remove(node)
        attempt.failure = problem

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        attempt = self._starting.pop(node, None) or self._greeted.pop(node, None)
        if attempt is None:
            # It was there before: who connects the others sees that it is over.
            return
        self._loop.nodes.remove(node)
        attempt.node = None
        code = node.transport.wait(_EXIT_S)
        code = loss.exit_code if code is None else code
        failure = node.find_problem()
        failure = failure or self._starter.explain(node, code, _complaints(node))
        is_awaited = time.monotonic() < self._patient_until_s
        if is_awaited or (failure.is_transient and attempt.tries < _NUM_TRIES):
            # Not all at once again: that is what it was refused for.
            pause_s = _PAUSE_S * 2 ** min(attempt.tries, _NUM_TRIES - 1)
            jitter = 0.5 + os.urandom(1)[0] / 256
            attempt.due_s = time.monotonic() + pause_s * jitter
            heappush(self._waiting, attempt)
        else:
            attempt.failure = failure


def _complaints(node: AgentNode) -> str:
    reader = node.hello_reader
    noise = reader.noise.decode("utf-8", "backslashreplace") if reader else ""
    return "\n".join(filter(None, (noise.strip(), node.last_words)))
