"""Named tensors from several threads, each on a CUDA stream of its own."""

import threading

import pytest
import torch
from tests.gpu.devices import LIMIT_S, NEEDS_CUDA, on_its_device
from tests.parity.sessions import run_sessions
from tests.ranks import run_ranks_bare

import ronde.torch as hvd

pytestmark = NEEDS_CUDA
NUM_STEPS = 12
SLEEP_CYCLES = 2_000_000
"""About a millisecond: what is given to the stream meanwhile is not there yet."""


def reduce_on_a_stream(name, sums):
    """Submit what is not computed yet; use the results without a look at them."""
    stream = torch.cuda.Stream()
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    # What was made on the stream before is ready on the new one.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(NUM_STEPS):
            torch.cuda._sleep(SLEEP_CYCLES)
            small = [
                torch.full((1000 + 7 * i,), float(step + i + hvd.rank()), device="cuda")
                for i in range(4)
            ]
            large = torch.full((1 << 19,), float(step + hvd.rank()), device="cuda")
            handles = [
                hvd.allreduce_async(tensor, op=hvd.Sum, name=f"{name}.{i}")
                for i, tensor in enumerate([*small, large])
            ]
            for handle in handles:
                result = hvd.synchronize(handle)
                total += result.double().mean()
            gathered = hvd.allgather(small[0][: 10 + step], name=f"{name}.gathered")
            # Freed at once: its memory may go to whoever asks next.
            total += gathered.double().mean()
            del gathered, result, small, large
            torch.empty(10 + step, device="cuda").fill_(-1e6)
        sums[name] = total.item()


def reduce_on_two_streams():
    sums = {}
    threads = [
        threading.Thread(target=reduce_on_a_stream, args=(name, sums), daemon=True)
        for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return sums


def expected_sum(size):
    ranks = range(size)
    total = 0.0
    for step in range(NUM_STEPS):
        for offset in (0, 1, 2, 3, 0):
            total += sum(step + offset + rank for rank in ranks)
        total += sum(step + rank for rank in ranks) / size
    return total


def session_on_its_device(claim, fn):
    hvd.init()
    try:
        return fn()
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_streams_do_not_mix(needs_ranks, size):
    needs_ranks(size)
    results = run_ranks_bare(
        size,
        on_its_device,
        session_on_its_device,
        reduce_on_two_streams,
        timeout_s=LIMIT_S,
    )
    expected = pytest.approx(expected_sum(size), rel=1e-9)
    assert results == [{"first": expected, "second": expected}] * size


def read_behind_the_back():
    """A side stream's result is read on the default stream, which has waited for it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        tensor = torch.full((1000,), 3.0, device="cuda")
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="x")
    return hvd.synchronize(handle).sum().item() / hvd.size()


def test_synchronize_orders_the_stream_that_calls_it():
    assert run_sessions(1, read_behind_the_back, timeout_s=LIMIT_S) == [3000.0]
