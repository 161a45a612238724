"""Horovod's collectives give what one process would compute from all ranks' inputs."""

import random
import threading
from typing import Any

import pytest
import torch
from tests.parity.sessions import run_cases
from torch import Tensor

import ronde.torch as hvd

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
NUMBERS = FLOATS + INTEGERS + COMPLEX
SHAPES = [(), (1,), (17,), (5, 3), (2, 3, 4), (0,), (3, 0)]
OPS = {
    hvd.Sum: lambda stack: stack.sum(0),
    hvd.Min: lambda stack: stack.amin(0),
    hvd.Max: lambda stack: stack.amax(0),
    hvd.Product: lambda stack: stack.prod(0),
}


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on each rank: sums and products are exact."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def all_data(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([data(r, shape, dtype) for r in range(hvd.size())])


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype in COMPLEX else torch.float64


def reductions() -> None:
    for dtype in NUMBERS:
        for shape in SHAPES:
            mine, stack = data(hvd.rank(), shape, dtype), all_data(shape, dtype)
            for op, reference in OPS.items():
                if dtype in COMPLEX and op in (hvd.Min, hvd.Max):
                    continue
                expected = reference(stack).to(dtype)
                result = hvd.allreduce(mine, op=op)
                assert result.dtype == dtype
                assert torch.equal(result, expected), (dtype, shape, op)
            assert torch.equal(mine, data(hvd.rank(), shape, dtype))
            average = hvd.allreduce(mine, name="average").to(wide(dtype))
            exact = stack.to(wide(dtype)).sum(0) / hvd.size()
            if dtype in INTEGERS:
                assert torch.equal(average, exact.trunc())
            else:
                tolerance = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(average, exact, rtol=tolerance, atol=0)


def bool_() -> None:
    stack = torch.stack(
        [torch.tensor([r == 0, True, False]) for r in range(hvd.size())]
    )
    mine = stack[hvd.rank()]
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), stack.all(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), stack.any(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Product), stack.all(0))
    assert torch.equal(hvd.allgather(mine), stack.flatten())
    assert torch.equal(hvd.broadcast(mine, 1), stack[1])
    assert torch.equal(hvd.alltoall(mine[:1].repeat(hvd.size())), stack[:, 0])


def integers_follow_horovod() -> None:
    own = torch.tensor([-3 if hvd.rank() == 0 else -4])
    assert hvd.allreduce(own).item() == -3  # truncated toward zero
    sevens = torch.tensor([7])
    halves = hvd.allreduce(sevens, op=hvd.Sum, prescale_factor=0.5)
    assert halves.item() == 6  # each rank's 3.5 is truncated before the sum
    assert hvd.allreduce(sevens, op=hvd.Sum, postscale_factor=0.5).item() == 7


