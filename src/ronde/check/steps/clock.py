"""How far each host's clock is from this machine's."""

import time
from typing import NamedTuple

from ronde.check.steps.base import Step
from ronde.check.steps.panel import Panel, Reply

OFFSET = "cluster.clock_offset_s"
"""Fact: a host's clock less this machine's, in seconds."""

ERROR = "cluster.clock_error_s"
"""Fact: how far off that may be, either way."""

_NUM_EXCHANGES = 6
_TIMEOUT_S = 3.0


class Offset(NamedTuple):
    """A clock's distance from this machine's.

    Attributes:
        offset_s: Its time less this machine's.
        error_s: Half the round trip: what the distance may be off, either way.
    """

    offset_s: float
    error_s: float


def run(panel: Panel) -> None:
    """Ask all hosts for the time, several times; the quickest answer counts.

    Source: of several exchanges the one with the shortest round trip has the least
    error, as NTP's clock filter takes it (RFC 5905, section 10).
    """
    best: dict[str, Offset] = {}
    failures: dict[str, str] = {}
    for _ in range(_NUM_EXCHANGES):
        asked = [name for name in panel.names if name not in failures]
        replies = panel.ask({name: {"do": "clock"} for name in asked}, _TIMEOUT_S)
        # Read once an exchange: a clock that is set meanwhile spoils one alone.
        epoch_s = time.time() - time.monotonic()
        for host, reply in replies.items():
            if reply.failure:
                failures[host] = reply.failure
                continue
            offset = compare(reply, epoch_s)
            if host not in best or offset.error_s < best[host].error_s:
                best[host] = offset
    for host in panel.names:
        if host in best:
            panel.note(host, OFFSET, best[host].offset_s)
            panel.note(host, ERROR, best[host].error_s)
        else:
            panel.note_unread(host, OFFSET, failures.get(host, "it was not asked"))


def compare(reply: Reply, epoch_s: float) -> Offset:
    """Return how far a clock is off that was read between question and answer.

    Args:
        reply: With the host's ``time_ns``.
        epoch_s: What this machine's clock said when its monotonic one was 0.
    """
    middle_s = (reply.asked_s + reply.answered_s) / 2
    offset_s = reply.values["time_ns"] / 1e9 - (epoch_s + middle_s)
    return Offset(offset_s, (reply.answered_s - reply.asked_s) / 2)


STEP = Step("clock", run, (OFFSET, ERROR))
