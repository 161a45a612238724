"""Control channels within a host, between hosts, and over both."""

import itertools
import random
import resource

import pytest
from tests.conformance.control import LAYOUTS, OVER, Mailbox, connect, neighbours
from tests.limits import HANG_S

LENGTHS = [0, 1, 7, 8, 9, 16, 100, 0, 1000, 65_519, 65_520, 65_521, 65_536, 3 << 20, 5]


def told(sender, to, index):
    """Return the message that a rank sends as its index-th to another."""
    source = random.Random(f"{sender} {to} {index}")
    return source.randbytes(LENGTHS[index % len(LENGTHS)])


def talk_at_once(claim, hosts, num_messages, is_eager):
    """All ranks send all messages before they receive any."""
    tree, channel = connect(claim, hosts)
    others = neighbours(tree)
    for index, other in itertools.product(range(num_messages), others):
        channel.send(other, told(claim.rank, other, index))
    box = Mailbox(channel)
    box.gather(dict.fromkeys(others, num_messages), is_eager=is_eager)
    for other in others:
        channel.send(other, OVER)
    box.gather(dict.fromkeys(others, num_messages + 1), is_eager=is_eager)
    channel.close()
    expected = {
        other: [*(told(other, claim.rank, i) for i in range(num_messages)), OVER]
        for other in others
    }
    assert box.received == expected
    return len(others)


def fill_many_rings(claim, hosts, num_messages):
    """Send small messages of odd lengths to a rank that reads them much later."""
    tree, channel = connect(claim, hosts)
    box = Mailbox(channel)
    if tree.parent is None:
        for other, index in itertools.product(neighbours(tree), range(num_messages)):
            channel.send(other, index.to_bytes(4, "little") * (index % 11))
        box.gather(dict.fromkeys(neighbours(tree), 1))
        channel.close()
        return
    box.gather({tree.parent: num_messages})
    channel.send(tree.parent, OVER)
    channel.close()
    messages = box.received[tree.parent]
    assert messages == [i.to_bytes(4, "little") * (i % 11) for i in range(num_messages)]


def talk(claim, hosts):
    """Run the cases one after the other, each on its own channel."""
    is_far = len(set(hosts)) > 1
    for is_eager in (True, False):
        num_neighbours = talk_at_once(claim, hosts, 2 * len(LENGTHS), is_eager)
    fill_many_rings(claim, hosts, 2_000 if is_far else 20_000)
    return num_neighbours


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_messages_arrive_once_and_in_order(run_ranks_bare, hosts):
    told = run_ranks_bare(len(hosts), talk, hosts, timeout_s=HANG_S)
    assert sum(told) == 2 * (len(hosts) - 1)


def share_no_memory(claim, hosts, num_messages):
    """The last rank cannot create files, as if it were in another container."""
    if claim.rank == claim.size - 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    return talk_at_once(claim, hosts, num_messages, is_eager=True)


@pytest.mark.parametrize("hosts", ["aaa", "abb"])
def test_gloo_is_used_if_memory_cannot_be_shared(run_ranks_bare, hosts):
    assert sum(run_ranks_bare(3, share_no_memory, hosts, len(LENGTHS))) == 4
