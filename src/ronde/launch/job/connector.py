"""Parallel connections to agents on many hosts."""

import itertools
import os
import time
from collections.abc import Sequence
from heapq import heappop, heappush

from ronde.errors import Failure, HostError, HostFailure, LaunchError
from ronde.launch.bootstrap import explain_shortage, raise_open_files_limit
from ronde.launch.host import LOOK_S, Host
from ronde.launch.hosts.node import AgentNode, AgentStarter, HostLoss
from ronde.launch.job.event_loop import EventLoop, Handler
from ronde.launch.wire.messages import PROTOCOL, FromAgent, Hello

_FDS_PER_HOST = 3
_OTHER_FDS = 64
MAX_STARTING = 64
"""Connections in progress; sshd refuses more from one client."""
_NUM_TRIES = 4
_PAUSE_S = 0.5
_UNKNOWN = 255


class _Attempt:
    def __init__(
        self, index: int, host: Host, patient_until_s: float, *, in_thread: bool
    ) -> None:
        self.index, self.host, self.patient_until_s = index, host, patient_until_s
        self.in_thread = in_thread  # looks up its name in a thread
        self.tries, self.due_s = 0, 0.0  # of the next try, or of giving up

    def __lt__(self, other: "_Attempt") -> bool:
        return (self.due_s, self.index) < (other.due_s, other.index)


class AgentConnector(Handler):
    """Starts an agent on each host, at most ``MAX_STARTING`` at once.

    ``run`` blocks. To connect while ranks run, call ``advance`` at ``due_s``, forward
    the events of nodes that this connector ``owns``, and call ``collect`` when it
    ``has_results``.
    """

    def __init__(self, loop: EventLoop, starter: AgentStarter) -> None:
        super().__init__(loop)
        self._starter = starter
        self._indices = itertools.count()
        # A heap, since there may be thousands.
        self._waiting: list[_Attempt] = []
        self._starting: dict[AgentNode, _Attempt] = {}
        self._greeted: dict[AgentNode, _Attempt] = {}
        self._failed: list[tuple[_Attempt, Failure]] = []
        self._killed: list[AgentNode] = []

    def run(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[AgentNode]:
        self._starter.look_up(hosts, self._loop.signal_fd)
        self.add(hosts, patience_s, in_thread=False)
        progress = self._loop.progress
        progress.begin("to answer (login, start of Python there)", self._awaited)
        while self._waiting or self._starting:
            self.advance()
            self._loop.serve(self, self._has_work, self.due_s)
        results = self.collect()
        failed = [HostFailure(h.name, r) for h, r in results if isinstance(r, Failure)]
        ready = [node for _, node in results if isinstance(node, AgentNode)]
        progress.end(f"{len(ready)} of {len(hosts)} hosts answered")
        if failed:
            failed = self._starter.explain_silence(failed, hosts)
            message = f"{len(failed)} of {len(hosts)} hosts cannot be used."
            raise HostError(message, failed, [node.name for node in ready])
        return ready

    def add(
        self, hosts: Sequence[Host], patience_s: float = 0.0, *, in_thread: bool = True
    ) -> None:
        """Connect to more hosts; retry failed connections for ``patience_s``.

        With ``in_thread`` names are resolved in threads, so that nothing blocks.
        """
        num_fds = (len(self._loop.nodes) + len(hosts)) * _FDS_PER_HOST
        raise_open_files_limit(num_fds + _OTHER_FDS)
        until_s = time.monotonic() + patience_s
        for host in hosts:
            index = next(self._indices)
            attempt = _Attempt(index, host, until_s, in_thread=in_thread)
            heappush(self._waiting, attempt)

    def advance(self) -> None:
        self._give_up_late()
        if self._is_next_due():
            self._start(heappop(self._waiting))

    def due_s(self) -> float:
        next_one = self._waiting[:1] if len(self._starting) < MAX_STARTING else []
        waiting = (*self._starting.values(), *next_one)
        return min((a.due_s for a in waiting), default=float("inf"))

    def owns(self, node: AgentNode) -> bool:
        return node in self._starting or node in self._greeted

    def has_results(self) -> bool:
        return bool(self._failed or self._greeted)

    def collect(self) -> list[tuple[Host, AgentNode | Failure]]:
        """Return new results: for each host, the connected node or the failure."""
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
        if attempt.in_thread and not self._starter.is_looked_up(attempt.host):
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
        self._loop.has_strays = True

    def _explain_silence(self, node: AgentNode) -> Failure:
        # Imported late: most hosts answer.
        from ronde.launch.hosts.spawner import NO_ANSWER, last_line

        cure = self._starter.explain(node, _UNKNOWN, "timed out").cure
        limit_s = self._loop.timeouts.connect_s
        last = last_line(_errors(node))
        if not last:
            return Failure(f"{NO_ANSWER} within {limit_s:g} s", cure)
        return Failure(
            f"no agent began within {limit_s:g} s; it wrote: {last}",
            "see that its login scripts read nothing and end",
        )

    def on_message(self, node: AgentNode, message: FromAgent) -> None:
        if not isinstance(message, Hello) or node not in self._starting:
            raise LaunchError(
                f"agent on {node.name} sent {type(message).__name__}: Hello must come "
                "first, and only once."
            )
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

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        attempt = self._starting.pop(node, None) or self._greeted.pop(node, None)
        if attempt is None:
            return  # it had been connected before
        if (code := node.transport.wait(0.0)) is None:
            code = loss.exit_code
            self._kill(node)
        else:
            self._loop.nodes.remove(node)
        failure = node.find_problem()
        failure = failure or self._starter.explain(node, code, _errors(node))
        is_awaited = time.monotonic() < attempt.patient_until_s
        if is_awaited or (failure.is_transient and attempt.tries < _NUM_TRIES):
            # At random times: it was refused since many connect at once.
            pause_s = _PAUSE_S * 2 ** min(attempt.tries, _NUM_TRIES - 1)
            jitter = 0.5 + os.urandom(1)[0] / 256
            attempt.due_s = time.monotonic() + pause_s * jitter
            heappush(self._waiting, attempt)
        else:
            self._failed.append((attempt, failure))


def _errors(node: AgentNode) -> str:
    reader = node.hello_reader
    noise = reader.noise.decode("utf-8", "backslashreplace") if reader else ""
    return "\n".join(filter(None, (noise.strip(), node.last_words)))
