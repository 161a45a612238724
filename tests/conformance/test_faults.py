"""What the ranks are told when one of them dies, hangs or leaves, and what is freed."""

import gc
import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from tests.resources import least_resources
from torch.distributed import TCPStore

from ronde.collectives import AbortScope, Connections, connect
from ronde.errors import CollectiveError, PeerLostError

SOON_S = 20.0
"""Far below the collectives' own limit of 60 s, far above what a busy machine takes."""
ENGINES = ["gloo", "shared_memory"]


@dataclass(frozen=True, slots=True)
class By:
    """Connects a rank by one engine."""

    engine: str

    def __call__(self, claim):
        return connect(claim, timeout_s=60.0, engine=self.engine)


def call_all(communicator, name):
    tensor = torch.ones(4, 3)
    return {
        "all_reduce": lambda: communicator.all_reduce(tensor).wait(),
        "lane": lambda: communicator.all_reduce(tensor.bfloat16()).wait(),
        "all_gather": lambda: communicator.all_gather(tensor).wait(),
        "reduce_scatter": lambda: communicator.reduce_scatter(tensor).wait(),
        "broadcast": lambda: communicator.broadcast(tensor, 1).wait(),
        "all_to_all": lambda: communicator.all_to_all(tensor, [1, 1, 1]).wait(),
        "recv": lambda: communicator.recv(tensor, 1).wait(),
        "barrier": lambda: communicator.barrier().wait(),
    }[name]()


def lose_rank_one(communicator, name):
    """Return how long this rank took to learn that rank 1 is gone."""
    communicator.all_reduce(torch.ones(2, dtype=torch.bfloat16)).wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="needs every rank, but one is gone") as e:
        call_all(communicator, name)
    assert f"on rank {communicator.rank} of 3" in str(e.value)
    return time.monotonic() - start


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "lane",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "recv",
        "barrier",
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_dead_rank_is_noticed(run_ranks, name, engine):
    first, dead, last = run_ranks(
        3, lose_rank_one, name, dying={1}, connecting=By(engine)
    )
    assert dead is None
    assert first < SOON_S
    assert last < SOON_S


def wait_while_it_dies(communicator):
    """Fail in ``wait()``, and again in every later ``wait()``."""
    if communicator.rank == 1:
        communicator.recv(torch.ones(1), 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    works = [communicator.all_reduce(torch.ones(3)) for _ in range(3)]
    communicator.send(torch.ones(1), 1).wait()
    for _ in range(2):
        for work in works:
            with pytest.raises(PeerLostError):
                work.wait()
    return "told"


@pytest.mark.parametrize("engine", ENGINES)
def test_failed_work_fails_each_time(run_ranks, engine):
    told = run_ranks(2, wait_while_it_dies, dying={1}, connecting=By(engine))
    assert told == ["told", None]


def outlive_a_stopped_rank(communicator, has_seen):
    """Rank 1 stops itself; the others say who it is, and how to let it go on."""
    pids = communicator.all_gather(torch.tensor([os.getpid()])).wait().tolist()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        communicator.all_reduce(torch.ones(3)).wait()
    elapsed_s = time.monotonic() - start
    if communicator.rank == 2:
        has_seen.touch()
    else:  # the last rank is to see it stopped as well
        while not has_seen.exists():
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGCONT)
    return pids[1], str(caught.value), elapsed_s


def test_a_stopped_rank_is_named(run_ranks, tmp_path):
    told = run_ranks(
        3, outlive_a_stopped_rank, tmp_path / "seen", connecting=By("shared_memory")
    )
    for pid, text, elapsed_s in (told[0], told[2]):
        assert f"rank 1, process {pid}, is stopped; kill -CONT {pid}" in text
        assert elapsed_s < SOON_S


def break_off_in_transit(communicator, call):
    """Return how long a call waits whose other rank was stopped in the midst of it."""
    values = torch.ones(32 << 20)
    calls = {
        "all_reduce": lambda: communicator.all_reduce(values),
        "in a lane": lambda: communicator.all_reduce(values.bfloat16()),
        "broadcast": lambda: communicator.broadcast(values, 0),
    }
    communicator.all_reduce(torch.ones(2, dtype=torch.bfloat16)).wait()
    pids = communicator.all_gather(torch.tensor([os.getpid()])).wait()
    work = calls[call]()
    if communicator.rank == 1:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # Gloo's thread sends what there is room for
    threading.Timer(0.1, communicator.abort).start()
    start = time.monotonic()
    with pytest.raises(CollectiveError):
        work.wait()
    waited_s = time.monotonic() - start
    os.kill(int(pids[1]), signal.SIGKILL)
    return waited_s


