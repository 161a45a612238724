"""One host of a job, as its controller sees it."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.errors import LaunchError
from ronde.launch.agent_link import AgentLink
from ronde.launch.hosts.host import Host
from ronde.launch.messages import Credit, Hello, Ping, Pong
from ronde.launch.outbox import FIRST_CREDIT_BYTES

PING_S = 1.0
"""Between two words to an agent on another host."""

LEASE_S = 8.0
"""After so long without a word an agent on another host ends everything."""

SILENCE_S = 8.0
"""After so long without a word of it a host that runs ranks counts as lost."""

_END_S = 0.5
EXIT_UNREACHABLE = 69
EXIT_INTERNAL = 70
_SSH_FAILED = 255


class Loss(NamedTuple):
    """What was seen of a host that is gone.

    Attributes:
        reason: In half a sentence.
        exit_code: Of the job, if this is why it failed.
    """

    reason: str
    exit_code: int


@dataclass(slots=True)
class Node:
    """A host and what is known of the agent there.

    Attributes:
        host: As the user named it.
        link: To its agent.
        is_here: The agent was started without going over a network: only its end can
            be missed, and that is seen at once.
        hello: What it said of itself; None before.
        ranks: Those that run there now: it may speak of no others.
        credit_bytes: Output that may be under way from it.
        owed_bytes: Output that came since credit was last given.
        heard_at_s: When something came from it, on the monotonic clock.
        silent_by_s: When it counts as lost if nothing is heard of it, on the monotonic
            clock; infinity for never.
        is_over: It is gone, whoever wanted that.
    """

    host: Host
    link: AgentLink
    is_here: bool
    hello: Hello | None = None
    ranks: frozenset[int] = frozenset()
    credit_bytes: int = FIRST_CREDIT_BYTES
    owed_bytes: int = 0
    heard_at_s: float = 0.0
    silent_by_s: float = float("inf")
    is_over: bool = False
    _pinged_at_s: float = 0.0
    _round_trip_s: float = float("inf")
    _offset_s: float = 0.0
    _is_watched: bool = field(default=False)

    @property
    def name(self) -> str:
        """The host's name for messages."""
        return self.host.name

    def require_own(self, rank: int) -> None:
        """Refuse what an agent says of a rank that is not its own.

        Raises:
            LaunchError: It is not.
        """
        if rank not in self.ranks:
            raise LaunchError(
                f"agent of {self.name} must speak of its own ranks, got rank {rank}."
            )

    def watch(self, *, is_watched: bool) -> None:
        """Count silence from now on, or do not."""
        self._is_watched = is_watched and not self.is_here
        self.heard()

    def heard(self) -> None:
        """Take note that something came."""
        limit_s = SILENCE_S if self._is_watched else float("inf")
        self.heard_at_s = time.monotonic()
        self.silent_by_s = self.heard_at_s + limit_s

    def ping(self, now_s: float) -> float:
        """Send a ping if one is due; return when the next one is."""
        if self.is_here or self.is_over:
            return float("inf")
        if now_s >= self._pinged_at_s + PING_S:
            self._pinged_at_s = now_s
            self.link.send(Ping(now_s, LEASE_S))
        return self._pinged_at_s + PING_S

    def allow(self, num_bytes: int) -> None:
        """Let so much output be under way from it from now on, or more."""
        more_bytes = num_bytes - self.credit_bytes
        if more_bytes > 0:
            self.credit_bytes = num_bytes
            self.link.send(Credit(more_bytes))

    def grant(self) -> None:
        """Give credit for what came, when that is worth a message."""
        if self.owed_bytes >= self.credit_bytes // 4:
            self.link.send(Credit(self.owed_bytes))
            self.owed_bytes = 0

    def take_pong(self, pong: Pong) -> None:
        """Learn how its clock differs; the quickest answer knows best."""
        now_s = time.monotonic()
        round_trip_s = now_s - pong.sent_at_s
        if 0 <= round_trip_s < self._round_trip_s:
            self._round_trip_s = round_trip_s
            self._offset_s = pong.here_s - (pong.sent_at_s + now_s) / 2

    def to_our_clock(self, theirs_s: float) -> float:
        """Return a time on its monotonic clock as one on ours."""
        return theirs_s - self._offset_s

    def explain_end(self) -> Loss:
        """Say why its wire has ended."""
        code = self.link.wire.wait(_END_S)
        said = self.link.last_words.splitlines()
        told = f"; it said: {said[-1].strip()}" if said else ""
        if self.is_here:
            return Loss(f"its agent is gone (exit code {code}){told}", EXIT_INTERNAL)
        if not self.has_reported_end(code):
            return Loss(f"the connection to it ended{told}", EXIT_UNREACHABLE)
        return Loss(f"its agent ended with exit code {code}{told}", EXIT_INTERNAL)

    def has_reported_end(self, code: int | None) -> bool:
        """Say whether an exit code came from there, after all there was ended.

        Source: ssh(1), exit status.
        """
        return code is not None and 0 < code < _SSH_FAILED

    def explain_silence(self) -> Loss:
        """Say what was seen of a host that nothing is heard of any more."""
        return Loss(f"nothing was heard of it for {SILENCE_S:g} s", EXIT_UNREACHABLE)

    def close(self) -> None:
        """Take leave: the agent ends everything and itself."""
        self.is_over = True
        self.link.wire.close()
