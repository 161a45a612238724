"""How long a controller waits for hosts."""

from typing import NamedTuple


class Timeouts(NamedTuple):
    """How long a controller waits for its hosts, and they for it."""

    connect_s: float = 30.0  # what a host has to start an agent, once its turn has come
    answer_s: float = 60.0  # what an agent has for an order before ranks run
    ping_s: float = 1.0  # between two words to an agent on another host
    # after so long without a word each side asks whether the other's host answers. If
    # it does not, it is lost. If it does, the line was cut for less: TCP sends again
    # what was lost after up to as long again, so that as much is waited
    lease_s: float = 8.0
    # what a lost host has to come back in, when ranks are to be started again
    return_s: float = 30.0


USUAL = Timeouts()
