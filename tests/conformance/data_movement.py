"""Checks of data movement for every engine; each function runs on every rank."""

import pytest
import torch
from tests.conformance.samples import ALL, SHAPES, cases, checks_in, layouts, sample
from torch import Tensor

from ronde.collectives import (
    Communicator,
    all_gather_object,
    broadcast_object,
    exchange_hosts,
)
from ronde.errors import CollectiveError, UsageError


def assert_same_bits(result: Tensor, expected: Tensor) -> None:
    """Compare bit for bit: every dtype can, and no rounding is allowed here."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(bits(result), bits(expected))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def broadcast_every_root_dtype_and_shape(communicator: Communicator, device: str):
    size = communicator.size
    for root, dtype, shape in cases(size, range(size), ALL, SHAPES):
        tensor = sample(shape, dtype, communicator.rank, device=device)
        assert communicator.broadcast(tensor, root).wait() is tensor
        assert_same_bits(tensor, sample(shape, dtype, root))


def broadcast_keeps_layouts(communicator: Communicator, device: str):
    """Each rank's tensor may have its own layout."""
    rank, root = communicator.rank, communicator.size - 1
    shape = (2, 3, 4, 5)
    mine = layouts(sample(shape, torch.float32, rank, device=device))
    for index in range(len(mine)):
        tensor = list(mine.values())[(index + rank) % len(mine)]
        strides = tensor.stride()
        communicator.broadcast(tensor, root).wait()
        assert tensor.stride() == strides
        assert_same_bits(tensor, sample(shape, torch.float32, root))
    parameter = torch.nn.Parameter(torch.full((3,), float(rank), device=device))
    communicator.broadcast(parameter, root).wait()
    assert parameter.tolist() == [float(root)] * 3


def all_gather_even_and_uneven(communicator: Communicator, device: str):
    ranks = range(communicator.size)
    plans = (
        [3 for _ in ranks],
        [2 * r + 1 for r in ranks],
        [0 if r % 2 == 0 else 5 for r in ranks],
        [0 for _ in ranks],
    )
    rests = ((), (2, 3), (0,))
    for dtype, counts, rest in cases(communicator.size, ALL, plans, rests):
        parts = [sample((counts[r], *rest), dtype, r, device=device) for r in ranks]
        gathered = communicator.all_gather(parts[communicator.rank]).wait()
        assert_same_bits(gathered, concatenated(parts))


def concatenated(parts: list[Tensor]) -> Tensor:
    """Concatenate as bytes, since torch cannot concatenate every dtype."""
    num_rows = sum(part.shape[0] for part in parts)
    data = torch.cat([bits(part) for part in parts])
    shape = (num_rows, *parts[0].shape[1:])
    return data.view(parts[0].dtype).reshape(shape)


def all_gather_takes_layouts(communicator: Communicator, device: str):
    shape = (2, 3, 4, 5)
    for dtype in (torch.float32, torch.int16, torch.complex64):
        parts = [
            sample(shape, dtype, r, device=device) for r in range(communicator.size)
        ]
        for tensor in layouts(parts[communicator.rank]).values():
            gathered = communicator.all_gather(tensor).wait()
            assert_same_bits(gathered, torch.cat(parts))
    conjugate = sample((3,), torch.complex64, 0, device=device).conj()
    gathered = communicator.all_gather(conjugate).wait()
    assert torch.equal(gathered, conjugate.repeat(communicator.size))


def all_to_all_with_and_without_splits(communicator: Communicator, device: str):
    size, rank = communicator.size, communicator.rank
    plans = (
        [[2] * size for _ in range(size)],
        [[(r + to) % 3 for to in range(size)] for r in range(size)],
        [[0] * size for _ in range(size)],
        [[3 if to == 0 else 0 for to in range(size)] for _ in range(size)],
    )
    for dtype, plan, rest in cases(size, ALL, plans, ((), (3,), (0,))):
        check_exchange(communicator, plan, rest, dtype, device)
    even = torch.arange(2 * size, device=device) + 100 * rank
    received, counts = communicator.all_to_all(even).wait()
    assert counts == [2] * size
    assert received.tolist() == [
        2 * rank + 100 * source + i for source in range(size) for i in range(2)
    ]


def all_gather_into_a_place(communicator: Communicator, device: str):
    """Every rank gives one, or every other one; it may hold the rank's own rows."""
    size, rank = communicator.size, communicator.rank
    plans = ([3] * size, [2 * r + 1 for r in range(size)], [0] * size)
    for dtype, counts in cases(size, ALL, plans):
        parts = [sample((n, 2), dtype, r, device=device) for r, n in enumerate(counts)]
        expected = concatenated(parts)
        first = sum(counts[:rank])
        for is_own in (False, True):
            out = torch.zeros(sum(counts), 2, device=device).to(dtype)
            given = parts[rank]
            if is_own:
                given = out[first : first + counts[rank]]
                given.copy_(parts[rank])
            assert communicator.all_gather(given, out=out).wait() is out
            assert_same_bits(out, expected)
        place = out if rank % 2 else None
        assert_same_bits(
            communicator.all_gather(parts[rank], out=place).wait(), expected
        )


def all_gather_takes_rows_from_anywhere_in_the_place(
    communicator: Communicator, device: str
):
    """Rows that another rank's rows overwrite are read first."""
    out = torch.arange(2 * communicator.size, device=device)
    last = out[-2:] + communicator.rank
    out += communicator.rank
    communicator.all_gather(out[-2:], out=out).wait()
    assert out[2 * communicator.rank :][:2].tolist() == last.tolist()


