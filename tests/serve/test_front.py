"""Requests through a front: right and whole, while ranks are lost at any moment."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from tests.limits import HANG_S, until
from tests.serve.faulty_engine import FOLDER, POISON, REFUSAL, processes_with
from tests.serve.fronts import Serving, wrong_ones
from tests.serve.model import CAPACITY, answer_to, random_requests

from ronde.launch import own_environment
from ronde.serve import (
    FrontOptions,
    InferenceRequest,
    RejectedError,
    ReplicaOptions,
)

FAULTS = {
    "kill": "rank {} was ended by SIGKILL",
    "crash": "rank {} was ended by SIGSEGV",
    "stop": "rank {}, process {}, was stopped",
    "raise": "rank {} failed: ArithmeticError: of the engine",
    "memory": "rank {} failed: MemoryError: no bytes are left",
    "device": "rank {} failed: OutOfMemoryError: no bytes are left",
    "token": "rank {} failed: OutOfStepError: ranks must make the same tokens, but",
}
EXIT_USAGE, EXIT_FAILED = 64, 75
AHEAD = 8
"""The requests that a replica gets beyond those that can run."""


def long_requests(chance, num, least=10):
    """Draw requests with answers of at least so many tokens."""
    found = []
    while len(found) < num:
        found += [r for r in random_requests(chance, 9) if len(answer_to(r)) >= least]
    return found[:num]


def survive(serving, chance, *, num_losses=1):
    """Serve requests to which faults come that were ordered; return the cause."""
    front = serving.front
    num, requests = len(front.losses), long_requests(chance, 12)
    flights = serving.submit(requests)
    serving.finish(flights)
    serving.until(lambda: front.health().is_ready)
    assert wrong_ones(requests, flights) == []
    assert len(front.losses) == num + num_losses
    return front.readies[-1].cause


def test_lost_workers_cost_no_request(tmp_path, chance):
    """Also in a drain, at whose limit what is in progress ends with 503."""
    with Serving(tmp_path, [ReplicaOptions(2, max_restarts=99)]) as serving:
        [orders], front = serving.orders, serving.front
        serving.until(lambda: front.readies)
        for kind, cause in FAULTS.items():
            for rank in (0, 1) if kind in ("kill", "stop", "raise") else (1,):
                pid, _ = orders.processes(rank)
                orders.give(rank, kind, steps=chance.randint(1, 9))
                assert survive(serving, chance).startswith(cause.format(rank, pid))
        for at in ("load", "ready"):
            orders.give(1, "kill")
            orders.give(0, "raise", at=at)
            cause = survive(serving, chance)
            assert cause == "rank 0 failed: ArithmeticError: of the engine"
        requests = long_requests(chance, 12)
        requests[5] = InferenceRequest(0, (*POISON, 4), 9)
        flights = serving.submit(requests)
        serving.finish(flights)
        poisoned = flights.pop(5)
        requests.pop(5)
        assert (poisoned.error.status, poisoned.error.reason) == (500, "quarantined")
        assert wrong_ones(requests, flights) == []
        serving.until(serving.is_idle)
        drain(serving, chance)


def drain(serving, chance):
    """Have a drain, with a loss in it, and a second one that does not wait."""
    [orders], front = serving.orders, serving.front
    orders.give(1, "kill", steps=2)
    orders.give(0, "hold", at="ready")
    requests = [r._replace(max_tokens=30) for r in long_requests(chance, 6, least=20)]
    requests[0] = requests[0]._replace(max_tokens=3)
    flights = serving.submit(requests)
    drained = serving.run(begin(front.drain(HANG_S)))
    with pytest.raises(RejectedError, match="the server ends"):
        serving.submit(requests[:1])
    orders.await_held(0)
    orders.give(0, "hold", steps=8)
    orders.release()
    serving.finish(flights[:1])
    assert wrong_ones(requests[:1], flights[:1]) == []
    orders.await_held(0)
    serving.run(front.drain(0))
    assert {each.error.status for each in flights[1:]} == {503}
    orders.release()
    assert serving.end() == 0
    assert drained.done()


async def begin(coroutine):
    return asyncio.create_task(coroutine)


def test_two_replicas_share_requests(tmp_path, chance):
    """Queue, keys, time-outs and cancels; one replica is lost, then for good."""
    replicas = [ReplicaOptions(1, max_restarts=1)] * 2
    options = FrontOptions(max_queue=40, resumes=False)
    with Serving(tmp_path, replicas, options) as serving:
        serving.until(lambda: len(serving.front.readies) == 2)
        share(serving, chance)
        requests = long_requests(chance, 4)
        flights = submit_held(serving, requests)
        lost = [each for each in flights if each.replica.index == 0]
        worker, _ = serving.orders[0].processes(0)
        os.kill(worker, signal.SIGKILL)
        release(serving)
        serving.finish(flights)
        assert {each.error.reason for each in lost} == {"ranks_lost"}
        others = [n for n, each in enumerate(flights) if each not in lost]
        assert len(others) == len(lost) == 2
        kept = [requests[n] for n in others], [flights[n] for n in others]
        assert wrong_ones(*kept) == []
        serving.until(lambda: len(serving.front.readies) == 3)
        flights = submit_held(serving, requests)
        _, parent = serving.orders[0].processes(0)
        os.kill(parent, signal.SIGKILL)
        assert serving.end() == EXIT_FAILED
        assert {each.error.status for each in flights} == {503}
        with pytest.raises(RejectedError, match="the server has ended"):
            serving.submit(requests)
    assert serving.lines[-1] == "replica 0: ronde run ended with code 137; giving up"


def share(serving, chance):
    front, most = serving.front, 2 * (CAPACITY.max_requests + AHEAD)
    first = [InferenceRequest(0, (6, 8), n) for n in (40, 9, 9, 9, 9)]
    flights = submit_held(serving, first)
    assert [each.replica.index for each in flights] == [0, 1, 1, 1, 1]
    late = serving.submit(first[:1], timeout_s=0.01)
    requests = long_requests(chance, most - 6, least=3)
    waiting = serving.submit(requests, key="a")
    late += serving.submit(first[:1], timeout_s=0.01)
    serving.finish(late)
    assert [(each.finish, each.tokens) for each in late] == [("timeout", [])] * 2
    queued = long_requests(chance, 39, least=3)
    waiting += serving.submit(queued, key="a")
    other = serving.submit(requests[:1], key="b")
    with pytest.raises(RejectedError, match="40 requests are waiting") as caught:
        serving.submit(requests[:1])
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2)
    cancelled = [flights[1], waiting[most - 8], waiting[-1]]
    for each in cancelled:
        each.cancel()
        each.cancel()
    assert front.health().num_waiting == 39
    release(serving)
    serving.finish(other)
    assert other[0].number - most <= 2
    serving.finish(waiting)
    whole = [n for n, each in enumerate(waiting) if each not in cancelled]
    asked = [*requests, *queued]
    assert wrong_ones([asked[n] for n in whole], [waiting[n] for n in whole]) == []
    assert wrong_ones(requests[:1], other) == []
    assert {(each.finish, len(each.tokens)) for each in cancelled} == {("cancel", 0)}
    serving.until(serving.is_idle)


def submit_held(serving, requests):
    """Submit requests, of which the first ones run and make no token."""
    for orders in serving.orders:
        orders.give(0, "hold")
    flights = serving.submit(requests)
    for orders in serving.orders:
        orders.await_held(0)
    return flights


def release(serving):
    for orders in serving.orders:
        orders.release()


def test_ranks_that_cannot_start_end_the_front(tmp_path, capfd):
    serving = Serving(tmp_path / "1", [ReplicaOptions(1, max_restarts=1)])
    serving.orders[0].give(0, "raise", at="load", steps=2)
    with serving:
        with pytest.raises(RejectedError, match="the server is starting"):
            serving.submit([InferenceRequest(0, (1,), 1)])
        assert serving.end() == EXIT_FAILED
    words = "replica 0: ronde run ended with code 1;"
    assert serving.lines == [f"{words} starting it again", f"{words} giving up"]
    serving = Serving(tmp_path / "2", [ReplicaOptions(1)])
    serving.orders[0].give(0, "refuse", at="load")
    with serving:
        assert serving.end() == EXIT_USAGE
    assert f"ronde: {REFUSAL}\n" in capfd.readouterr().err


FRONT = """
import asyncio
from ronde.serve import Front, FrontOptions, ServingMetrics
from ronde.serve import ReplicaConfig, ReplicaOptions
config = ReplicaConfig("toy", engine="tests.serve.faulty_engine:make_engine")
front = Front(config, FrontOptions(), [ReplicaOptions(1)], ServingMetrics(), print)
asyncio.run(front.run())
"""


def test_a_killed_front_leaves_no_process(tmp_path):
    env = own_environment() | {FOLDER: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", FRONT], env=env) as front:
        until((tmp_path / "worker-0").exists)
        front.kill()
        until(lambda: not processes_with(tmp_path))
