"""Everything at once on shared memory for a while, compared bit for bit.

All ranks draw the same calls from one seed, and delays each from its own. Values are
small integers, so that sums are exact whatever the order.
"""

import random
import time

import pytest
import torch

from ronde.collectives import ReduceOp, connect

SECONDS = 3.0
SIZES = [2, 3, 4, 8]
LARGEST = 300_000


def shared(claim):
    return connect(claim, timeout_s=60.0, engine="shared_memory")


def values(rank, number, numel, dtype):
    """Return what ``rank`` gives to call ``number``."""
    start = (7 * rank + number) % 50
    return ((torch.arange(numel) * 3 + start) % 50).to(dtype)


def draw_numel(dice):
    return dice.choice([1, 3, 64, dice.randrange(1, 5000), dice.randrange(1, LARGEST)])


class Hammer:
    """The calls of one rank."""

    def __init__(self, communicator, seed):
        self.communicator = communicator
        self.dice = random.Random(seed)
        self.delays = random.Random(f"{seed} {communicator.rank}")
        self.home = communicator.allocate(LARGEST, torch.float32)
        self.checks = []
        self.number = 0

    def place(self, given):
        """Put a tensor into allocated memory, if the dice say so."""
        if self.dice.random() < 0.5 or given.dtype != torch.float32:
            return given
        self.finish()
        return self.home[: given.numel()].copy_(given)

    def all_inputs(self, numel, dtype):
        return [
            values(rank, self.number, numel, dtype)
            for rank in range(self.communicator.size)
        ]

    def all_reduce(self):
        dtype = self.dice.choice([torch.float32, torch.int64, torch.bfloat16])
        op = self.dice.choice([ReduceOp.SUM, ReduceOp.MAX])
        inputs = self.all_inputs(draw_numel(self.dice), dtype)
        stack = torch.stack([each.double() for each in inputs])
        expected = stack.sum(0) if op is ReduceOp.SUM else stack.amax(0)
        tensor = self.place(inputs[self.communicator.rank])
        work = self.communicator.all_reduce(tensor, op)
        self.expect(work, lambda result: torch.equal(result, expected.to(dtype)))

    def broadcast(self):
        root = self.dice.randrange(self.communicator.size)
        inputs = self.all_inputs(draw_numel(self.dice), torch.float32)
        tensor = self.place(inputs[self.communicator.rank].clone())
        work = self.communicator.broadcast(tensor, root)
        self.expect(work, lambda result: torch.equal(result, inputs[root]))

    def all_gather(self):
        inputs = self.all_inputs(draw_numel(self.dice) // 4 + 1, torch.int32)
        parts = [each[: len(each) - rank] for rank, each in enumerate(inputs)]
        work = self.communicator.all_gather(parts[self.communicator.rank])
        expected = torch.cat(parts)
        self.expect(work, lambda result: torch.equal(result, expected))

    def reduce_scatter(self):
        size = self.communicator.size
        inputs = self.all_inputs(draw_numel(self.dice), torch.float32)
        tensor = self.place(inputs[self.communicator.rank])
        work = self.communicator.reduce_scatter(tensor)
        expected = torch.stack(inputs).sum(0).tensor_split(size)
        own = expected[self.communicator.rank]
        self.expect(work, lambda result: torch.equal(result, own))

    def all_to_all(self):
        rank, size = self.communicator.rank, self.communicator.size
        plan = [[self.dice.randrange(9000) for _ in range(size)] for _ in range(size)]
        inputs = self.all_inputs(9000 * size, torch.int64)
        expected = torch.cat(
            [
                inputs[r].split([*row, 9000 * size - sum(row)])[rank]
                for r, row in enumerate(plan)
            ]
        )
        work = self.communicator.all_to_all(inputs[rank], plan[rank])
        self.expect(work, lambda result: torch.equal(result[0], expected))

    def messages(self):
        rank, size = self.communicator.rank, self.communicator.size
        inputs = self.all_inputs(draw_numel(self.dice), torch.float32)
        step = self.dice.randrange(1, size)
        to, source = (rank + step) % size, (rank - step) % size
        sent = self.communicator.send(inputs[rank].clone(), to, self.number)
        target = torch.empty_like(inputs[rank])
        work = self.communicator.recv(target, source, self.number)
        self.expect(sent, lambda result: result is None)
        self.expect(work, lambda result: torch.equal(result, inputs[source]))

    def expect(self, work, is_right):
        self.checks.append((work, is_right))

    def finish(self):
        """Wait for all that is under way, in another order on each rank."""
        self.delays.shuffle(self.checks)
        for work, is_right in self.checks:
            assert is_right(work.wait()), f"call {self.number}"
        self.checks.clear()

    def delay(self):
        kind = self.delays.random()
        if kind < 0.05:
            time.sleep(self.delays.random() * 0.01)
        elif kind < 0.2:
            end = time.perf_counter() + self.delays.random() * 3e-4
            while time.perf_counter() < end:
                pass

    def strike(self):
        self.number += 1
        self.delay()
        calls = [
            self.all_reduce,
            self.all_reduce,
            self.broadcast,
            self.all_gather,
            self.reduce_scatter,
            self.all_to_all,
            self.messages,
        ]
        self.dice.choice(calls)()
        if self.dice.random() < 0.5:
            self.finish()


def hammer(communicator, seconds, seed):
    """Strike until rank 0 says that the time is up; return the number of calls."""
    rank_hammer = Hammer(communicator, seed)
    end = time.monotonic() + seconds
    while True:
        for _ in range(20):
            rank_hammer.strike()
        rank_hammer.finish()
        is_over = torch.tensor([time.monotonic() > end])
        if communicator.broadcast(is_over, 0).wait().item():
            return rank_hammer.number


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_everything_at_once(run_ranks, size, pytestconfig):
    seconds = SECONDS * pytestconfig.getoption("times")
    numbers = run_ranks(
        size, hammer, seconds, size, timeout_s=60 + 3 * seconds, connecting=shared
    )
    assert len(set(numbers)) == 1
    assert numbers[0] >= 20