def factors() -> None:
    mine, stack = data(hvd.rank(), (7,), torch.float64), all_data((7,), torch.float64)
    for name, call in {
        "x": lambda **k: hvd.allreduce(mine, **k),
        "y": lambda **k: hvd.allreduce_(mine.clone(), **k),
        "z": lambda **k: hvd.grouped_allreduce([mine], **k)[0],
    }.items():
        result = call(name=name, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        assert torch.equal(result, 1.5 * stack.sum(0))
    both = hvd.reducescatter(
        mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=2.0
    )
    assert torch.equal(both, rows_of(4 * stack.sum(0)))


def rows_of(whole: Tensor) -> Tensor:
    """Return this rank's part of dimension 0; the first ranks take the rest."""
    base, extra = divmod(whole.shape[0], hvd.size())
    lengths = [base + (r < extra) for r in range(hvd.size())]
    return whole.split(lengths)[hvd.rank()]


def in_place_and_handles() -> None:
    expected = torch.full((4, 2), float(sum(range(hvd.size()))))
    for make in (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t.mul(1)):
        own = make(torch.full((4, 2), float(hvd.rank())))
        strides = own.stride()
        assert hvd.allreduce_(own, op=hvd.Sum) is own
        assert torch.equal(own, expected)
        assert own.stride() == strides
    own = torch.full((4, 2), float(hvd.rank()))
    handle = hvd.allreduce_async_(own, op=hvd.Sum, name="a")
    assert isinstance(handle, int)
    assert hvd.synchronize(handle) is own
    assert hvd.synchronize(handle) is None
    leaf = torch.full((3,), float(hvd.rank()), requires_grad=True)
    assert hvd.broadcast_(leaf, hvd.size() - 1) is leaf
    assert leaf.tolist() == [hvd.size() - 1.0] * 3
    pair = [torch.ones(2), torch.ones(3)]
    result = hvd.grouped_allreduce_(pair, op=hvd.Sum)
    assert isinstance(result, tuple)
    assert all(a is b for a, b in zip(result, pair, strict=True))
    result = hvd.synchronize(hvd.grouped_allreduce_async_(pair, op=hvd.Average))
    assert all(a is b for a, b in zip(result, pair, strict=True))
    assert isinstance(hvd.grouped_allreduce(pair), list)
    assert isinstance(hvd.grouped_allgather(pair), tuple)
    assert isinstance(hvd.grouped_reducescatter(pair), list)
    assert isinstance(hvd.synchronize(hvd.grouped_allreduce_async(pair)), tuple)
    assert isinstance(hvd.synchronize(hvd.grouped_reducescatter_async(pair)), tuple)
    assert hvd.grouped_allreduce([]) == []
    assert hvd.synchronize(hvd.grouped_allgather_async([])) == ()


def layouts_are_kept() -> None:
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for call in (hvd.allreduce, lambda t: hvd.broadcast(t, 0)):
        assert call(image).stride() == image.stride()
    columns = torch.arange(6.0).view(2, 3).t()
    gathered = hvd.allgather(columns)
    assert torch.equal(gathered, torch.cat([columns, columns]))
    assert torch.equal(hvd.allreduce(columns[::2]), columns[::2])
    assert torch.equal(
        hvd.allreduce(torch.ones(1).expand(5), op=hvd.Sum), torch.full((5,), 2.0)
    )


def movements() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*NUMBERS, torch.bool, torch.float8_e4m3fn]:
        parts = [data(r, (r + 1, 3), torch.int32).to(dtype) for r in range(size)]
        gathered = hvd.allgather(parts[rank], name="g")
        assert torch.equal(gathered.float(), torch.cat([p.float() for p in parts]))
        assert gathered.dtype == dtype
        for root in range(size):
            own = data(rank, (5,), torch.int32).to(dtype)
            result = hvd.broadcast(own, root)
            assert torch.equal(
                result.float(), data(root, (5,), torch.int32).to(dtype).float()
            )
            assert result is not own
    empty = hvd.allgather(torch.ones(0 if rank else 2, 4))
    assert empty.shape == (2, 4)


def reducescatter() -> None:
    for dtype in FLOATS + INTEGERS + COMPLEX:
        for num_rows in (hvd.size(), 5, 1, 0, 2 * hvd.size() + 1):
            stack = all_data((num_rows, 2), dtype)
            mine = stack[hvd.rank()].clone()
            result = hvd.reducescatter(mine, op=hvd.Sum)
            assert torch.equal(result, rows_of(stack.sum(0).to(dtype)))
    both = hvd.grouped_reducescatter([torch.ones(3), torch.ones(4, 2)], op=hvd.Average)
    assert torch.equal(both[0], rows_of(torch.ones(3)))
    assert torch.equal(both[1], rows_of(torch.ones(4, 2)))


def alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = torch.arange(2 * size).view(2 * size, 1) + 100 * rank
    received = hvd.alltoall(rows)
    assert isinstance(received, Tensor)
    expected = [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    assert received.flatten().tolist() == expected
    # Rank r sends r + to rows to rank ``to``; the last row stays.
    splits = [rank + to for to in range(size)]
    own = torch.full((sum(splits) + 1, 2), float(rank))
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        received, counts = hvd.alltoall(own, given, name="splits")
        assert counts.tolist() == [r + rank for r in range(size)]
        assert counts.dtype == torch.int32
        assert received[:, 0].tolist() == [
            float(r) for r in range(size) for _ in range(r + rank)
        ]
    pair = hvd.synchronize(hvd.alltoall_async(rows))
    assert pair[1].tolist() == [2] * size


def names_match_ranks_in_any_order() -> None:
    order = list(range(20))
    if hvd.rank() % 2:
        order.reverse()
    handles = {
        i: hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"t{i}", op=hvd.Sum)
        for i in order
    }
    handles[100] = hvd.allgather_async(torch.tensor([hvd.rank()]), name="t1")
    for i in reversed(order):
        result = hvd.synchronize(handles[i])
        assert torch.equal(result, torch.full((i + 1,), float(i * hvd.size())))
    assert hvd.synchronize(handles[100]).tolist() == list(range(hvd.size()))