def all_to_all_into_a_place(communicator: Communicator, device: str):
    size, rank = communicator.size, communicator.rank
    plan = [[(r + to) % 3 for to in range(size)] for r in range(size)]
    inputs = [
        sample((sum(row), 2), torch.float32, r, device=device)
        for r, row in enumerate(plan)
    ]
    expected, counts = communicator.all_to_all(inputs[rank], plan[rank]).wait()
    wide = torch.zeros(expected.shape[0] + 2, 2, device=device)
    out = wide[1:-1]
    received, again = communicator.all_to_all(inputs[rank], plan[rank], out=out).wait()
    assert received is out
    assert again == counts
    assert_same_bits(out, expected)
    assert wide[[0, -1]].tolist() == [[0.0, 0.0]] * 2


def check_exchange(
    communicator: Communicator,
    plan: list[list[int]],
    rest: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Exchange by a plan of ``rows[source][to]``; one excess row is not sent."""
    rank = communicator.rank
    inputs = [
        sample((sum(row) + 1, *rest), dtype, source, device=device)
        for source, row in enumerate(plan)
    ]
    received, counts = communicator.all_to_all(inputs[rank], plan[rank]).wait()
    parts = []
    for source, row in enumerate(plan):
        first = sum(row[:rank])
        parts.append(inputs[source][first : first + row[rank]])
    assert counts == [row[rank] for row in plan]
    assert_same_bits(received, concatenated(parts))


def send_and_recv_around_the_ring(communicator: Communicator, device: str):
    size, rank = communicator.size, communicator.rank
    if size == 1:
        for call in (communicator.send, communicator.recv):
            with pytest.raises(UsageError, match="must be another rank"):
                call(torch.ones(1, device=device), 0)
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype, shape in cases(size, ALL, ((), (5,), (0,), (2, 3))):
        sent = communicator.send(sample(shape, dtype, rank, device=device), after)
        target = sample(shape, dtype, rank, seed=9, device=device)
        assert communicator.recv(target, before).wait() is target
        sent.wait()
        assert_same_bits(target, sample(shape, dtype, before))
    with pytest.raises(UsageError, match="must be another rank"):
        communicator.send(torch.ones(1, device=device), rank)


def tags_tell_messages_apart(communicator: Communicator, device: str):
    size, rank = communicator.size, communicator.rank
    if size == 1:
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    if device == "cuda":
        with pytest.raises(UsageError, match="tag must be 0 for CUDA tensors, got 1"):
            communicator.send(torch.ones(1, device=device), after, 1)
        return
    sent = [
        communicator.send(torch.tensor([10 * rank + tag], device=device), after, tag)
        for tag in (1, 2, 3)
    ]
    for tag in (3, 1, 2):
        wide = torch.zeros(2, 2, dtype=torch.int64, device=device)
        work = communicator.recv(wide[:1, 1], before, tag)
        while not work.is_done():
            pass
        assert work.wait().tolist() == [10 * before + tag]
        assert work.wait().tolist() == [10 * before + tag]
        assert wide.tolist() == [[0, 10 * before + tag], [0, 0]]
    for work in sent:
        work.wait()


def barrier_waits_for_all(communicator: Communicator, device: str):
    for _ in range(5):
        work = communicator.barrier()
        assert work.wait() is None
        assert work.is_done()
        assert work.wait() is None


def duplicates_have_an_order_of_their_own(communicator: Communicator, device: str):
    """Odd ranks call the copy first, even ranks the original."""
    copy = communicator.duplicate()
    second = communicator.duplicate()
    assert (copy.rank, copy.size) == (communicator.rank, communicator.size)
    for _ in range(3):
        ones = torch.ones(3, device=device)
        twos = torch.full((3,), 2.0, device=device)
        pairs = [(communicator, ones), (copy, twos)]
        if communicator.rank % 2:
            pairs.reverse()
        for work in [group.all_reduce(tensor) for group, tensor in pairs]:
            work.wait()
        assert ones.tolist() == [communicator.size] * 3
        assert twos.tolist() == [2 * communicator.size] * 3
    copy.close()
    deeper = second.duplicate()
    second.close()
    assert deeper.all_gather(torch.ones(1, device=device)).wait().sum() == deeper.size
    deeper.close()


def objects_travel(communicator: Communicator, device: str):
    mine = {"rank": communicator.rank, "data": list(range(10 * communicator.rank))}
    for root in range(communicator.size):
        got = broadcast_object(communicator, mine, root)
        assert got == {"rank": root, "data": list(range(10 * root))}
    for size in (4000, *range(4060, 4100), 4200, 100_000):  # around what goes first
        sent = bytes([size % 251]) * size
        assert broadcast_object(communicator, sent, communicator.size - 1) == sent
    everyone = all_gather_object(communicator, mine)
    assert [one["rank"] for one in everyone] == list(range(communicator.size))
    assert all_gather_object(communicator, None) == [None] * communicator.size
    (function,) = set(all_gather_object(communicator, lambda: 7)[0:1])
    assert function() == 7
    hosts = exchange_hosts(communicator, f"host{communicator.rank % 2}")
    assert hosts == [f"host{r % 2}" for r in range(communicator.size)]


def objects_that_cannot_travel_fail_everywhere(communicator: Communicator, device: str):
    """The last rank's object cannot be pickled, and all ranks fail."""
    last = communicator.size - 1
    is_last = communicator.rank == last
    obj = (x for x in "ab") if is_last else "fine"
    expected = TypeError if is_last else CollectiveError
    with pytest.raises(expected):
        broadcast_object(communicator, obj, last)
    with pytest.raises(expected):
        all_gather_object(communicator, obj)
    assert broadcast_object(communicator, communicator.rank, last) == last


MOVEMENTS = checks_in(globals())