@pytest.mark.parametrize("call", ["all_reduce", "in a lane", "broadcast"])
def test_who_is_broken_off_in_transit_waits_no_longer(run_ranks, call):
    first, _ = run_ranks(
        2, break_off_in_transit, call, dying={1}, connecting=By("gloo"), timeout_s=30.0
    )
    assert first < SOON_S


def lose_the_sender_half_way(communicator, call):
    """Return how long a rank waits for the rest of what it has the beginning of."""
    values = torch.full((64 << 20,), float(communicator.rank))
    pids = communicator.all_gather(torch.tensor([os.getpid()])).wait().tolist()
    start = time.monotonic()
    is_sender = (call, communicator.rank) == ("recv", 0)
    name, peer = ("send", 1) if is_sender else (call, 0)
    work = getattr(communicator, name)(values, peer)
    if communicator.rank == 0:
        signal.pause()
    while values[0] == 1:
        pass
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(PeerLostError, match="needs every rank, but one is gone"):
        work.wait()
    assert values[-1] == 1
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("call", "engine"), [("recv", "gloo"), ("broadcast", "scheduled")]
)
def test_who_has_half_a_message_of_a_dead_rank_waits_no_longer(run_ranks, call, engine):
    _, waited_s = run_ranks(
        2, lose_the_sender_half_way, call, dying={0}, connecting=By(engine)
    )
    assert waited_s < SOON_S


def lose(claim, engine, case):
    """Break a communicator off in which the last rank is not where the others are."""
    info = replace(claim, job_id=f"{claim.job_id}.{case}")
    scope = AbortScope(is_live=True)
    connections = Connections(info, timeout_s=60.0, engine=engine, scope=scope)
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
def test_what_is_broken_off_leaves_nothing(run_ranks_bare, engine):
    for before, after in run_ranks_bare(3, lose_often, engine):
        assert after == before


def be_late(claim, engine):
    """Rank 1 makes no call until rank 0 has given up waiting for it."""
    store = TCPStore("127.0.0.1", claim.meeting.port, wait_for_workers=False)
    # To connect has the same limit: neither is to begin it long before the other.
    store.set(f"here {claim.rank}", "")
    store.wait(["here 0", "here 1"])
    communicator = connect(claim, timeout_s=1.0, engine=engine)
    if claim.rank == 1:
        store.wait(["given up"])
        return ""
    with pytest.raises(CollectiveError) as caught:
        communicator.barrier().wait()
    store.set("given up", "")
    return str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_rank_is_named_by_time(run_ranks_bare, engine):
    text, _ = run_ranks_bare(2, be_late, engine, launcher="torchrun")
    assert text.startswith("barrier on rank 0 of 2 must complete within timeout_s, got")
    assert "no answer for 1 s" in text


def be_absent(claim):
    """Rank 1 never connects; rank 0 says so."""
    if claim.rank == 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        connect(claim, timeout_s=1.0)
    return str(caught.value)


def test_an_absent_rank_is_not_waited_for_for_ever(run_ranks_bare):
    text, _ = run_ranks_bare(2, be_absent)
    assert text.startswith("connecting on rank 0 of 2")


def connect_often(claim, times, engine):
    """Return descriptors and threads after a few cycles and after all."""
    early = None
    for cycle in range(times):
        communicator = connect(claim, timeout_s=60.0, engine=engine)
        work = communicator.all_reduce(torch.ones(3, dtype=torch.bfloat16))
        copy = communicator.duplicate()
        assert copy.all_reduce(torch.ones(3)).wait().tolist() == [3.0] * 3
        assert work.wait().tolist() == [3.0] * 3
        copy.close()
        communicator.close()
        if cycle == 4:
            early = least_resources()
    return early, least_resources()


@pytest.mark.parametrize("times", [30, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_connections_leave_nothing(run_ranks_bare, engine, times):
    for early, late in run_ranks_bare(3, connect_often, times, engine, timeout_s=90.0):
        assert early == late


def leave_at_once(claim, times, engine):
    """The first to be through closes while others may still be reading."""
    for cycle in range(times):
        communicator = connect(claim, timeout_s=60.0, engine=engine)
        tensor = torch.full((50_000,), float(cycle))
        root = cycle % claim.size
        assert communicator.broadcast(tensor, root).wait()[-1] == cycle
        communicator.close()
    return times


@pytest.mark.parametrize("engine", ENGINES)
def test_leaving_early_harms_nobody(run_ranks_bare, engine):
    assert run_ranks_bare(3, leave_at_once, 30, engine) == [30] * 3
