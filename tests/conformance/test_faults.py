"""Errors when a rank dies, hangs or closes, and the resources freed afterwards.

The collectives' own timeout is longer than the tests'.
"""

import gc
import os
import signal
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.conformance.control import await_state
from tests.limits import HANG_S
from tests.resources import least_resources

from ronde.collectives import AbortScope, Connections, connect, store_at
from ronde.errors import CollectiveError, PeerLostError

pytestmark = pytest.mark.waits

NEVER_S = 5 * HANG_S
ENGINES = ["gloo", "shared_memory"]
_SO_MAX_PACING_RATE = 47  # which Python has no name for
_BYTES_RECEIVED_AT = 128  # in struct tcp_info of linux/tcp.h
LATE_S = 5.0
"""Timeout of a rank whose peer makes no call; both also connect within it."""


@dataclass(frozen=True, slots=True)
class By:
    """Connects a rank by one engine."""

    engine: str

    def __call__(self, claim):
        return connect(claim, timeout_s=NEVER_S, engine=self.engine)


CALLS = {
    "all_reduce": lambda c, tensor: c.all_reduce(tensor),
    "lane": lambda c, tensor: c.all_reduce(tensor.bfloat16()),
    "all_gather": lambda c, tensor: c.all_gather(tensor),
    "reduce_scatter": lambda c, tensor: c.reduce_scatter(tensor),
    "broadcast": lambda c, tensor: c.broadcast(tensor, 1),
    "all_to_all": lambda c, tensor: c.all_to_all(tensor, [1, 1, 1]),
    "recv": lambda c, tensor: c.recv(tensor, 1),
    "barrier": lambda c, _: c.barrier(),
}


def lose_rank_one(communicator):
    """Each call, on its own communicator, fails because rank 1 was killed."""
    copies = {name: communicator.duplicate() for name in CALLS}
    for copy in copies.values():
        copy.all_reduce(torch.ones(2, dtype=torch.bfloat16)).wait()
    communicator.barrier().wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    texts = {}
    for name, copy in copies.items():
        with pytest.raises(PeerLostError) as caught:
            CALLS[name](copy, torch.ones(4, 3)).wait()
        texts[name] = str(caught.value)
    return texts


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dead_rank_is_noticed(run_ranks, engine):
    texts = run_ranks(3, lose_rank_one, dying={1}, connecting=By(engine))
    assert texts[1] is None
    for rank in (0, 2):
        assert list(texts[rank]) == list(CALLS)
        for text in texts[rank].values():
            assert "failed because another rank was lost" in text
            assert f"on rank {rank} of 3" in text


def own_connections():
    """Return duplicates of this process's TCP sockets."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is no socket, or the folder's own
            found.append(socket.socket(fileno=os.dup(int(each.name))))
    families = (socket.AF_INET, socket.AF_INET6)
    others = [each for each in found if each.family not in families]
    for each in others:
        each.close()
    return [each for each in found if each not in others]


def be_slow():
    """Limit sending to 1 MiB/s, so that long messages stay half sent for a while."""
    for each in own_connections():
        with each:
            each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1 << 20)


def num_received():
    """Return the number of bytes received on all connections."""
    num_bytes = 0
    for each in own_connections():
        with each:
            told = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            num_bytes += struct.unpack_from("Q", told, _BYTES_RECEIVED_AT)[0]
    return num_bytes


def break_off_in_transit(communicator, call):
    """Abort a call while the other rank is stopped in the middle of it."""
    values = torch.ones(32 << 20)
    calls = {
        "all_reduce": lambda: communicator.all_reduce(values),
        "in a lane": lambda: communicator.all_reduce(values.bfloat16()),
        "broadcast": lambda: communicator.broadcast(values, 0),
    }
    communicator.all_reduce(torch.ones(2, dtype=torch.bfloat16)).wait()
    pids = communicator.all_gather(torch.tensor([os.getpid()])).wait().tolist()
    be_slow()
    before = num_received()
    work = calls[call]()
    if communicator.rank == 1:
        while num_received() < before + 100_000:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    await_state(pids[1], "T")
    threading.Timer(0.1, communicator.abort).start()
    with pytest.raises(CollectiveError):
        work.wait()
    os.kill(pids[1], signal.SIGKILL)
    return "told"


@pytest.mark.parametrize("call", ["all_reduce", "in a lane", "broadcast"])
def test_abort_ends_calls_in_transit(run_ranks, call):
    told = run_ranks(2, break_off_in_transit, call, dying={1}, connecting=By("gloo"))
    assert told == ["told", None]


def lose_the_sender_half_way(communicator, call):
    """Kill a rank after it has sent the first part of a message."""
    values = torch.full((64 << 20,), float(communicator.rank))
    pids = communicator.all_gather(torch.tensor([os.getpid()])).wait().tolist()
    be_slow()
    is_sender = (call, communicator.rank) == ("recv", 0)
    name, peer = ("send", 1) if is_sender else (call, 0)
    work = getattr(communicator, name)(values, peer)
    if communicator.rank == 0:
        signal.pause()
    while values[0] == 1:
        pass
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(PeerLostError, match="failed because another rank was lost"):
        work.wait()
    assert values[-1] == 1
    return "told"


@pytest.mark.parametrize(
    ("call", "engine"), [("recv", "gloo"), ("broadcast", "scheduled")]
)
def test_half_a_message_from_a_dead_rank_fails(run_ranks, call, engine):
    told = run_ranks(
        2, lose_the_sender_half_way, call, dying={0}, connecting=By(engine)
    )
    assert told == [None, "told"]


def lose(claim, engine, case):
    """Abort a communicator in which the last rank makes no call."""
    info = claim._replace(job_id=f"{claim.job_id}.{case}")
    scope = AbortScope(is_live=True)
    connections = Connections(info, timeout_s=NEVER_S, engine=engine, scope=scope)
    is_there, failure = claim.rank < claim.size - 1, CollectiveError("it broke off")
    timer = threading.Timer(0.5, scope.abort, (failure,))
    communicator = None
    if case != "connecting":
        communicator = connections.connect("all", range(claim.size))
        timer.start()
        if is_there:
            dtype = torch.bfloat16 if case == "in a lane" else torch.float32
            with pytest.raises(CollectiveError):
                communicator.all_reduce(torch.ones(5, dtype=dtype)).wait()
    else:
        timer.start()
        if is_there:
            with pytest.raises(CollectiveError):
                connections.connect("all", range(claim.size))
    timer.join()
    if communicator is not None:
        communicator.close()
    scope.end()


def lose_often(claim, engine):
    """Return descriptors and threads before and after, without Python's collector."""
    gc.disable()
    before = least_resources()
    for case in ("reducing", "in a lane", "connecting"):
        lose(claim, engine, case)
    for thread in threading.enumerate():
        if thread.name.startswith("ronde "):
            thread.join()
    return before, least_resources()


