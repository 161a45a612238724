"""Every collective, with and without ``async_op``, against the expected result."""

import time

import pytest
import torch
from tests.conformance.samples import assert_reduced, layouts, sample
from tests.process_group.groups import AUTO, ENGINES, SMOKE, run_in_group, same
from torch import distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp

from ronde.collectives import ReduceOp as Op

SHAPES = [(), (1,), (7,), (3, 5), (0,), (4, 0)]
OPS = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.AVG: Op.AVERAGE,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.PRODUCT: Op.PRODUCT,
}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
REDUCED = [*FLOATS, *INTEGERS]
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


def ended(work, is_async):
    """Wait for the work of an asynchronous call."""
    assert (work is not None) == is_async
    if is_async:
        assert work.wait()
        assert work.is_completed()


def inputs(shape, dtype, seed=0):
    """Return the inputs of all ranks."""
    return [sample(shape, dtype, rank, seed) for rank in range(dist.get_world_size())]


def own(shape, dtype, seed=0):
    return sample(shape, dtype, dist.get_rank(), seed)


def reduce_all(is_async):
    for dtype in REDUCED:
        for op, what in OPS.items():
            for shape in SHAPES if dtype is torch.float64 else [(3, 5)]:
                tensor = own(shape, dtype)
                ended(dist.all_reduce(tensor, op, async_op=is_async), is_async)
                assert_reduced(tensor, inputs(shape, dtype), what)
    for tensor in layouts(own((2, 3, 4, 5), torch.float64)).values():
        strides = tensor.stride()
        ended(dist.all_reduce(tensor, async_op=is_async), is_async)
        assert_reduced(tensor, inputs((2, 3, 4, 5), torch.float64), Op.SUM)
        assert tensor.stride() == strides


def reduce_otherwise(is_async):
    for dtype in (torch.float32, torch.float64):
        tensor = own((5,), dtype)
        scaled = _make_nccl_premul_sum(0.25)
        ended(dist.all_reduce(tensor, scaled, async_op=is_async), is_async)
        assert_reduced(tensor, inputs((5,), dtype), Op.SUM, 0.25)
    for dtype in (torch.complex64, torch.complex128):
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            tensor = own((3, 2), dtype)
            ended(dist.all_reduce(tensor, op, async_op=is_async), is_async)
            assert_reduced(tensor, inputs((3, 2), dtype), OPS[op])
    for dtype in (*INTEGERS, torch.bool):
        every = inputs((6,), dtype)
        for op, combine in (
            (ReduceOp.BAND, torch.bitwise_and),
            (ReduceOp.BOR, torch.bitwise_or),
            (ReduceOp.BXOR, torch.bitwise_xor),
        ):
            expected = every[0]
            for other in every[1:]:
                expected = combine(expected, other)
            tensor = own((6,), dtype)
            ended(dist.all_reduce(tensor, op, async_op=is_async), is_async)
            same(tensor, expected)
    tensor = own((4,), torch.float64).requires_grad_()
    ended(dist.all_reduce(tensor, async_op=is_async), is_async)
    assert_reduced(tensor.detach(), inputs((4,), torch.float64), Op.SUM)
    with torch.inference_mode():
        tensor = own((4,), torch.float64) * 1.0
        ended(dist.all_reduce(tensor, async_op=is_async), is_async)
    assert_reduced(tensor, inputs((4,), torch.float64), Op.SUM)


def reduce_to_one(is_async):
    for root in range(dist.get_world_size()):
        for op, what in OPS.items():
            for shape in SHAPES:
                tensor = own(shape, torch.float64)
                ended(dist.reduce(tensor, root, op, async_op=is_async), is_async)
                if dist.get_rank() == root:
                    assert_reduced(tensor, inputs(shape, torch.float64), what)
                else:
                    same(tensor, own(shape, torch.float64))


