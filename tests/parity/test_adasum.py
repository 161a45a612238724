"""Adasum on ranks against its formula in NumPy, carried out by one process."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks

from ronde.collectives import CHUNK, Communicator, SoloEngine, adasum_all_reduce
from ronde.errors import UsageError

LENGTHS = (1, 3, 0, 64, 5, 3 * CHUNK + 7)  # halved, a part is longer than a chunk
NUMEL = sum(LENGTHS)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def oracle(vectors):
    """Combine float64 vectors pairwise, neighbours first."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [combined(a, b) for a, b in pairs]
    return vectors[0]


def combined(a, b):
    tiny = np.sqrt(sys.float_info.min)
    of_a = 1 - a @ b / (a @ a) / 2 if a @ a >= tiny else 1
    of_b = 1 - a @ b / (b @ b) / 2 if b @ b >= tiny else 1
    return of_a * a + of_b * b


def sample(rank, dtype, numel=NUMEL):
    generator = torch.Generator().manual_seed(rank)
    shared = torch.randn(numel, generator=torch.Generator().manual_seed(99))
    own = torch.randn(numel, generator=generator)
    return (shared + own).to(dtype)


def combine_samples(communicator):
    return {
        (dtype, lengths): adasum_all_reduce(
            communicator, sample(communicator.rank, dtype), lengths
        )
        for dtype in DTYPES
        for lengths in ((), LENGTHS)
    }


@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_follows_the_formula(size):
    results = run_ranks(size, combine_samples)
    for (dtype, lengths), result in results[0].items():
        for other in results[1:]:
            assert torch.equal(other[dtype, lengths], result)
        bounds = np.cumsum([0, *(lengths or (NUMEL,))])
        samples = [sample(rank, dtype).double().numpy() for rank in range(size)]
        for start, stop in pairwise(bounds):
            # Each level rounds to the dtype once, and sums the products of two vectors
            # in float64 in an order of its own, as the formula here does.
            summing = 2 * (stop - start) * torch.finfo(torch.float64).eps
            limit = size.bit_length() * (torch.finfo(dtype).eps + summing)
            expected = oracle([vector[start:stop] for vector in samples])
            error = result[start:stop].double().numpy() - expected
            scale = max(1.0, np.abs(expected).max(initial=0))
            assert np.abs(error).max(initial=0) <= limit * scale


def combine_extremes(communicator):
    rank = communicator.rank
    zero = torch.zeros(7) if rank else torch.arange(7.0)
    orthogonal = torch.zeros(4)
    orthogonal[rank] = 1.0
    parallel = torch.full((3, 2), 2.0).t()
    huge = torch.full((9,), 1e-19 if rank else 1e19)
    tiny = torch.full((9,), 1e-40)
    return [
        adasum_all_reduce(communicator, t)
        for t in (zero, orthogonal, parallel, huge, tiny)
    ]


def test_zero_orthogonal_parallel_and_extreme():
    for zero, orthogonal, parallel, huge, tiny in run_ranks(2, combine_extremes):
        assert torch.equal(zero, torch.arange(7.0))
        assert torch.equal(orthogonal, torch.tensor([1.0, 1.0, 0.0, 0.0]))
        assert torch.equal(parallel, torch.full((2, 3), 2.0))
        assert parallel.stride() == (1, 2)  # in place, in its own layout
        # Parallel, however long: half of each.
        torch.testing.assert_close(huge, torch.full((9,), 5e18))
        torch.testing.assert_close(tiny, torch.full((9,), 1e-40), rtol=1e-4, atol=0.0)


def combine_few(communicator):
    rank = communicator.rank
    return [
        adasum_all_reduce(communicator, sample(rank, torch.float64, n))
        for n in range(4)
    ]


def test_fewer_elements_than_ranks():
    results = run_ranks(4, combine_few)
    for numel in range(4):
        samples = [sample(r, torch.float64, numel).numpy() for r in range(4)]
        for result in results:
            np.testing.assert_allclose(result[numel], oracle(samples), rtol=1e-13)


@pytest.mark.parametrize(
    ("tensor", "lengths", "message"),
    [
        (torch.ones(2, dtype=torch.int64), (), "floating-point dtype for Adasum"),
        (torch.ones(2), (1, 2), "lengths must add up"),
    ],
)
def test_what_cannot_be_is_refused(tensor, lengths, message):
    with pytest.raises(UsageError, match=message):
        adasum_all_reduce(Communicator(SoloEngine()), tensor, lengths)
