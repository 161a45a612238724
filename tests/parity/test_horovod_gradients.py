"""Gradients flow through every collective as Horovod defines them."""

import pytest
import torch
from tests.parity.sessions import run_cases
from torch import Tensor

import ronde.torch as hvd


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64).requires_grad_()


def gradient_of(result: Tensor, at: Tensor, seed: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((result * seed).sum(), at)
    return gradient


def _gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    seeds = [torch.arange(5.0, dtype=torch.float64) + 10 * r for r in range(size)]
    total, mean = sum(seeds), sum(seeds) / size  # type: ignore[operator]
    for name in (None, "named"):
        x = leaf(5)
        for op, expected in ((hvd.Sum, total), (hvd.Average, mean)):
            result = hvd.allreduce(x, op=op, name=name)
            torch.testing.assert_close(gradient_of(result, x, seeds[rank]), expected)
        result = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        torch.testing.assert_close(gradient_of(result, x, seeds[rank]), 1.5 * total)
        for root in range(size):
            result = hvd.broadcast(x, root, name=name)
            expected = mean if rank == root else torch.zeros(5, dtype=torch.float64)
            torch.testing.assert_close(gradient_of(result, x, seeds[rank]), expected)
    _gather_gradients()
    _alltoall_gradients()
    _scatter_gradients()


def _gather_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    lengths = [r + 1 for r in range(size)]
    start = sum(lengths[:rank])
    weights = torch.arange(float(sum(lengths)), dtype=torch.float64)
    # Seeds differ from rank to rank; what comes back is the average of them.
    mean = weights + 100 * sum(range(size)) / size
    own = slice(start, start + lengths[rank])
    for call in (
        lambda x: hvd.allgather(x, name="g"),
        lambda x: hvd.grouped_allgather([leaf(2), x], name="g")[1],
    ):
        x = leaf(lengths[rank])
        gradient = gradient_of(call(x), x, weights + 100 * rank)
        torch.testing.assert_close(gradient, mean[own])


def _alltoall_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = leaf(2 * size)
    result = hvd.alltoall(x)
    assert isinstance(result, Tensor)
    seed = torch.full((2 * size,), float(rank), dtype=torch.float64)
    expected = [float(r) for r in range(size) for _ in range(2)]
    assert gradient_of(result, x, seed).tolist() == expected
    splits = [rank + to for to in range(size)]
    x = leaf(sum(splits) + 1)
    received, counts = hvd.alltoall(x, splits, name="a")
    assert not counts.requires_grad
    seed = torch.full(received.shape, float(rank), dtype=torch.float64)
    expected = [float(to) for to in range(size) for _ in range(rank + to)] + [0.0]
    assert gradient_of(received, x, seed).tolist() == expected


def _scatter_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    num_rows = 2 * size + 1
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        for call in (
            lambda x, op=op: hvd.reducescatter(x, op=op, prescale_factor=0.5),
            lambda x, op=op: hvd.grouped_reducescatter(
                [x, leaf(3)], op=op, prescale_factor=0.5
            )[0],
        ):
            x = leaf(num_rows)
            result = call(x)
            seed = torch.full(result.shape, float(rank), dtype=torch.float64)
            lengths = [3 if r == 0 else 2 for r in range(size)]
            expected = [
                0.5 * factor * r for r in range(size) for _ in range(lengths[r])
            ]
            assert gradient_of(result, x, seed).tolist() == expected


def _groups() -> None:
    size = hvd.size()
    x, y = leaf(3), leaf(2, 2)
    first, second = hvd.grouped_allreduce([x, y], op=hvd.Sum, name="group")
    # Only one of them takes part in the loss; the other's gradient is zero.
    grads = torch.autograd.grad(second.sum(), [x, y])
    assert grads[0].tolist() == [0.0] * 3
    assert grads[1].tolist() == [[float(size)] * 2] * 2
    assert first.requires_grad
    # Gradients of gradients: d2 (sum over ranks x)^3 / dx2 = 6 s (sum x) size^2.
    x = leaf(4)
    total = hvd.allreduce(x, op=hvd.Sum)
    (gradient,) = torch.autograd.grad(total.pow(3).sum(), x, create_graph=True)
    assert gradient.tolist() == [3.0 * size**3] * 4
    (second_gradient,) = torch.autograd.grad(gradient.sum(), x)
    assert second_gradient.tolist() == [6.0 * size**3] * 4
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad


def _compressed() -> None:
    x = torch.ones(4).requires_grad_()
    result = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert gradient_of(result, x, torch.ones(4)).tolist() == [1.0 * hvd.size()] * 4


@pytest.mark.parametrize("size", [1, 3])
def test_gradients(size):
    cases = {"all": _gradients, "groups": _groups, "compressed": _compressed}
    run_cases(size, cases)
