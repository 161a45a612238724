"""Ranks that exchange messages over a control channel."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.limits import HANG_S

from ronde.collectives import open_store
from ronde.coordination import ControlChannel, Tree, connect_channel

OVER = b"over"
LAYOUTS = ["aaa", "aab", "ab", "abca"]
"""A letter per rank for its host: one host, two hosts, both, and three levels."""


def connect(claim, hosts):
    """Return a rank's tree and channel; collective. ``hosts`` has a letter per rank."""
    store = open_store(claim, HANG_S) if claim.size > 1 else None
    channel = connect_channel(store, claim.rank, hosts, timeout_s=HANG_S)
    return Tree.of_hosts(hosts)[claim.rank], channel


def neighbours(tree):
    """Return the ranks to which a rank may send."""
    parent = () if tree.parent is None else (tree.parent,)
    return (*parent, *tree.children)


def await_state(pid, state):
    """Wait until the kernel shows a process in a state: ``T`` is stopped."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        os.sched_yield()


@dataclass(slots=True)
class Mailbox:
    """The received messages by sender."""

    channel: ControlChannel
    received: dict[int, list[bytes]] = field(default_factory=dict)

    def gather(self, num_messages, *, is_eager=True):
        """Receive until each sender has sent the given number of messages in total."""
        while True:
            for sender, message in self.channel.receive():
                self.received.setdefault(sender, []).append(message)
            if all(len(self.received.get(r, ())) >= n for r, n in num_messages.items()):
                return
            self.channel.wait(None, is_eager=is_eager)
