"""Checks of reductions for every engine; each function runs on every rank."""

import pytest
import torch
from tests.conformance.samples import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    MOVED_ONLY,
    SHAPES,
    assert_reduced,
    cases,
    checks_in,
    layouts,
    sample,
)
from torch import Tensor

from ronde.collectives import Communicator, ReduceOp, rows
from ronde.errors import UsageError

ORDERED = [ReduceOp.MIN, ReduceOp.MAX]
BOOLEAN = [*ORDERED, ReduceOp.PRODUCT]


def ops_of(dtype: torch.dtype) -> list[ReduceOp]:
    if dtype is torch.bool:
        return BOOLEAN
    return [op for op in ReduceOp if not (dtype in COMPLEX and op in ORDERED)]


def dtypes_and_ops(
    dtypes: list[torch.dtype],
) -> list[tuple[int, torch.dtype, ReduceOp]]:
    """Return each dtype with its number and each operation that it has."""
    return [(seed, d, op) for seed, d in enumerate(dtypes) for op in ops_of(d)]


def inputs_of(
    communicator: Communicator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    device: str,
) -> list[Tensor]:
    return [
        sample(shape, dtype, rank, seed, device) for rank in range(communicator.size)
    ]


def all_reduce_every_dtype_op_and_shape(communicator: Communicator, device: str):
    """Start all calls, then wait for them in reverse order."""
    under_way = []
    kinds = dtypes_and_ops([*FLOATS, *INTEGERS, torch.bool, *COMPLEX])
    for (seed, dtype, op), shape in cases(communicator.size, kinds, SHAPES):
        inputs = inputs_of(communicator, shape, dtype, seed, device)
        tensor = inputs[communicator.rank].clone()
        under_way.append((communicator.all_reduce(tensor, op), tensor, inputs, op))
    for work, tensor, inputs, op in reversed(under_way):
        assert work.wait() is tensor
        assert work.is_done()
        assert_reduced(tensor, inputs, op)
        if tensor.numel():
            before = tensor.clone()
            assert work.wait() is tensor
            assert torch.equal(tensor.cpu(), before.cpu())


def all_reduce_scales(communicator: Communicator, device: str):
    kinds = dtypes_and_ops([*FLOATS, *INTEGERS, *COMPLEX])
    scales = [(0.5, 1.0), (1.0, 0.3), (0.7, 0.5)]
    for (seed, dtype, op), scale in cases(communicator.size, kinds, scales):
        inputs = inputs_of(communicator, (5, 3), dtype, seed, device)
        tensor = inputs[communicator.rank].clone()
        prescale, postscale = scale
        communicator.all_reduce(
            tensor, op, prescale=prescale, postscale=postscale
        ).wait()
        assert_reduced(tensor, inputs, op, prescale, postscale)


