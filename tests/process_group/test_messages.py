"""Messages between two ranks, several calls as one, and functional collectives."""

import pytest
import torch
from tests.conformance.samples import sample
from tests.process_group.groups import AUTO, ENGINES, SMOKE, every, run_in_group, same
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

DTYPES = [
    *(torch.float64, torch.bfloat16, torch.int64, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
]
SHAPES = [(), (7,), (3, 5), (100_000,)]


def neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def send_and_receive():
    """Exchange around a ring; odd ranks receive first."""
    rank, to, source = neighbours()
    is_odd_ring = dist.get_world_size() % 2
    for dtype in DTYPES:
        for shape in SHAPES:
            sent, taken = sample(shape, dtype, rank), torch.empty(shape, dtype=dtype)
            if is_odd_ring:
                work = dist.isend(sent, to)
                assert dist.recv(taken, source) == source
                work.wait()
            elif rank % 2:
                assert dist.recv(taken, source) == source
                dist.send(sent, to)
            else:
                dist.send(sent, to)
                assert dist.recv(taken, source) == source
            same(taken, sample(shape, dtype, source))


def send_and_receive_later():
    rank, to, source = neighbours()
    sent = [sample((100 * n + 1,), torch.float64, rank, n) for n in range(5)]
    taken = [torch.empty_like(each) for each in sent]
    works = [dist.irecv(place, source, tag=n) for n, place in enumerate(taken)]
    works += [dist.isend(each, to, tag=n) for n, each in enumerate(sent)]
    for work in works:
        work.wait()
    for n, place in enumerate(taken):
        same(place, sample((100 * n + 1,), torch.float64, source, n))
    # Columns, and what has no elements.
    whole = torch.zeros(6, 2, dtype=torch.float64)
    work = dist.isend(sample((6, 2), torch.float64, rank)[:, 0], to)
    dist.recv(whole[:, 1], source)
    work.wait()
    same(whole[:, 1], sample((6, 2), torch.float64, source)[:, 0])
    assert not whole[:, 0].any()
    works = [dist.isend(torch.empty(0), to), dist.irecv(torch.empty(0), source)]
    for work in works:
        work.wait()


def exchange_in_batches():
    rank, to, source = neighbours()
    for turn in range(3):
        sent = sample((257,), torch.float32, rank, turn)
        taken = torch.empty(257)
        calls = [
            dist.P2POp(dist.isend, sent, to),
            dist.P2POp(dist.irecv, taken, source),
        ]
        if rank % 2:
            calls.reverse()
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        same(taken, sample((257,), torch.float32, source, turn))


def receive_from_any():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            taken = torch.empty(9, dtype=torch.float64)
            source = dist.recv(taken, tag=3)
            same(taken, sample((9,), torch.float64, source))
            sources.add(source)
        assert sources == set(range(1, size))
        taken = torch.empty(9, dtype=torch.float64)
        work = dist.irecv(taken)
        work.wait()
        assert work.source_rank() == 1
        same(taken, sample((9,), torch.float64, 1))
    else:
        dist.send(sample((9,), torch.float64, rank), 0, tag=3)
        if rank == 1:
            dist.send(sample((9,), torch.float64, rank), 0)


def managed(is_async, call, device=None):
    """Coalesce the collectives that ``call`` starts, and wait for them."""
    manager = dist._coalescing_manager(device=device, async_ops=is_async)
    with manager as several:
        call()
    if is_async:
        several.wait()


def coalesce(is_async):
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = range(1, 4)
    reduced = [torch.full((n, 2), rank + 1.0 + n) for n in lengths]
    managed(is_async, lambda: [dist.all_reduce(tensor) for tensor in reduced])
    for n, tensor in zip(lengths, reduced, strict=True):
        same(tensor, torch.full((n, 2), sum(other + 1.0 + n for other in range(size))))
    gathered = [torch.empty(size * n) for n in lengths]
    mine = [torch.full((n,), rank + 0.5) for n in lengths]
    gather = dist.all_gather_into_tensor
    managed(is_async, lambda: list(map(gather, gathered, mine)))
    for n, output in zip(lengths, gathered, strict=True):
        same(output, (torch.arange(size) + 0.5).repeat_interleave(n))
    kept = [torch.empty(n) for n in lengths]
    ones = [torch.ones(size * n) for n in lengths]
    scatter = dist.reduce_scatter_tensor
    managed(is_async, lambda: list(map(scatter, kept, ones)))
    for n, output in zip(lengths, kept, strict=True):
        same(output, torch.full((n,), float(size)))


def coalesce_kinds(is_async):
    """With a device, calls of several kinds can be coalesced."""
    rank, to, source = neighbours()
    size = dist.get_world_size()
    copied, taken = torch.full((3,), float(rank)), torch.empty(5)
    parts = [torch.empty(2) for _ in range(size)]

    def call():
        dist.broadcast(copied, 1, async_op=True)
        dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True)
        dist.irecv(taken, source)
        dist.isend(torch.full((5,), float(rank)), to)

    managed(is_async, call, torch.device("cpu"))
    same(copied, torch.ones(3))
    same(torch.cat(parts), torch.arange(float(size)).repeat_interleave(2))
    same(taken, torch.full((5,), float(source)))