@pytest.mark.parametrize("engine", ["gloo", "hierarchical", "scheduled"])
def test_abort_frees_descriptors_and_threads(run_ranks_bare, engine):
    for before, after in run_ranks_bare(3, lose_often, engine):
        assert after == before


def be_late(claim):
    """Rank 1 makes no call until rank 0 has timed out."""
    store = store_at(claim.store, HANG_S)
    # To connect has the same limit: neither is to begin it long before the other.
    store.set(f"here {claim.rank}", "")
    store.wait(["here 0", "here 1"])
    communicators = [
        connect(claim._replace(job_id=engine), timeout_s=LATE_S, engine=engine)
        for engine in ENGINES
    ]
    if claim.rank == 1:
        store.wait(["given up"])
        return ""

    def give_up(communicator):
        with pytest.raises(CollectiveError) as caught:
            communicator.barrier().wait()
        return str(caught.value)

    with ThreadPoolExecutor(len(ENGINES)) as threads:
        texts = list(threads.map(give_up, communicators))
    store.set("given up", "")
    return texts


def test_a_late_rank_is_named_by_time(run_ranks_bare):
    texts, _ = run_ranks_bare(2, be_late)
    assert len(texts) == len(ENGINES)
    for text in texts:
        assert text.startswith(f"barrier on rank 0 of 2 timed out after {LATE_S:g} s")


def connect_often(claim, times, engine):
    """Return descriptors and threads after a few cycles and after all."""
    early = None
    for cycle in range(times):
        communicator = By(engine)(claim)
        work = communicator.all_reduce(torch.ones(3, dtype=torch.bfloat16))
        copy = communicator.duplicate()
        assert copy.all_reduce(torch.ones(3)).wait().tolist() == [3.0] * 3
        assert work.wait().tolist() == [3.0] * 3
        copy.close()
        communicator.close()
        if cycle == 4:
            early = least_resources()
    return early, least_resources()


@pytest.mark.parametrize("engine", [*ENGINES, "scheduled"])
def test_closing_frees_descriptors_and_threads(run_ranks_bare, engine):
    for early, late in run_ranks_bare(3, connect_often, 12, engine, timeout_s=HANG_S):
        assert early == late


def close_while_others_read(claim, times, engine):
    """Ranks close at once while others may still read their data."""
    for cycle in range(times):
        communicator = By(engine)(claim)
        tensor = torch.full((50_000,), float(cycle))
        root = cycle % claim.size
        assert communicator.broadcast(tensor, root).wait()[-1] == cycle
        communicator.close()
    return times


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_may_close_while_others_read(run_ranks_bare, engine):
    assert run_ranks_bare(3, close_while_others_read, 30, engine) == [30] * 3