def all_reduce_keeps_layouts(communicator: Communicator, device: str):
    for seed, dtype in enumerate(
        [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
    ):
        for op in ops_of(dtype):
            inputs = inputs_of(communicator, (2, 3, 4, 5), dtype, seed, device)
            for tensor in layouts(inputs[communicator.rank]).values():
                strides = tensor.stride()
                communicator.all_reduce(tensor, op).wait()
                assert tensor.stride() == strides
                assert_reduced(tensor, inputs, op)


def all_reduce_leaves_the_source_alone(communicator: Communicator, device: str):
    """Check short, long, scaled and strided tensors."""
    for seed, dtype in enumerate([torch.float32, torch.bfloat16, torch.int32]):
        for shape in [(0,), (3,), (5, 7), (1501,)]:
            for prescale in (1.0, 0.5):
                inputs = inputs_of(communicator, shape, dtype, seed, device)
                source = inputs[communicator.rank].clone()
                tensor = torch.empty_like(source)
                work = communicator.all_reduce(tensor, prescale=prescale, source=source)
                assert work.wait() is tensor
                assert torch.equal(source, inputs[communicator.rank])
                assert_reduced(tensor, inputs, ReduceOp.SUM, prescale)
    source = torch.ones(4, 3, device=device).t()
    tensor = communicator.all_reduce(torch.empty_like(source), source=source).wait()
    assert torch.equal(tensor, source * communicator.size)


def all_reduce_leaves_gaps_alone(communicator: Communicator, device: str):
    whole = torch.zeros(6, 4, device=device)
    communicator.all_reduce(whole[::2, 1:3].fill_(1.0)).wait()
    expected = torch.zeros(6, 4, device=device)
    expected[::2, 1:3] = communicator.size
    assert torch.equal(whole, expected)


def all_reduce_takes_parameters(communicator: Communicator, device: str):
    """Leaves that need gradients are changed in place, outside autograd."""
    for dtype in (torch.float32, torch.bfloat16):
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            parameter = torch.nn.Parameter(torch.ones(4, 3, device=device, dtype=dtype))
            for tensor in (parameter, parameter.detach().t().requires_grad_()):
                communicator.all_reduce(tensor, op, prescale=2.0).wait()
                assert tensor.is_leaf
                assert tensor.requires_grad


def average_divides(communicator: Communicator, device: str):
    """The sum is exact here, so the average must be the quotient, correctly rounded."""
    for dtype in FLOATS:
        tensor = torch.arange(1, 40, dtype=dtype, device=device)
        communicator.all_reduce(tensor, ReduceOp.AVERAGE, postscale=1.0).wait()
        assert torch.equal(tensor, torch.arange(1, 40, dtype=dtype, device=device))
        tensor = torch.arange(39, dtype=dtype, device=device) + communicator.rank
        communicator.all_reduce(tensor, ReduceOp.AVERAGE).wait()
        total = torch.arange(39, dtype=torch.float64) * communicator.size + sum(
            range(communicator.size)
        )
        expected = (total / communicator.size).to(dtype)
        assert torch.equal(tensor.cpu(), expected), (dtype, tensor, expected)


def halves_are_rounded_once(communicator: Communicator, device: str):
    """2048 + 1 + 1 is 2050 in float16, but 2048 if each sum is rounded."""
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        value = big if communicator.rank == 0 else 1.0
        tensor = torch.full((5,), value, dtype=dtype, device=device)
        communicator.all_reduce(tensor).wait()
        exact = torch.tensor(big + communicator.size - 1, dtype=torch.float64)
        assert torch.equal(tensor.cpu(), exact.to(dtype).expand(5))


def float16_averages_do_not_overflow(communicator: Communicator, device: str):
    tensor = torch.full((3,), 60000.0, dtype=torch.float16, device=device)
    communicator.all_reduce(tensor, ReduceOp.AVERAGE).wait()
    assert tensor.tolist() == [60000.0 // 32 * 32] * 3


def integers_average_toward_zero(communicator: Communicator, device: str):
    """The values of the Horovod contract, and the largest, which must not overflow."""
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        if dtype not in (torch.int64, torch.uint64):
            tensor = torch.full((2,), int(info.max), dtype=torch.int64)
            tensor = tensor.to(dtype).to(device)
            communicator.all_reduce(tensor, ReduceOp.AVERAGE).wait()
            assert tensor.tolist() == [int(info.max)] * 2
        if info.min < 0:
            value = -3 if communicator.rank == 0 else -4
            tensor = torch.full((2,), value, dtype=dtype, device=device)
            communicator.all_reduce(tensor, ReduceOp.AVERAGE).wait()
            total = -3 - 4 * (communicator.size - 1)
            assert tensor.tolist() == [-(-total // communicator.size)] * 2
    halves = torch.full((2,), 7, dtype=torch.int32, device=device)
    communicator.all_reduce(halves, prescale=0.5).wait()
    assert halves.tolist() == [3 * communicator.size] * 2


def reductions_agree_bit_for_bit(communicator: Communicator, device: str):
    for dtype in FLOATS:
        tensor = sample((1001,), dtype, communicator.rank, device=device)
        communicator.all_reduce(tensor, ReduceOp.AVERAGE).wait()
        everyone = communicator.all_gather(tensor.unsqueeze(0)).wait()
        assert torch.equal(everyone, tensor.expand_as(everyone))


def reduce_scatter_keeps_own_rows(communicator: Communicator, device: str):
    size, rank = communicator.size, communicator.rank
    kinds = dtypes_and_ops([*FLOATS, *INTEGERS, torch.bool, *COMPLEX])
    for (seed, dtype, op), num_rows in cases(size, kinds, (0, 1, size, 2 * size + 1)):
        inputs = inputs_of(communicator, (num_rows, 3), dtype, seed, device)
        given = inputs[rank].clone()
        result = communicator.reduce_scatter(given, op).wait()
        assert torch.equal(given.view(torch.uint8), inputs[rank].view(torch.uint8))
        counts = rows(num_rows, size)
        assert result.shape == (counts[rank], 3)
        first = sum(counts[:rank])
        own = [t[first : first + counts[rank]] for t in inputs]
        assert_reduced(result, own, op)


def reduce_scatter_scales_and_takes_layouts(communicator: Communicator, device: str):
    rank = communicator.rank
    for seed, dtype in enumerate([torch.float32, torch.float16, torch.int32]):
        inputs = inputs_of(communicator, (5, 3, 4, 2), dtype, seed, device)
        first = sum(rows(5, communicator.size)[:rank])
        for tensor in layouts(inputs[rank]).values():
            before = tensor.clone()
            result = communicator.reduce_scatter(
                tensor, ReduceOp.AVERAGE, prescale=0.5, postscale=3.0
            ).wait()
            assert torch.equal(tensor, before)
            own = [t[first : first + result.shape[0]] for t in inputs]
            assert_reduced(result, own, ReduceOp.AVERAGE, 0.5, 3.0)


def reduce_scatter_into_a_place(communicator: Communicator, device: str):
    """``out`` may be a new tensor, or this rank's rows of the input."""
    size, rank = communicator.size, communicator.rank
    for seed, dtype in enumerate([*FLOATS, torch.int16, torch.bool, torch.complex64]):
        op = ReduceOp.PRODUCT if dtype is torch.bool else ReduceOp.SUM
        for num_rows in (0, 1, 2 * size + 1):
            inputs = inputs_of(communicator, (num_rows, 3), dtype, seed, device)
            counts = rows(num_rows, size)
            first = sum(counts[:rank])
            own = [t[first : first + counts[rank]] for t in inputs]
            given = inputs[rank].clone()
            out = torch.zeros_like(own[rank])
            for place in (out, given[first : first + counts[rank]]):
                assert communicator.reduce_scatter(given, op, out=place).wait() is place
                assert_reduced(place, own, op)


def undefined_reductions_are_refused(communicator: Communicator, device: str):
    """Every rank raises, and the communicator stays usable."""
    for reduce in (communicator.all_reduce, communicator.reduce_scatter):
        flags = torch.ones(communicator.size, dtype=torch.bool, device=device)
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            with pytest.raises(UsageError, match="min, max or product"):
                reduce(flags, op)
        with pytest.raises(UsageError, match="prescale and postscale must be 1"):
            reduce(flags, ReduceOp.MAX, prescale=2.0)
        for dtype in COMPLEX:
            with pytest.raises(UsageError, match="no order"):
                reduce(torch.ones(2, dtype=dtype, device=device), ReduceOp.MIN)
        for dtype in MOVED_ONLY:
            with pytest.raises(UsageError, match="dtype must be"):
                reduce(torch.ones(2, device=device).to(dtype))
    with pytest.raises(UsageError, match="at least one dimension"):
        communicator.reduce_scatter(torch.tensor(1.0, device=device))
    ones = torch.ones(3, device=device)
    assert communicator.all_reduce(ones).wait().tolist() == [communicator.size] * 3


REDUCTIONS = checks_in(globals())