def poll_is_false_until_all_ranks_have_submitted() -> None:
    for make in (
        lambda: hvd.allreduce_async(torch.ones(17, 17)),
        lambda: hvd.allgather_async(torch.ones(17, 17)),
        lambda: hvd.reducescatter_async(torch.ones(17, 17)),
        lambda: hvd.broadcast_async(torch.ones(17, 17), 0),
        lambda: hvd.alltoall_async(torch.ones(16, 17)),
    ):
        if hvd.rank() == 0:
            handle = make()
            assert not hvd.poll(handle)
            hvd.broadcast(torch.ones(1), 0, name="polled")
        else:
            hvd.broadcast(torch.ones(1), 0, name="polled")
            handle = make()
        hvd.synchronize(handle)


def sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    indices = torch.tensor([[0, rank + 1], [1, 2]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (6, 4))
    dense = torch.zeros(6, 4)
    dense[0, 1] = size
    for r in range(size):
        dense[r + 1, 2] += 2.0
    total = hvd.sparse_allreduce_async(mine, name="s", op=hvd.Sum)()
    assert total.is_sparse
    assert torch.equal(total.to_dense(), dense)
    average = hvd.sparse_allreduce_async(mine, name=None, op=hvd.Average)()
    torch.testing.assert_close(average.to_dense(), dense / size)
    none = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), (6, 4))
    assert (
        hvd.sparse_allreduce_async(none, "e", hvd.Sum)().to_dense().count_nonzero() == 0
    )


class Halved(hvd.Compression.none):
    """A user's own: sends half of it and doubles the result."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor / 2, "two"

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        assert ctx == "two"
        return tensor * 2


def compressors() -> None:
    own = torch.tensor([1.0 + hvd.rank(), 2.5])
    expected = torch.tensor([3.0, 5.0])
    for name in ("none", "fp16", "bf16", "halved"):
        compressor = Halved if name == "halved" else getattr(hvd.Compression, name)
        options = {"op": hvd.Sum, "compression": compressor}
        for result in (
            hvd.allreduce(own, **options),
            hvd.grouped_allreduce([own], **options)[0],
            hvd.allgather(hvd.reducescatter(own, **options)),
            hvd.allgather(hvd.grouped_reducescatter([own], **options)[0]),
        ):
            assert result.dtype == torch.float32
            assert torch.equal(result, expected)
    integers = hvd.allreduce(
        torch.tensor([5]), op=hvd.Sum, compression=hvd.Compression.fp16
    )
    assert integers.tolist() == [10]


def any_thread_may_call() -> None:
    """Eight threads call at once, each in an order of its own on every rank."""
    wrong: list[str] = []

    def work(thread: int) -> None:
        order = list(range(12))
        random.Random(100 * hvd.rank() + thread).shuffle(order)
        handles = {
            i: hvd.allreduce_async(torch.full((i + 1,), 1.0), name=f"{thread}.{i}")
            for i in order
        }
        gathered = hvd.allgather(torch.tensor([hvd.rank()]), name=f"{thread}")
        if gathered.tolist() != list(range(hvd.size())):
            wrong.append(f"allgather {thread}")
        results = {i: hvd.synchronize(handles[i]) for i in reversed(order)}
        wrong.extend(
            f"{thread}.{i}" for i in order if results[i].tolist() != [1.0] * (i + 1)
        )

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


EVERYWHERE = [
    *(reductions, factors, in_place_and_handles, movements, reducescatter, alltoall),
    sparse,
]
OF_SEVERAL = [bool_, names_match_ranks_in_any_order, any_thread_may_call]
OF_TWO = [
    *(integers_follow_horovod, layouts_are_kept, compressors),
    poll_is_false_until_all_ranks_have_submitted,
]


@pytest.mark.parametrize(
    ("size", "engine", "calls"),
    [
        (3, "auto", EVERYWHERE + OF_SEVERAL),
        (3, "gloo", [movements, names_match_ranks_in_any_order]),
        (3, "scheduled", [factors, reducescatter]),
        (3, "hierarchical", [alltoall, any_thread_may_call]),
        (1, "auto", EVERYWHERE),
        (2, "auto", [*OF_TWO, in_place_and_handles]),
        (4, "auto", [alltoall]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_collectives(size, engine, calls):
    run_cases(size, {call.__name__: call for call in calls}, engine=engine)
