"""Results do not depend on the tensors' memory; each function runs on every rank."""

import functools
import gc

import torch
from tests.conformance.data_movement import assert_same_bits, concatenated
from tests.conformance.samples import FLOATS, Reduced, cases, checks_in, sample
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, rows

LENGTHS = [1, 1023, 4097, 70_000, 1_200_001]
"""Numbers of elements below, around and above the engines' piece sizes."""
PLAIN, ALLOCATED, SHIFTED = range(3)


def place(communicator: Communicator, values: Tensor, where: int) -> Tensor:
    """Copy flat values to ordinary or to allocated memory; every rank allocates."""
    numel = values.numel()
    home = communicator.allocate(2 * numel + 64, values.dtype, values.device)
    if where == PLAIN:
        return values.clone()
    start = 0 if where == ALLOCATED else numel + 3
    return home[start : start + numel].copy_(values)


def placements(communicator: Communicator) -> list[list[int]]:
    """Return the memory kind of each rank's tensor, for several cases."""
    size = communicator.size
    return [
        [ALLOCATED] * size,
        [PLAIN] * size,
        [ALLOCATED + rank % 2 for rank in range(size)],
        [PLAIN if rank == 0 else ALLOCATED for rank in range(size)],
        [ALLOCATED if rank == 0 else PLAIN for rank in range(size)],
    ]


def allocated_memory_is_zero_and_outlives_all(communicator: Communicator, device: str):
    copy = communicator.duplicate()
    tensors = [
        copy.allocate(numel, dtype, torch.device(device))
        for numel in (0, 1, 1000)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    ]
    for tensor in tensors:
        assert tensor.dim() == 1
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
    copy.all_reduce(tensors[-1].fill_(1)).wait()
    copy.close()
    del copy
    gc.collect()
    assert tensors[-1].tolist() == [communicator.size] * 1000
    tensors[-1].fill_(3)


def reductions_are_the_same_everywhere(communicator: Communicator, device: str):
    rank, size = communicator.rank, communicator.size
    first: dict[int, Tensor] = {}
    for length, where in cases(size, LENGTHS, placements(communicator)):
        kind = (size, length, torch.float32, ReduceOp.SUM, device)
        inputs, expected = reduced(*kind)
        tensor = place(communicator, inputs[rank], where[rank])
        assert communicator.all_reduce(tensor).wait() is tensor
        expected.check(tensor)
        assert torch.equal(tensor, first.setdefault(length, tensor.clone()))


@functools.lru_cache(maxsize=1)
def reduced(
    size: int,
    length: int,
    dtype: torch.dtype,
    op: ReduceOp,
    device: str,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[list[Tensor], Reduced]:
    """Return the ranks' inputs and the expected reduction."""
    inputs = [sample((length,), dtype, rank, device=device) for rank in range(size)]
    return inputs, Reduced(inputs, op, *scales)


def large_reductions_of_every_kind(communicator: Communicator, device: str):
    rank, size = communicator.rank, communicator.size
    kinds = (
        *((dtype, op, 70_003) for dtype in FLOATS for op in ReduceOp),
        (torch.complex64, ReduceOp.AVERAGE, 70_003),
        (torch.int32, ReduceOp.AVERAGE, 9_001),
        (torch.uint16, ReduceOp.MAX, 9_001),
    )
    for (dtype, op, length), where in cases(size, kinds, placements(communicator)[:4]):
        inputs, expected = reduced(size, length, dtype, op, device, (0.5, 2.0))
        tensor = place(communicator, inputs[rank], where[rank])
        communicator.all_reduce(tensor, op, prescale=0.5, postscale=2.0).wait()
        expected.check(tensor)


@functools.lru_cache(maxsize=1)
def scattered(
    size: int, num_rows: int, dtype: torch.dtype, begin: int, end: int, device: str
) -> tuple[list[Tensor], Reduced]:
    """Return the ranks' inputs and the expected rows of their sum."""
    shape = (num_rows, 70)
    inputs = [sample(shape, dtype, rank, device=device) for rank in range(size)]
    return inputs, Reduced([each[begin:end] for each in inputs], ReduceOp.SUM)


def large_reduce_scatter(communicator: Communicator, device: str):
    rank, size = communicator.rank, communicator.size
    kinds = (torch.float32, torch.bfloat16, torch.int64)
    nums_rows = (size * 500, size * 500 + 1)
    for dtype, num_rows, where in cases(
        size, kinds, nums_rows, placements(communicator)
    ):
        counts = rows(num_rows, size)
        begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
        inputs, expected = scattered(size, num_rows, dtype, begin, end, device)
        flat = inputs[rank].reshape(-1)
        tensor = place(communicator, flat, where[rank]).view(num_rows, 70)
        result = communicator.reduce_scatter(tensor).wait()
        expected.check(result)
        assert torch.equal(tensor, inputs[rank])
        target = tensor[begin:end]
        communicator.reduce_scatter(tensor, out=target).wait()
        assert torch.equal(target, result)


def large_movements(communicator: Communicator, device: str):
    rank, size = communicator.rank, communicator.size
    plan = [[40_000 + 7 * r + to for to in range(size)] for r in range(size)]
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    for dtype, where in cases(size, dtypes, placements(communicator)):
        parts = [sample((200_003,), dtype, r, device=device) for r in range(size)]
        tensor = place(communicator, parts[rank], where[rank])
        gathered = communicator.all_gather(tensor[: 200_000 + rank]).wait()
        expected = [parts[r][: 200_000 + r] for r in range(size)]
        assert_same_bits(gathered, concatenated(expected))
        received, counts = communicator.all_to_all(tensor, plan[rank]).wait()
        assert counts == [row[rank] for row in plan]
        starts = [sum(row[:rank]) for row in plan]
        expected = [parts[r][starts[r] : starts[r] + counts[r]] for r in range(size)]
        assert_same_bits(received, concatenated(expected))
        communicator.broadcast(tensor, size - 1).wait()
        assert_same_bits(tensor, parts[-1])


PLACES = checks_in(globals())