def coalesce_both():
    for is_async in (False, True):
        coalesce(is_async)
        coalesce_kinds(is_async)


def of_all(shape, dtype=torch.float64):
    return [sample(shape, dtype, rank) for rank in range(dist.get_world_size())]


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)


def compose():
    """Functional collectives, which go through C++ and torch's registry of works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD

    mine = sample((size, 3), torch.float64, rank)
    close(functional.all_reduce(mine, "sum", group), sum(of_all((size, 3))))
    close(functional.all_reduce(mine, "avg", group), sum(of_all((size, 3))) / size)
    close(
        functional.all_reduce(mine, "max", group),
        torch.stack(of_all((size, 3))).amax(0),
    )
    gathered = functional.all_gather_tensor(mine, 0, group)
    close(gathered, torch.cat(of_all((size, 3))))
    close(functional.all_gather_tensor(mine, 1, group), torch.cat(of_all((size, 3)), 1))
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    close(scattered, sum(of_all((size, 3)))[rank : rank + 1])
    wide = sample((3, 2 * size), torch.float64, rank)
    scattered = functional.reduce_scatter_tensor(wide, "avg", 1, group)
    columns = slice(2 * rank, 2 * rank + 2)
    close(scattered, (sum(of_all((3, 2 * size))) / size)[:, columns])
    close(functional.broadcast(mine, 1, group), of_all((size, 3))[1])
    swapped = functional.all_to_all_single(mine, [1] * size, [1] * size, group)
    close(swapped, torch.stack([each[rank] for each in of_all((size, 3))]))
    sent = [other + 1 for other in range(size)]
    uneven = sample((sum(sent), 2), torch.float64, rank)
    received = [rank + 1] * size
    result = functional.all_to_all_single(uneven, received, sent, group)
    begin = sum(sent[:rank])
    parts = [each[begin : begin + rank + 1] for each in of_all((sum(sent), 2))]
    close(result, torch.cat(parts))


def compose_several():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    several = [torch.full((n + 1,), rank + 1.0) for n in range(3)]
    for n, each in enumerate(functional.all_reduce_coalesced(several, "sum", group)):
        close(each, torch.full((n + 1,), size * (size + 1) / 2))
    for each in functional.all_gather_into_tensor_coalesced(several, group):
        numel = len(each) // size
        close(each, torch.arange(1.0, size + 1).repeat_interleave(numel))
    rows = [torch.ones(size * (n + 1)) for n in range(2)]
    for each in functional.reduce_scatter_tensor_coalesced(rows, "sum", [0, 0], group):
        close(each, torch.full_like(each, size))
    complexes = sample((4,), torch.complex128, rank)
    close(
        functional.all_reduce(complexes, "sum", group),
        sum(of_all((4,), torch.complex128)),
    )
    mine = sample((size, 3), torch.float64, rank)
    raw = torch.ops._c10d_functional
    work = raw.all_reduce(mine, "sum", group.group_name)
    close(raw.wait_tensor(work), sum(of_all((size, 3))))
    same(mine, sample((size, 3), torch.float64, rank))


def differentiate():
    """Functional collectives are differentiable."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    leaf = of_all((2, 3))[rank].clone().requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, group)
    weights = sample((2 * size, 3), torch.float64, 0, 9)
    (gathered * weights * (rank + 1.0)).sum().backward()
    total = size * (size + 1) / 2
    expected = weights[2 * rank : 2 * rank + 2] * total
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-14, atol=1e-14)
    leaf = sample((size, 3), torch.float64, rank).requires_grad_()
    counts = [1] * size
    swapped = functional.all_to_all_single_autograd(leaf, counts, counts, group)
    (swapped * (rank + 1.0)).sum().backward()
    expected = torch.arange(1.0, size + 1, dtype=torch.float64)[:, None].expand(-1, 3)
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=0)


CALLS = [
    *(send_and_receive, send_and_receive_later, exchange_in_batches, coalesce_both),
    *(compose, compose_several, differentiate),
]


@pytest.mark.parametrize("setting", ENGINES, ids=str)
def test_calls(setting):
    calls = [*CALLS, receive_from_any] if setting == AUTO else CALLS
    run_in_group(setting, every, *((call,) for call in calls))


@pytest.mark.parametrize("setting", SMOKE, ids=str)
def test_even_rings(setting):
    run_in_group(setting, every, (send_and_receive,), (exchange_in_batches,))
