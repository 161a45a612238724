"""One host of a job, as its controller sees it."""

import functools
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.errors import LaunchError
from ronde.launch.agent_link import AgentLink
from ronde.launch.hosts.host import Host
from ronde.launch.messages import Credit, Hello, Ping, Pong
from ronde.launch.outbox import FIRST_CREDIT_BYTES
from ronde.launch.timeouts import USUAL, Timeouts

_QUEUE_S = 0.2
"""What output that is under way may delay a message by."""

_MIN_CREDIT_BYTES = 8 << 10
_MAX_CREDIT_BYTES = 1 << 20
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
        timeouts: How long it is waited for.
        hello: What it said of itself; None before.
        ranks: Those that run there now: it may speak of no others.
        credit_bytes: Output that may be under way from it: as much as its line carries
            in ``_QUEUE_S``, so that messages are not late.
        max_credit_bytes: The most that this may be.
        owed_bytes: Output that came since credit was last given; less than none where
            more is under way than may be.
        heard_at_s: When something came from it, on the monotonic clock.
        silent_by_s: When it counts as lost if nothing is heard of it, on the monotonic
            clock; infinity for never.
        is_doubted: Nothing has been heard of it for ``lease_s``, but its host answers.
        is_over: It is gone, whoever wanted that.
    """

    host: Host
    link: AgentLink
    is_here: bool
    timeouts: Timeouts = USUAL
    hello: Hello | None = None
    ranks: frozenset[int] = frozenset()
    credit_bytes: int = FIRST_CREDIT_BYTES
    max_credit_bytes: int = _MAX_CREDIT_BYTES
    owed_bytes: int = 0
    heard_at_s: float = 0.0
    silent_by_s: float = float("inf")
    is_doubted: bool = False
    is_over: bool = False
    _pinged_at_s: float = 0.0
    _round_trip_s: float = float("inf")
    _offset_s: float = 0.0
    _probed_at_s: float = 0.0
    _probed_bytes: int = 0
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
        limit_s = self.timeouts.lease_s if self._is_watched else float("inf")
        self.heard_at_s = time.monotonic()
        self.silent_by_s = self.heard_at_s + limit_s
        self.is_doubted = False

    def doubt(self) -> None:
        """Wait as long again: its host answers."""
        self.is_doubted = True
        self.silent_by_s = self.heard_at_s + 2 * self.timeouts.lease_s

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its own, in the order of its interfaces."""
        return tuple(i.address for i in self.hello.interfaces) if self.hello else ()

    def ping(self, now_s: float) -> float:
        """Send a ping if one is due; return when the next one is."""
        if self.is_here or self.is_over:
            return float("inf")
        if now_s >= self._pinged_at_s + self.timeouts.ping_s:
            self._pinged_at_s = now_s
            self.link.send(Ping(now_s, self.timeouts.lease_s, _own_addresses()))
        return self._pinged_at_s + self.timeouts.ping_s

    def limit_credit(self, num_bytes: int) -> None:
        """Let so much output be under way from it at most, and from here at once."""
        self.max_credit_bytes = min(num_bytes, _MAX_CREDIT_BYTES)
        if self.is_here:
            self.owed_bytes += self.max_credit_bytes - self.credit_bytes
            self.credit_bytes = self.max_credit_bytes

    def take_output(self, num_bytes: int) -> None:
        """Take note of output that came from it."""
        self.owed_bytes += num_bytes
        self._probed_bytes += num_bytes

    def grant(self) -> None:
        """Give credit for what came, when that is worth a message."""
        if self.owed_bytes < self.credit_bytes // 4:
            return
        self.link.send(Credit(self.owed_bytes))
        self.owed_bytes = 0
        if not self.is_here and not self._probed_at_s:
            # Its answer comes after all output that is under way now.
            self._probed_at_s, self._probed_bytes = time.monotonic(), 0
            lease_s = self.timeouts.lease_s
            self.link.send(Ping(self._probed_at_s, lease_s, _own_addresses()))

    def take_pong(self, pong: Pong) -> None:
        """Learn how its clock differs and how long output delays its words."""
        now_s = time.monotonic()
        round_trip_s = now_s - pong.sent_at_s
        if 0 <= round_trip_s < self._round_trip_s:
            # The quickest answer knows best.
            self._round_trip_s = round_trip_s
            self._offset_s = pong.here_s - (pong.sent_at_s + now_s) / 2
        if pong.sent_at_s == self._probed_at_s:
            self._probed_at_s = 0.0
            self._adapt_credit(round_trip_s - self._round_trip_s)

    def _adapt_credit(self, delay_s: float) -> None:
        """Change what may be under way, as much as the delay that it causes wants."""
        now_bytes = self.credit_bytes
        if delay_s > _QUEUE_S:
            self.credit_bytes = max(now_bytes // 2, _MIN_CREDIT_BYTES)
        elif delay_s < _QUEUE_S / 2 and self._probed_bytes >= now_bytes // 4:
            self.credit_bytes = min(now_bytes * 2, self.max_credit_bytes)
        self.owed_bytes += self.credit_bytes - now_bytes

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
        silence_s = time.monotonic() - self.heard_at_s
        return Loss(f"nothing was heard of it for {silence_s:.0f} s", EXIT_UNREACHABLE)

    def close(self) -> None:
        """Take leave: the agent ends everything and itself."""
        self.is_over = True
        self.link.wire.close()


@functools.cache
def _own_addresses() -> tuple[str, ...]:
    # Imported where it is needed: a job on one host starts without.
    from ronde.addresses import read_interfaces

    return tuple(each.address for each in read_interfaces())
