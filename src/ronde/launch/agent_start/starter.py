"""An agent on every host: started side by side, and heard before anything else."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from ronde.errors import Failure, HostError, HostFailure, LaunchError
from ronde.launch.agent_start.bootstrap import start_local_agent
from ronde.launch.event_loop import EventLoop, Handler
from ronde.launch.hosts.host import LOOK_S, LOOK_UP_S, Host, LookUp, is_here, look_up
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
    NO_ANSWER,
    UNKNOWN_NAME,
    HelloReader,
    Spawner,
    last_line,
)
from ronde.units import counted

_SENTINEL_BYTES = 32
_MANY = 8  # hosts whose names are looked up at once, and not one after the other
_FDS_PER_HOST = 3
_MAX_EXPLAINED = 8
_OTHER_FDS = 64
MAX_STARTING = 64
"""Connections that are being made at a time; sshd refuses more from one client."""
_NUM_TRIES = 4
_PAUSE_S = 0.5
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
    """Starts agents; ``make_spawner`` is None where all hosts are this machine.

    With ``has_aliases`` several hosts may be this machine, each with its own agent.
    """

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        make_spawner: Callable[[], Spawner] | None = None,
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
    def spawner(self) -> Spawner:
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
        # Imported where it is needed: most hosts answer.
        from concurrent.futures import ThreadPoolExecutor

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


@dataclass(slots=True, eq=False)
class _Attempt:
    index: int
    host: Host
    patient_until_s: float
    is_aside: bool  # its name is looked up in a thread
    tries: int = 0
    due_s: float = 0.0  # when to try it, or to give it up

    def __lt__(self, other: "_Attempt") -> bool:
        return (self.due_s, self.index) < (other.due_s, other.index)


class AgentConnector(Handler):
    """Brings an agent to each host, so many at a time.

    Where ranks run meanwhile, their handler embeds this one: it calls ``advance`` when
    ``due_s`` has come, passes on what concerns nodes that this one ``owns``, and calls
    ``collect`` when it ``has_results``. Of all that only ``run`` waits for anything.
    """

    def __init__(self, loop: EventLoop, starter: AgentStarter) -> None:
        super().__init__(loop)
        self._starter = starter
        self._indices = itertools.count()
        # A heap: no event may cost the time of looking at thousands of hosts.
        self._waiting: list[_Attempt] = []
        self._starting: dict[AgentNode, _Attempt] = {}
        self._greeted: dict[AgentNode, _Attempt] = {}
        self._failed: list[tuple[_Attempt, Failure]] = []
        self._killed: list[AgentNode] = []

    def run(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[AgentNode]:
        """Return a node for each host, in their order, each with its hello."""
        known = self._starter.look_up(hosts, self._loop.signal_fd)
        self.add(hosts, patience_s, known)
        progress = self._loop.progress
        progress.begin("to answer (login, start of Python there)", self._awaited)
        while self._waiting or self._starting:
            self.advance()
            self._loop.serve(self, self._has_work, self.due_s)
        results = self.collect()
        failed = [HostFailure(h.name, r) for h, r in results if isinstance(r, Failure)]
        if failed:
            failed = self._starter.explain_silence(failed, hosts)
            ready = [h.name for h, r in results if isinstance(r, AgentNode)]
            progress.end(f"{len(ready)} of {len(hosts)} hosts answered")
            message = f"{len(failed)} of {len(hosts)} hosts cannot take part."
            raise HostError(message, failed, ready)
        progress.end(f"{counted(len(hosts), 'host')} answered")
        return [node for _, node in results if isinstance(node, AgentNode)]

    def add(
        self,
        hosts: Sequence[Host],
        patience_s: float = 0.0,
        known: Mapping[str, Failure] | None = None,
    ) -> None:
        """Connect to more hosts; for so long, try again.

        Names are looked up aside unless it is ``known`` why some need not be tried.
        """
        num_fds = (len(self._loop.nodes) + len(hosts)) * _FDS_PER_HOST
        raise_open_files_limit(num_fds + _OTHER_FDS)
        until_s = time.monotonic() + patience_s
        for host in hosts:
            attempt = _Attempt(next(self._indices), host, until_s, known is None)
            if known and host.name in known:
                self._failed.append((attempt, known[host.name]))
            else:
                heappush(self._waiting, attempt)

    def advance(self) -> None:
        """Give up what is late, and start at most one attempt that is due."""
        self._give_up_late()
        if self._is_next_due():
            self._start(heappop(self._waiting))

    def due_s(self) -> float:
        """Return when ``advance`` has work next, monotonic."""
        next_one = self._waiting[:1] if len(self._starting) < MAX_STARTING else []
        waiting = (*self._starting.values(), *next_one)
        return min((a.due_s for a in waiting), default=float("inf"))

    def owns(self, node: AgentNode) -> bool:
        return node in self._starting or node in self._greeted

    def has_results(self) -> bool:
        return bool(self._failed or self._greeted)

    def collect(self) -> list[tuple[Host, AgentNode | Failure]]:
        """Return what became of hosts since the last call; nodes have their hello."""
        done: list[tuple[_Attempt, AgentNode | Failure]] = [*self._failed]
        done += [(attempt, node) for node, attempt in self._greeted.items()]
        self._failed, self._greeted = [], {}
        done.sort(key=lambda pair: pair[0].index)
        return [(attempt.host, result) for attempt, result in done]

    def _awaited(self) -> list[str]:
        return [a.host.name for a in (*self._starting.values(), *self._waiting)]

    def _is_next_due(self) -> bool:
        has_room = bool(self._waiting) and len(self._starting) < MAX_STARTING
        return has_room and self._waiting[0].due_s <= time.monotonic()

    def _has_work(self) -> bool:
        return self._is_next_due() or not (self._waiting or self._starting)

    def _start(self, attempt: _Attempt) -> None:
        if attempt.is_aside and not self._starter.is_looked_up(attempt.host):
            attempt.due_s = time.monotonic() + LOOK_S
            heappush(self._waiting, attempt)
            return
        attempt.tries += 1
        begun_s = time.monotonic()
        try:
            node = self._starter.start(attempt.host)
        except OSError as error:
            failure = Failure(explain_shortage(error) or str(error), "")
            if error.filename:
                failure = Failure(
                    f"{error.filename} does not start: {error.strerror}",
                    "install it, or choose another --launcher",
                )
            self._failed.append((attempt, failure))
            return
        now_s = time.monotonic()
        self._loop.progress.took(f"{node.name} was looked up", now_s - begun_s)
        attempt.due_s = now_s + self._loop.timeouts.connect_s
        self._loop.nodes.append(node)
        self._starting[node] = attempt

    def _give_up_late(self) -> None:
        now_s = time.monotonic()
        for node in [n for n, a in self._starting.items() if now_s > a.due_s]:
            self._kill(node)
            node.close()
            self._failed.append((self._starting.pop(node), self._explain_silence(node)))
        for node in [n for n in self._killed if n.transport.wait(0.0) is not None]:
            self._killed.remove(node)
            self._loop.nodes.remove(node)

    def _kill(self, node: AgentNode) -> None:
        node.transport.kill()
        self._killed.append(node)
        # What it has started is looked for at the end.
        self._loop.has_strays = True

    def _explain_silence(self, node: AgentNode) -> Failure:
        cure = self._starter.explain(node, _UNKNOWN, "timed out").cure
        limit_s = self._loop.timeouts.connect_s
        last = last_line(_complaints(node))
        if not last:
            return Failure(f"{NO_ANSWER} within {limit_s:g} s", cure)
        return Failure(
            f"no agent began within {limit_s:g} s; it wrote: {last}",
            "see that its login scripts read nothing and end",
        )

    def take(self, node: AgentNode, message: FromAgent) -> None:
        if not isinstance(message, Hello) or node not in self._starting:
            raise LaunchError(f"agent of {node.name} must send Hello, once and first.")
        attempt = self._starting.pop(node)
        problem = node.find_problem()
        if problem is None and message.protocol != PROTOCOL:
            problem = Failure(
                f"its ronde speaks protocol {message.protocol}, this one {PROTOCOL}",
                "install the same version of ronde on every host",
            )
        if problem is None:
            node.hello = message
            self._greeted[node] = attempt
            return
        node.close()
        self._loop.nodes.remove(node)
        self._failed.append((attempt, problem))

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        attempt = self._starting.pop(node, None) or self._greeted.pop(node, None)
        if attempt is None:
            # It was there before: who connects the others sees that it is over.
            return
        if (code := node.transport.wait(0.0)) is None:
            code = loss.exit_code
            self._kill(node)
        else:
            self._loop.nodes.remove(node)
        failure = node.find_problem()
        failure = failure or self._starter.explain(node, code, _complaints(node))
        is_awaited = time.monotonic() < attempt.patient_until_s
        if is_awaited or (failure.is_transient and attempt.tries < _NUM_TRIES):
            # Not all at once again: that is what it was refused for.
            pause_s = _PAUSE_S * 2 ** min(attempt.tries, _NUM_TRIES - 1)
            jitter = 0.5 + os.urandom(1)[0] / 256
            attempt.due_s = time.monotonic() + pause_s * jitter
            heappush(self._waiting, attempt)
        else:
            self._failed.append((attempt, failure))


def _complaints(node: AgentNode) -> str:
    reader = node.hello_reader
    noise = reader.noise.decode("utf-8", "backslashreplace") if reader else ""
    return "\n".join(filter(None, (noise.strip(), node.last_words)))
