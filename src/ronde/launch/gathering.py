"""An agent on every host: started side by side, and heard before anything else."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ronde.errors import Failure, HostError, HostFailure, LaunchError
from ronde.launch.frames import Output
from ronde.launch.hosts.host import Host
from ronde.launch.limits import explain_shortage, raise_open_files_limit
from ronde.launch.messages import PROTOCOL, FromAgent, Hello
from ronde.launch.node import Loss, Node
from ronde.launch.signals import ASKING, TIMED_OUT, InterruptedStartError
from ronde.launch.spawners.by_hand import last_line
from ronde.launch.switchboard import Switchboard

_FDS_PER_HOST = 3
_OTHER_FDS = 64
MAX_STARTING = 64
"""Connections that are being made at a time; sshd refuses more from one client."""

_NUM_TRIES = 4
_PAUSE_S = 0.5
_EXIT_S = 0.5
_UNKNOWN = 255


@dataclass(slots=True)
class _Attempt:
    """One host on its way into the job."""

    host: Host
    tries: int = 0
    not_before_s: float = 0.0
    node: Node | None = None
    due_s: float = float("inf")
    failure: Failure | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will come of it."""
        is_known = self.node is not None and self.node.hello is not None
        return is_known or self.failure is not None


class Gathering:
    """Brings an agent to each host; an attendant of the switchboard meanwhile.

    Args:
        board: Where the nodes are added.
        start: Starts an agent for a host, without waiting for it.
        explain: Says why the wire to a host ended before its agent spoke: given the
            node, the exit code and what was said.
        known: Why some hosts cannot take part, by name.
    """

    def __init__(
        self,
        board: Switchboard,
        start: Callable[[Host], Node],
        explain: Callable[[Node, int, str], Failure],
        known: Mapping[str, Failure],
    ) -> None:
        self._board = board
        self._start = start
        self._explain = explain
        self._known = known
        self._attempts: list[_Attempt] = []
        # No event may cost the time of looking at thousands of hosts.
        self._untried: deque[_Attempt] = deque()
        self._tried: list[_Attempt] = []
        self._by_node: dict[int, _Attempt] = {}
        self._patient_until_s = 0.0

    def run(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[Node]:
        """Return a node for each host, all of which have said hello.

        Args:
            hosts: Which.
            patience_s: How long one that is not reached is tried again.

        Raises:
            HostError: Some cannot take part; all of them are listed.
            InterruptedStartError: The user has ended it.
        """
        self._attempts = [
            _Attempt(host, failure=self._known.get(host.name)) for host in hosts
        ]
        raise_open_files_limit(len(hosts) * _FDS_PER_HOST + _OTHER_FDS)
        self._patient_until_s = time.monotonic() + patience_s
        self._board.progress.begin(
            "to answer (login, start of Python there)",
            lambda: [each.host.name for each in self._attempts if not each.is_settled],
        )
        self._untried.extend(a for a in self._attempts if not a.is_settled)
        while self._untried or self._unsettled():
            self._start_some()
            self._board.serve(self, self._is_something_to_do, self._due_s)
            self._give_up_late()
        failed = [
            HostFailure(attempt.host.name, attempt.failure)
            for attempt in self._attempts
            if attempt.failure is not None
        ]
        self._board.progress.end(f"{_answered(len(hosts), len(failed))} answered")
        if failed:
            told = f"{len(failed)} of {len(hosts)} hosts cannot take part."
            ready = [a.host.name for a in self._attempts if a.failure is None]
            raise HostError(told, failed, ready)
        return [attempt.node for attempt in self._attempts if attempt.node is not None]

    def _unsettled(self) -> list[_Attempt]:
        """Return those that were tried and of which something may still come."""
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
            attempt.due_s = time.monotonic() + self._board.timeouts.connect_s
            self._board.nodes.append(attempt.node)
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
                # It stays on the board: what it has started is looked for at the end.
                attempt.node.link.wire.kill()
                attempt.node.close()
                attempt.failure = self._explain_silence(attempt.node)

    def _explain_silence(self, node: Node) -> Failure:
        """Say what is known of a host of which no agent has spoken in time."""
        cure = self._explain(node, _UNKNOWN, "timed out").cure
        limit_s = self._board.timeouts.connect_s
        said = last_line(_said(node))
        if not said:
            return Failure(f"no word from it within {limit_s:g} s", cure)
        return Failure(
            f"no agent began within {limit_s:g} s; it wrote: {said}",
            "see that its login scripts read nothing and end",
        )

    def _drop(self, node: Node) -> None:
        node.close()
        self._board.nodes.remove(node)

    def take(self, node: Node, message: FromAgent) -> None:
        """Take note of who is there."""
        if not isinstance(message, Hello):
            raise LaunchError(f"agent of {node.name} must say Hello first.")
        greeting = node.link.greeting
        problem = greeting.met.problem(node.host) if greeting and greeting.met else None
        if problem is None and message.protocol != PROTOCOL:
            problem = Failure(
                f"its ronde speaks protocol {message.protocol}, this one {PROTOCOL}",
                "install the same version of ronde on every host",
            )
        if problem is None:
            node.hello = message
            return
        self._drop(node)
        self._by_node[id(node)].failure = problem

    def take_output(self, output: Output) -> None:
        """Nothing runs there yet."""
        raise LaunchError(f"rank {output.rank} must not run yet, but it writes.")

    def take_loss(self, node: Node, loss: Loss) -> None:
        """Say why, or try once more."""
        attempt = self._by_node.pop(id(node), None)
        if attempt is None:
            # It was there already: who gathers others sees that it is over.
            return
        if all(each is not attempt for each in self._tried):
            self._tried.append(attempt)
        self._board.nodes.remove(node)
        attempt.node = None
        code = node.link.wire.wait(_EXIT_S)
        greeting, failure = node.link.greeting, None
        if greeting and greeting.met:
            failure = greeting.met.problem(node.host)
        if failure is None:
            failure = self._explain(
                node, loss.exit_code if code is None else code, _said(node)
            )
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

    def take_signal(self, number: int) -> None:
        """End it, or say what it waits for: nothing runs yet."""
        if number in (ASKING, TIMED_OUT):
            self._board.progress.tell()
        if number != ASKING:
            raise InterruptedStartError(number)

    def take_broken_output(self, number: int) -> None:
        """Nothing was shown yet that anybody could miss."""


def _said(node: Node) -> str:
    """Return what came from a host that was no agent's, the latest last."""
    greeting = node.link.greeting
    noise = greeting.noise.decode("utf-8", "backslashreplace") if greeting else ""
    return "\n".join(filter(None, (noise.strip(), node.link.last_words)))


def _answered(count: int, num_failed: int) -> str:
    if num_failed:
        return f"{count - num_failed} of {count} hosts"
    return "1 host" if count == 1 else f"{count} hosts"
