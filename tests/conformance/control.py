"""Ranks that talk over a channel, and what they say."""

from dataclasses import dataclass, field

from ronde.collectives import meet
from ronde.coordination import ControlChannel, Tree, connect_channel

TIMEOUT_S = 60.0
OVER = b"over"


def connect(claim, hosts):
    """Return a rank's place in the tree, and its channel; collective.

    Args:
        claim: The rank's.
        hosts: A letter a rank: the host that it is to think itself on.
    """
    store = meet(claim, TIMEOUT_S) if claim.size > 1 else None
    channel = connect_channel(store, claim.rank, hosts, timeout_s=TIMEOUT_S)
    return Tree.of_hosts(hosts)[claim.rank], channel


def neighbours(tree):
    """Return the ranks that a rank may send to."""
    parent = () if tree.parent is None else (tree.parent,)
    return (*parent, *tree.children)


@dataclass(slots=True)
class Mailbox:
    """What came in, by sender."""

    channel: ControlChannel
    received: dict[int, list[bytes]] = field(default_factory=dict)

    def gather(self, num_messages, *, is_eager=True):
        """Receive until every sender named has sent so many messages in all."""
        while True:
            for sender, message in self.channel.receive():
                self.received.setdefault(sender, []).append(message)
            if all(len(self.received.get(r, ())) >= n for r, n in num_messages.items()):
                return
            self.channel.wait(None, is_eager=is_eager)