def reduce_and_scatter(is_async):
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, what in OPS.items():
        for shape in [(), (3,), (2, 3), (0,)]:
            every = [inputs(shape, torch.float64, part) for part in range(size)]
            parts = [each[rank] for each in every]
            output = torch.empty(shape, dtype=torch.float64)
            work = dist.reduce_scatter(output, parts, op, async_op=is_async)
            ended(work, is_async)
            assert_reduced(output, every[rank], what)
            for part, each in enumerate(every):
                same(parts[part], each[rank])
    # Parts of unequal sizes, the last of them empty.
    shapes = [(size - part - 1, 2) for part in range(size)]
    parts = [own(shape, torch.float64, part) for part, shape in enumerate(shapes)]
    output = torch.empty(shapes[rank], dtype=torch.float64)
    ended(dist.reduce_scatter(output, parts, async_op=is_async), is_async)
    assert_reduced(output, inputs(shapes[rank], torch.float64, rank), Op.SUM)


def reduce_and_scatter_one(is_async):
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, what in OPS.items():
        for shape in [(3,), (2, 3), (0, 2)]:
            for whole in [(size, *shape), (size * shape[0], *shape[1:])]:  # stacked
                tensor = own(whole, torch.float64)
                output = torch.empty(shape, dtype=torch.float64)
                call = dist.reduce_scatter_tensor
                ended(call(output, tensor, op, async_op=is_async), is_async)
                every = [
                    each.reshape(size, *shape)[rank]
                    for each in inputs(whole, torch.float64)
                ]
                assert_reduced(output, every, what)
                same(tensor, own(whole, torch.float64))
    tensor = own((4, size), torch.float64).t()
    output = torch.empty(4, 2, dtype=torch.float64)[:, 0]
    scaled = _make_nccl_premul_sum(0.5)
    work = dist.reduce_scatter_tensor(output, tensor, scaled, async_op=is_async)
    ended(work, is_async)
    every = [each.t()[rank] for each in inputs((4, size), torch.float64)]
    assert_reduced(output, every, Op.SUM, 0.5)


def copy_to_all(is_async):
    for root in range(dist.get_world_size()):
        for dtype in MOVED if root == 1 else [torch.float64]:
            for shape in SHAPES:
                tensor = own(shape, dtype)
                ended(dist.broadcast(tensor, root, async_op=is_async), is_async)
                same(tensor, sample(shape, dtype, root))
        for tensor in layouts(own((2, 3, 4, 5), torch.float64)).values():
            ended(dist.broadcast(tensor, root, async_op=is_async), is_async)
            same(tensor, sample((2, 3, 4, 5), torch.float64, root))


def gather_for_all(is_async):
    size = dist.get_world_size()
    for dtype in MOVED:
        for shape in SHAPES:
            places = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            work = dist.all_gather(places, own(shape, dtype), async_op=is_async)
            ended(work, is_async)
            for place, each in zip(places, inputs(shape, dtype), strict=True):
                same(place, each)
    every = [sample((rank, 2), torch.float64, rank) for rank in range(size)]
    places = [torch.empty_like(each) for each in every]
    tensor = every[dist.get_rank()].clone()
    ended(dist.all_gather(places, tensor, async_op=is_async), is_async)
    for place, each in zip(places, every, strict=True):
        same(place, each)
    # Columns of one tensor.
    whole = torch.zeros(4, size, dtype=torch.float64)
    tensor = own((8,), torch.float64)[::2].requires_grad_()
    columns = [whole[:, rank] for rank in range(size)]
    ended(dist.all_gather(columns, tensor, async_op=is_async), is_async)
    same(whole, torch.stack([each[::2] for each in inputs((8,), torch.float64)], 1))


def gather_for_all_in_one(is_async):
    size = dist.get_world_size()
    for dtype in MOVED:
        for shape in [(1,), (7,), (3, 5), (0,), (4, 0)]:
            stacked = torch.stack(inputs(shape, dtype))
            for whole in [(size, *shape), (size * shape[0], *shape[1:])]:
                output = torch.empty(whole, dtype=dtype)
                call = dist.all_gather_into_tensor
                ended(call(output, own(shape, dtype), async_op=is_async), is_async)
                same(output, stacked.reshape(whole))
    output = torch.empty(3, size, dtype=torch.float64).t()
    tensor = own((3,), torch.float64)
    ended(dist.all_gather_into_tensor(output, tensor, async_op=is_async), is_async)
    same(output, torch.stack(inputs((3,), torch.float64)))
    # In place, as FSDP has it.
    output = torch.zeros(size, 3, dtype=torch.float64)
    output[dist.get_rank()] = tensor
    place = output[dist.get_rank()]
    ended(dist.all_gather_into_tensor(output, place, async_op=is_async), is_async)
    same(output, torch.stack(inputs((3,), torch.float64)))


