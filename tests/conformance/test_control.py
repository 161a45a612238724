"""What every channel promises, within a host, between hosts, and where both meet."""

import itertools
import random
import resource
import threading

import pytest
from tests.conformance.control import (
    LAYOUTS,
    OVER,
    Mailbox,
    connect,
    neighbours,
)
from tests.limits import HANG_S

LENGTHS = [0, 1, 7, 8, 9, 16, 100, 0, 1000, 65_519, 65_520, 65_521, 65_536, 3 << 20, 5]


def told(sender, to, index):
    """Return the message that a rank sends as its index-th to another."""
    source = random.Random(f"{sender} {to} {index}")
    return source.randbytes(LENGTHS[index % len(LENGTHS)])


def talk_at_once(claim, hosts, num_messages, is_eager):
    """Everyone sends everything before it receives anything."""
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
    """Send small messages of odd lengths to one who reads them much later."""
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


def wake_the_waiting(claim, hosts):
    """Wake before anybody waits, and while two threads do."""
    _, channel = connect(claim, hosts)
    channel.wake()
    channel.wait(None, is_eager=False)
    for is_attended in (False, True):
        channel.receive()
        waiting = [
            threading.Thread(target=wait_twice, args=(channel, is_eager))
            for is_eager in (False, True)
        ]
        if is_attended:
            channel.add_waiter()
        for thread in waiting:
            thread.start()
        while any(thread.is_alive() for thread in waiting):
            channel.wake()
            for thread in waiting:
                thread.join(0.01)
        if is_attended:
            channel.remove_waiter()
    channel.close()
    channel.wait(None, is_eager=False)


def wait_twice(channel, is_eager):
    for _ in range(2):
        channel.wait(None, is_eager=is_eager)


class Service:
    """Answers what others ask, in a thread of its own or in any that waits."""

    def __init__(self, tree, channel):
        self._others = neighbours(tree)
        self._channel = channel
        self._lock = threading.Lock()
        self._answers = {}
        self._num_over = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ask(self, index, how):
        """Ask a neighbour, and wait by one of three ways for the answer."""
        answered = self._answers[index] = threading.Event()
        with self._lock:
            self._channel.send(self._others[index % len(self._others)], b"%d?" % index)
        if how == "listener":
            answered.wait()
        elif how == "eager":
            self._channel.add_waiter()
            self._serve_until(answered.is_set)
            self._channel.remove_waiter()
        else:  # attend for a while, then leave it to the listener
            self._channel.add_waiter()
            self._serve()
            self._channel.remove_waiter()
            answered.wait()

    def finish(self):
        """Wait until nobody asks any more, here or elsewhere."""
        with self._lock:
            for other in self._others:
                self._channel.send(other, OVER)
        self._is_over = True
        self._channel.wake()
        self._thread.join()

    def _listen(self):
        self._serve_until(self._is_finished, is_eager=False)

    def _is_finished(self):
        return self._is_over and self._num_over == len(self._others)

    def _serve_until(self, is_reached, *, is_eager=True):
        while not is_reached():
            self._channel.wait(None, is_eager=is_eager)
            self._serve()

    def _serve(self):
        with self._lock:
            messages = self._channel.receive()
            for sender, message in messages:
                self._handle(sender, message)
        if messages:
            self._channel.wake()  # what another thread waits for may have come here

    def _handle(self, sender, message):
        if message == OVER:
            self._num_over += 1
        elif message.endswith(b"?"):
            self._channel.send(sender, message[:-1])
        else:
            self._answers.pop(int(message)).set()


def ask_at_random(claim, hosts, num_questions):
    tree, channel = connect(claim, hosts)
    service = Service(tree, channel)
    choices = random.Random(claim.rank)
    for index in range(num_questions):
        service.ask(index, choices.choice(["listener", "eager", "both"]))
    service.finish()
    channel.close()


def talk(claim, hosts):
    """Do in turn, each on a channel of its own, what needs several ranks and ends."""
    is_far = len(set(hosts)) > 1
    for is_eager in (True, False):
        num_neighbours = talk_at_once(claim, hosts, 2 * len(LENGTHS), is_eager)
    fill_many_rings(claim, hosts, 2_000 if is_far else 20_000)
    wake_the_waiting(claim, hosts)
    ask_at_random(claim, hosts, 300 if is_far else 3000)
    return num_neighbours


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_all_arrives_once_in_order_however_one_waits(run_ranks_bare, hosts):
    told = run_ranks_bare(len(hosts), talk, hosts, timeout_s=HANG_S)
    assert sum(told) == 2 * (len(hosts) - 1)


def share_no_memory(claim, hosts, num_messages):
    """The last rank may make no file, as where ranks are in containers of their own."""
    if claim.rank == claim.size - 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    return talk_at_once(claim, hosts, num_messages, is_eager=True)


@pytest.mark.parametrize("hosts", ["aaa", "abb"])
def test_gloo_serves_where_memory_cannot_be_shared(run_ranks_bare, hosts):
    assert sum(run_ranks_bare(3, share_no_memory, hosts, len(LENGTHS))) == 4
