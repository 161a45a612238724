"""An agent on every host: started side by side, and met before anything else."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ronde.errors import Failure, HostError, HostFailure, LaunchError
from ronde.launch.agent_start.bootstrap import start_local_agent
from ronde.launch.event_loop import EventLoop, Handler
from ronde.launch.hosts.host import Host, is_here
from ronde.launch.limits import EXIT_NO_FORK, explain_shortage, raise_open_files_limit
from ronde.launch.messages import PROTOCOL, FromAgent, Hello
from ronde.launch.node import (
    EXIT_INTERNAL,
    AgentConnection,
    AgentNode,
    HostLoss,
    ProcessTransport,
)
from ronde.launch.process_tree import end_with
from ronde.launch.spawners.base import BOOTSTRAP, UNKNOWN_NAME, Spawner, last_line
from ronde.launch.timeouts import USUAL, Timeouts

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


def start_remote_agent(spawner: Spawner, host: Host, python: str) -> AgentConnection:
    """Start an agent on a host, without waiting for it."""
    # Imported where it is needed: a job on this machine starts without.
    from ronde.launch.spawners.hello import HelloReader

    words = [python, "-E", "-S", "-c", BOOTSTRAP]
    process = subprocess.Popen(
        spawner.command(host, words),
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
    # It is shorter than any pipe; who has gone already does not get it.
    with suppress(BrokenPipeError):
        transport.write(memoryview(_first_line(sentinel)))
    return AgentConnection(
        transport, HelloReader(spawner.name, sentinel[::-1].encode())
    )


def _first_line(sentinel: str) -> bytes:
    here = Path(__file__)
    program = here.with_name("remote_bootstrap.py").read_text(encoding="utf-8")
    call = f"arrive({sentinel!a}, {str(here.parents[3])!a})"
    return f"exec({program!a}); {call}\n".encode()


class AgentStarter:
    """Brings an agent to a host."""

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
        self.looked_up_s = 0.0
        """How long it took to find out whether the last host is this machine."""

    @functools.cached_property
    def spawner(self) -> Spawner:
        if self._make_spawner is None:
            raise AssertionError("all hosts were to be this machine")
        return self._make_spawner()

    def is_here(self, host: Host) -> bool:
        """Say whether a host is this machine, so that nothing need lead there.

        At most one is: a name that stands for it too is found out by what its agent
        says. So no more names are looked up than there must be.
        """
        if self._make_spawner is None:
            return True
        begun_s = time.monotonic()
        if not self._here and is_here(host, self._found.get(host.name)):
            self._here = host.name
        self.looked_up_s = time.monotonic() - begun_s
        return host.name == self._here

    def look_up(self, hosts: Sequence[Host], stop_fd: int) -> dict[str, Failure]:
        """Look the names of many hosts up; return why some need not be connected to."""
        names = [host.name for host in hosts if host.name not in self._found]
        if self._make_spawner is None or len(names) < _MANY:
            return {}
        # Imported where it is needed: most jobs have few hosts.
        from ronde.launch.hosts.host import LIMIT_S, look_up

        answers = look_up(names, stop_fd)
        self._found |= {name: answers.get(name, ()) for name in names}
        absent = [name for name, found in answers.items() if not found]
        is_vain = bool(absent) or not answers
        if not is_vain or not self.spawner.leads_by_name(names[0]):
            return {}
        silent = Failure(
            f"no name server answers within {LIMIT_S:g} s",
            "name addresses, or see /etc/resolv.conf",
        )
        return dict.fromkeys(absent, UNKNOWN_NAME) | {
            name: silent for name in names if name not in answers
        }

    def start(self, host: Host) -> AgentNode:
        """Start an agent for a host, without waiting for it."""
        if self.is_here(host):
            local, self._local = self._local or start_local_agent(), None
            return AgentNode(
                host, AgentConnection(ProcessTransport(local)), is_here=True
            )
        link = start_remote_agent(self.spawner, host, self._python)
        return AgentNode(host, link, is_here=False, timeouts=self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, said: str) -> Failure:
        if node.is_here:
            if exit_code == EXIT_NO_FORK:
                raise LaunchError(said.strip())
            return Failure(f"its agent ended with exit code {exit_code}: {said}", "")
        return self.spawner.explain(node.host, exit_code, said)


@dataclass(slots=True)
class JobHosts:
    """The hosts of a job and their agents."""

    hosts: tuple[Host, ...]  # in the order of the ranks
    starter: AgentStarter  # how they get agents
    exit_code: int = EXIT_INTERNAL  # the job's, to be set when it is known


@dataclass(slots=True)
class _Attempt:
    host: Host
    tries: int = 0
    not_before_s: float = 0.0
    node: AgentNode | None = None
    due_s: float = float("inf")
    failure: Failure | None = None

    @property
    def is_settled(self) -> bool:
        is_known = self.node is not None and self.node.hello is not None
        return is_known or self.failure is not None


class AgentConnector(Handler):
    """Brings an agent to each host."""

    def __init__(
        self,
        loop: EventLoop,
        start: Callable[[Host], AgentNode],
        explain: Callable[[AgentNode, int, str], Failure],
        known: Mapping[str, Failure],
    ) -> None:
        super().__init__(loop)
        self._start = start
        self._explain = explain
        self._known = known
        self._attempts: list[_Attempt] = []
        # No event may cost the time of looking at thousands of hosts.
        self._untried: deque[_Attempt] = deque()
        self._tried: list[_Attempt] = []
        self._by_node: dict[int, _Attempt] = {}
        self._patient_until_s = 0.0

    def run(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[AgentNode]:
        """Return a node for each host, all of which have said hello."""
        self._attempts = [
            _Attempt(host, failure=self._known.get(host.name)) for host in hosts
        ]
        raise_open_files_limit(len(hosts) * _FDS_PER_HOST + _OTHER_FDS)
        self._patient_until_s = time.monotonic() + patience_s
        self._loop.progress.begin(
            "to answer (login, start of Python there)",
            lambda: [each.host.name for each in self._attempts if not each.is_settled],
        )
        self._untried.extend(a for a in self._attempts if not a.is_settled)
        while self._untried or self._unsettled():
            self._start_some()
            self._loop.serve(self, self._is_something_to_do, self._due_s)
            self._give_up_late()
        failed = [
            HostFailure(attempt.host.name, attempt.failure)
            for attempt in self._attempts
            if attempt.failure is not None
        ]
        self._loop.progress.end(f"{_answered(len(hosts), len(failed))} answered")
        if failed:
            told = f"{len(failed)} of {len(hosts)} hosts cannot take part."
            ready = [a.host.name for a in self._attempts if a.failure is None]
            raise HostError(told, failed, ready)
        return [attempt.node for attempt in self._attempts if attempt.node is not None]

    def _unsettled(self) -> list[_Attempt]:
        self._tried = [a for a in self._tried if not a.is_settled]
        return self._tried

    def _starting(self) -> list[_Attempt]:
        return [a for a in self._unsettled() if a.node is not None]

    def _waiting(self) -> list[_Attempt]:
        return [a for a in self._unsettled() if a.node is None]

    def _is_something_to_do(self) -> bool:
        if not self._untried and not self._unsettled():
            return True
        now_s = time.monotonic()
        is_due = any(a.not_before_s <= now_s for a in self._waiting())
        has_room = len(self._starting()) < MAX_STARTING
        return has_room and (is_due or bool(self._untried))

    def _due_s(self) -> float:
        dues = [a.due_s for a in self._starting()]
        dues += [a.not_before_s for a in self._waiting()]
        return min(dues, default=float("inf"))

    def _start_some(self) -> None:
        now_s = time.monotonic()
        room = MAX_STARTING - len(self._starting())
        ready = [a for a in self._waiting() if a.not_before_s <= now_s][:room]
        while self._untried and len(ready) < room:
            ready.append(self._untried.popleft())
            self._tried.append(ready[-1])
        for attempt in ready:
            attempt.tries += 1
            try:
                attempt.node = self._start(attempt.host)
            except OSError as error:
                attempt.failure = self._explain_nothing(error)
                continue
            attempt.due_s = time.monotonic() + self._loop.timeouts.connect_s
            self._loop.nodes.append(attempt.node)
            self._by_node[id(attempt.node)] = attempt

    def _explain_nothing(self, error: OSError) -> Failure:
        if not error.filename:
            return Failure(explain_shortage(error) or str(error), "")
        return Failure(
            f"{error.filename} does not start: {error.strerror}",
            "install it, or choose another --launcher",
        )

    def _give_up_late(self) -> None:
        now_s = time.monotonic()
        for attempt in self._starting():
            if attempt.node is not None and now_s > attempt.due_s:
                # It stays on the loop: what it has started is looked for at the end.
                attempt.node.link.transport.kill()
                attempt.node.close()
                attempt.failure = self._explain_silence(attempt.node)

    def _explain_silence(self, node: AgentNode) -> Failure:
        cure = self._explain(node, _UNKNOWN, "timed out").cure
        limit_s = self._loop.timeouts.connect_s
        said = last_line(_said(node))
        if not said:
            return Failure(f"no word from it within {limit_s:g} s", cure)
        return Failure(
            f"no agent began within {limit_s:g} s; it wrote: {said}",
            "see that its login scripts read nothing and end",
        )

    def take(self, node: AgentNode, message: FromAgent) -> None:
        if not isinstance(message, Hello):
            raise LaunchError(f"agent of {node.name} must say Hello first.")
        problem = node.link.find_problem(node.host)
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
        self._by_node[id(node)].failure = problem

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        attempt = self._by_node.pop(id(node), None)
        if attempt is None:
            # It was there already: who gathers others sees that it is over.
            return
        if all(each is not attempt for each in self._tried):
            self._tried.append(attempt)
        self._loop.nodes.remove(node)
        attempt.node = None
        code = node.link.transport.wait(_EXIT_S)
        code = loss.exit_code if code is None else code
        failure = node.link.find_problem(node.host)
        failure = failure or self._explain(node, code, _said(node))
        is_awaited = time.monotonic() < self._patient_until_s
        if is_awaited or (failure.is_transient and attempt.tries < _NUM_TRIES):
            # Not all at once again: that is what it was refused for.
            pause_s = _PAUSE_S * 2 ** min(attempt.tries, _NUM_TRIES - 1)
            # Imported where it is needed: most hosts answer at once.
            import random

            pause_s *= 0.5 + random.random()  # noqa: S311
            attempt.not_before_s = time.monotonic() + pause_s
        else:
            attempt.failure = failure


def _said(node: AgentNode) -> str:
    reader = node.link.hello_reader
    noise = reader.noise.decode("utf-8", "backslashreplace") if reader else ""
    return "\n".join(filter(None, (noise.strip(), node.link.last_words)))


def _answered(count: int, num_failed: int) -> str:
    if num_failed:
        return f"{count - num_failed} of {count} hosts"
    return "1 host" if count == 1 else f"{count} hosts"
