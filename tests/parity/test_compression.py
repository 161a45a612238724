"""Results of compressed gradients, which are bitwise equal on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tests.ranks import run_ranks, run_ranks_bare
from torch import Tensor, nn

import ronde.torch as hvd
from ronde.collectives import Communicator, SoloEngine
from ronde.data_parallel import (
    BucketLimits,
    Compression,
    Compressor,
    Reducer,
    ReducerGroup,
    ReducerOptions,
)
from ronde.errors import UsageError

SHAPES = [(24, 40), (7,), (40, 24), (12, 6, 3, 3), (), (33, 17)]


@dataclass
class Parameters:
    """Parameters whose gradients are chosen, and what became of them."""

    values: list[nn.Parameter]
    reducer: Reducer
    totals: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = [torch.zeros_like(value) for value in self.values]

    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        """Have backward make ``gradients``, and add up what comes out."""
        for value in self.values:
            value.grad = None
        pairs = list(zip(self.values, gradients, strict=True))
        terms = [(value * g).sum() for value, g in pairs if g is not None]
        if terms:
            torch.stack(terms).sum().backward()
        self.reducer.synchronize()
        self.reducer.step_done()
        for value, total in zip(self.values, self.totals, strict=True):
            if value.grad is not None:
                total.add_(value.grad)


def make(
    communicator: Communicator,
    compression: type[Compressor],
) -> Parameters:
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    values = [nn.Parameter(zero) for zero in zeros]
    named = [(f"p{i}", value) for i, value in enumerate(values)]
    limits = BucketLimits(4096, 16384)
    settings = ReducerOptions(compressor=compression, limits=limits)
    own = communicator.duplicate() if communicator.size > 1 else communicator
    return Parameters(values, Reducer(named, ReducerGroup(own), settings))


def gradients(parameters: Parameters, rank: int, number: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + number)
    return [
        torch.randn(v.shape, generator=random, dtype=torch.float64).to(v.dtype)
        for v in parameters.values
    ]


def assert_same_bits(results: Sequence[Sequence[Tensor]]) -> None:
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("compression", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_casts_round_and_no_more(compression, dtype):
    def check(communicator):
        parameters = make(communicator, getattr(Compression, compression))
        parameters.reduce(gradients(parameters, communicator.rank, 0))
        return parameters.totals

    results = run_ranks(3, check)
    assert_same_bits(results)
    solo = make(Communicator(SoloEngine()), Compression.none)
    everyone = [gradients(solo, rank, 0) for rank in range(3)]
    for index, total in enumerate(results[0]):
        expected = torch.stack([own[index] for own in everyone]).mean(0)
        # Once on the way in and once on the way out, on values below 8.
        limit = 2 * 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(total, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("compression", [Compression, "fp16"])
def test_what_is_no_compression_is_refused(compression):
    with pytest.raises(UsageError, match="compression must be"):
        make(Communicator(SoloEngine()), compression)


class Large:
    """Sends what is large alone."""

    @staticmethod
    def compress(tensor):
        return tensor * (tensor.abs() > 50), None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class Hundreds:
    """Sends whole hundreds, as integers."""

    @staticmethod
    def compress(tensor):
        return (tensor / 100).round().long(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx) * 100


def train_lossily(info, compression, predivide):
    """Rank 1 never uses ``some``, and stops first; nobody uses ``none``."""
    hvd.init()
    names = ("all", "some", "none")
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in names}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0),
        named_parameters=list(parameters.items()),
        compression=compression,
        gradient_predivide_factor=predivide,
    )
    seen = []
    for _ in range(1 if info.rank else 3):
        optimizer.zero_grad()
        loss = 600 * parameters["all"].sum()
        if info.rank == 0:
            loss = loss + 400 * parameters["some"].sum()
        loss.backward()
        gradients = [parameter.grad for parameter in parameters.values()]
        seen.append([None if grad is None else grad.tolist() for grad in gradients])
        optimizer.step()
    last = hvd.join()
    hvd.shutdown()
    return seen, last


@pytest.mark.parametrize("predivide", [1.0, 2.0])
@pytest.mark.parametrize("compression", [Large, Hundreds])
def test_what_ranks_tell_each_other_is_not_compressed(compression, predivide):
    told = run_ranks_bare(2, train_lossily, compression, predivide)
    both, alone = [[[600.0] * 3, [200.0] * 3, None], [[300.0] * 3, [200.0] * 3, None]]
    assert told == [([both, alone, alone], 0), ([both], 0)]