def gather_and_scatter(is_async):
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        is_root = rank == root
        for dtype in MOVED if root == 1 else [torch.float64]:
            for shape in SHAPES if root == 1 else [(3, 5)]:
                places = [torch.empty(shape, dtype=dtype) for _ in range(size)]
                tensor = own(shape, dtype)
                given = places if is_root else None
                ended(dist.gather(tensor, given, root, async_op=is_async), is_async)
                for place, each in zip(places, inputs(shape, dtype), strict=True):
                    if is_root:
                        same(place, each)
                parts = [sample(shape, dtype, part, root) for part in range(size)]
                output = torch.empty(shape, dtype=dtype)
                given = parts if is_root else None
                ended(dist.scatter(output, given, root, async_op=is_async), is_async)
                same(output, parts[rank])


def exchange(is_async):
    rank, size = dist.get_rank(), dist.get_world_size()

    def part(source, to, dtype):
        """Return the rows that one rank sends to another; none to itself."""
        rows = (source - to) % size
        return sample((rows, 2), dtype, source, to)

    for dtype in MOVED:
        parts = [part(rank, to, dtype) for to in range(size)]
        expected = [part(source, rank, dtype) for source in range(size)]
        places = [torch.empty_like(each) for each in expected]
        ended(dist.all_to_all(places, parts, async_op=is_async), is_async)
        for place, each in zip(places, expected, strict=True):
            same(place, each)
        joint = torch.cat(expected)
        output = torch.empty_like(joint)
        splits = [len(each) for each in expected], [len(each) for each in parts]
        call = dist.all_to_all_single
        ended(call(output, torch.cat(parts), *splits, async_op=is_async), is_async)
        same(output, joint)
    # Equal parts, of a transposed tensor.
    every = inputs((2, 2 * size), torch.float64)
    output = torch.empty(2 * size, 2, dtype=torch.float64)
    work = dist.all_to_all_single(output, every[rank].t(), async_op=is_async)
    ended(work, is_async)
    rows = slice(2 * rank, 2 * rank + 2)
    same(output, torch.cat([each.t()[rows] for each in every]))


def wait_for_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for turn in range(3):
        store.add(f"came{turn}", 1)
        dist.barrier()
        assert store.add(f"came{turn}", 0) == size
    assert dist.barrier(async_op=True).wait()
    some = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=some)
        assert tensor.item() == size - 1
        dist.barrier(group=some)
        dist.broadcast(tensor.fill_(rank), size - 1, group=some)
        assert tensor.item() == size - 1


def complete_in_any_order():
    """Works may be waited for in any order, dropped, or used as futures."""
    tensors = [own((1000 * (n + 1),), torch.float64, n) for n in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works[3:]):
        work.wait()
    future = works[0].get_future().then(lambda done: done.value()[0] * 2)
    doubled = future.wait()
    del works
    dist.barrier()
    for n, tensor in enumerate(tensors):
        assert_reduced(tensor, inputs((1000 * (n + 1),), torch.float64, n), Op.SUM)
    torch.testing.assert_close(doubled, tensors[0] * 2, rtol=0, atol=0)


def refuse_wrong_calls():
    """Bad calls raise an error with a remedy, and the group stays usable."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        with pytest.raises(ValueError, match=r"all_reduce does not support|op must be"):
            dist.all_reduce(own((2,), torch.complex64), op)
    group = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.MIN
    with pytest.raises(ValueError, match="op must be SUM or AVG for complex"):
        group.allreduce([own((2,), torch.complex64)], options)
    with pytest.raises(ValueError, match="another rank"):
        group.send([torch.ones(1)], rank)
    output = torch.empty(size + 1)
    with pytest.raises(ValueError, match="as many elements as"):
        dist.all_gather_into_tensor(output, torch.ones(1))
    with pytest.raises(ValueError, match="tensors, one per rank, got"):
        dist.all_gather([output] * (size + 1), output)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def refuse_other_sizes():
    """Wrong sizes with the correct total are refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.full((1 + 2 * (rank == 1),), float(rank))
    total = size + 2
    wrong = [torch.full((n,), -1.0) for n in (2, total - size, *[1] * (size - 2))]
    even = torch.full((total,), -1.0)
    splits = [2, total - size, *[1] * (size - 2)]
    wanted = "output for rank 0 must have 1 elements, as many as rank 0 sent, got 2"
    for call in (
        lambda: dist.all_gather(wrong, sent),
        lambda: dist.all_to_all(wrong, list(torch.ones(2 * size).split(1))[:size]),
        lambda: dist.all_to_all_single(
            even, sent.repeat(size), splits, [len(sent)] * size
        ),
    ):
        with pytest.raises(ValueError, match=wanted):
            call()
    if rank == 0:
        with pytest.raises(ValueError, match=wanted):
            dist.gather(sent, wrong)
    else:
        dist.gather(sent)
    assert all(each.eq(-1.0).all() for each in (*wrong, even))


def poll():
    """Polling completes a call without a wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = [torch.zeros(5) for _ in range(size)]
    work = dist.all_gather(places, torch.full((5,), rank + 1.0), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert [place[0].item() for place in places] == [r + 1.0 for r in range(size)]


def sum_sparse():
    rank, size = dist.get_rank(), dist.get_world_size()
    dense = torch.zeros(6, 3)
    dense[rank] = rank + 1.0
    dense[5] = 1.0
    tensor = dense.to_sparse(1)
    dist.all_reduce(tensor)
    expected = torch.zeros(6, 3)
    expected[:size] = torch.arange(1.0, size + 1)[:, None]
    expected[5] = size
    assert torch.equal(tensor.to_dense(), expected)


def refuse_bitwise():
    """Bitwise reductions are not supported here."""
    whole = torch.ones(dist.get_world_size(), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"op must be .*, got BOR"):
        dist.reduce_scatter_tensor(whole[:1].clone(), whole, ReduceOp.BOR)
    with pytest.raises(ValueError, match="integer dtype or bool for BOR"):
        dist.all_reduce(torch.ones(2), ReduceOp.BOR)


def sum_of_bools():
    tensor = torch.tensor([True, False, dist.get_rank() == 1])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [True, False, True]


def leave_views_valid():
    """As with C++ groups, collectives do not change a tensor's version."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tensors = [torch.full((size, 3), float(rank)) for _ in range(4)]
    gathered = torch.zeros(size * size, 3)
    dist.broadcast(tensors[0], 0)
    dist.all_reduce(tensors[1])
    dist.scatter(tensors[2], tensors[3:] * size if rank == 0 else None, src=0)
    dist.all_gather_single(gathered, tensors[3])
    for tensor in (*tensors, gathered):
        assert tensor._version == 0
    assert tensors[0].eq(0.0).all()
    assert tensors[1].eq(size * (size - 1) / 2).all()
    assert tensors[2].eq(0.0).all()


IN_TWO_WAYS = [
    *(reduce_all, reduce_otherwise, reduce_to_one, reduce_and_scatter),
    *(reduce_and_scatter_one, copy_to_all, gather_for_all, gather_for_all_in_one),
    *(gather_and_scatter, exchange),
]
IN_ONE_WAY = [
    *(wait_for_all, complete_in_any_order, refuse_wrong_calls, poll),
    *(refuse_other_sizes, sum_sparse, refuse_bitwise, sum_of_bools, leave_views_valid),
]


def call_all(ways, in_two_ways, in_one_way):
    for call in in_two_ways:
        for is_async in ways:
            call(is_async)
    for call in in_one_way:
        call()


@pytest.mark.parametrize("setting", ENGINES, ids=str)
def test_every_call(setting):
    """The engine does not depend on ``async_op``, so only one engine runs both."""
    ways = [False, True] if setting == AUTO else [True]
    run_in_group(setting, call_all, ways, IN_TWO_WAYS, IN_ONE_WAY)


@pytest.mark.parametrize("setting", SMOKE, ids=str)
def test_other_sizes(setting):
    run_in_group(
        setting,
        call_all,
        [True],
        [reduce_to_one, reduce_and_scatter_one, gather_for_all_in_one, exchange],
        [wait_for_all],
    )
