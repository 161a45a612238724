"""What compressed gradients come out as, on ranks that all must agree to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tests.parity.problems import CountingEngine
from tests.parity.sessions import named
from tests.ranks import run_ranks, run_ranks_bare
from torch import Tensor, nn

import ronde.torch as hvd
from ronde.collectives import Communicator, SoloEngine
from ronde.data_parallel import (
    BucketLimits,
    Compression,
    GradientCompression,
    Reducer,
    ReducerGroup,
    ReducerOptions,
)
from ronde.errors import UsageError

NUM_ROUNDS = 20
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

    def unsent(self) -> list[Tensor]:
        """Return what this rank has not sent yet, a tensor a parameter."""
        zeros = [torch.zeros_like(value) for value in self.values]
        for value, zero in zip(self.values, zeros, strict=True):
            error = self.reducer.rounds.unsent.get(value)
            if error is not None:
                # Laid out as the parameter is: the matrix is a view of its memory.
                zero.as_strided(error.shape, error.stride()).copy_(error)
        return zeros


def make(
    communicator: Communicator,
    compression: GradientCompression,
    *,
    dtype: torch.dtype = torch.float64,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    layout: Callable[[Tensor], Tensor] | None = None,
    **options,
) -> Parameters:
    zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    values = [nn.Parameter((layout or plain)(zero)) for zero in zeros]
    named = [(f"p{i}", value) for i, value in enumerate(values)]
    limits = BucketLimits(4096, 16384)
    settings = ReducerOptions(compressor=compression, limits=limits, **options)
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


def plain(tensor: Tensor) -> Tensor:
    return tensor


def channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.to(memory_format=torch.channels_last)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor


KEPT = {
    f"{word}, {layout.__name__}": (is_average, layout)
    for word, is_average in (("average", True), ("sum", False))
    for layout in (plain, channels_last, transposed)
}


def keep_all(communicator, is_average, layout):
    """Return all that came out, and all that is still to be sent."""
    parameters = make(
        communicator,
        Compression.powersgd(rank=2, min_saving=1.2),
        layout=layout,
        is_average=is_average,
    )
    for number in range(NUM_ROUNDS):
        parameters.reduce(gradients(parameters, communicator.rank, number))
    return parameters.totals, parameters.unsent()


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (3, list(KEPT)),
        (1, ["sum, plain"]),
        (2, ["sum, plain"]),
        (4, ["average, plain"]),
    ],
)
def test_powersgd_loses_nothing(size, names):
    """That is all that went in."""

    def check(communicator):
        return [keep_all(communicator, *KEPT[name]) for name in names]

    of_ranks = run_ranks(size, check)
    for name, results in zip(names, zip(*of_ranks, strict=True), strict=True):
        with named(name):
            assert_nothing_is_lost(results, is_average=KEPT[name][0])


def assert_nothing_is_lost(results, *, is_average):
    size = len(results)
    assert_same_bits([totals for totals, _ in results])
    assert any(bool(error.any()) for error in results[0][1])
    solo = make(Communicator(SoloEngine()), Compression.none)
    for index, total in enumerate(results[0][0]):
        errors = torch.stack([unsent[index] for _, unsent in results]).sum(0)
        sums = torch.zeros_like(total)
        for rank in range(size):
            for number in range(NUM_ROUNDS):
                sums += gradients(solo, rank, number)[index]
        expected = sums / size if is_average else sums
        # A round rounds every element some tens of times, on values below 8 a rank.
        limit = 64 * NUM_ROUNDS * 8 * size * torch.finfo(torch.float64).eps
        torch.testing.assert_close(total + errors, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_powersgd_keeps_its_memory_in_float32(dtype):
    def check(communicator):
        compression = Compression.powersgd(rank=2)
        shapes = [(40, 60), (60,)]
        parameters = make(communicator, compression, dtype=dtype, shapes=shapes)
        total = torch.zeros(40, 60)
        for number in range(NUM_ROUNDS):
            own = gradients(parameters, communicator.rank, number)
            parameters.reduce(own)
            total += parameters.values[0].grad.float()
        (error,) = parameters.reducer.rounds.unsent.values()
        return total, error

    results = run_ranks(2, check)
    errors = results[0][1] + results[1][1]
    assert errors.dtype == torch.float32
    solo = make(
        Communicator(SoloEngine()), Compression.none, dtype=dtype, shapes=[(40, 60)]
    )
    expected = torch.zeros(40, 60)
    for rank in range(2):
        for number in range(NUM_ROUNDS):
            expected += gradients(solo, rank, number)[0].float() / 2
    # What goes in and what comes out is rounded to dtype once each, below 8 in size.
    limit = 2 * NUM_ROUNDS * 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(results[0][0] + errors, expected, rtol=0, atol=limit)


def test_powersgd_is_exact_where_the_gradient_has_that_rank():
    """A linear layer's gradient has at most the rank of the whole batch."""

    def check(communicator, compression):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20)).double()
        reducer = Reducer(
            list(model.named_parameters()),
            ReducerGroup(communicator.duplicate()),
            ReducerOptions(compressor=compression),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        random = torch.Generator().manual_seed(communicator.rank)
        inputs = torch.randn(1, 30, generator=random, dtype=torch.float64)
        for _ in range(NUM_ROUNDS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            reducer.step_done()
        return [p.detach() for p in model.parameters()]

    exact = run_ranks(3, check, Compression.none)
    compression = Compression.powersgd(rank=3, min_saving=1.0)
    approximate = run_ranks(3, check, compression)
    assert_same_bits(approximate)
    # Half of the digits: the factors may be that much worse conditioned than 1.
    limit = torch.finfo(torch.float64).eps ** 0.5
    for mine, theirs in zip(approximate[0], exact[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=limit)


def test_powersgd_sends_two_small_collectives_a_bucket():
    engine = CountingEngine()
    options = {"dtype": torch.float32, "shapes": [(100, 200), (200,)]}
    parameters = make(Communicator(engine), Compression.powersgd(rank=2), **options)
    for number in range(2):
        engine.reduced_bytes.clear()
        parameters.reduce(gradients(parameters, 0, number))
    # P with the vector, padded to 64 bytes, two flags and 38 of control; then Q.
    assert engine.reduced_bytes == [4 * (2 * 100 + 208 + 40), 4 * 2 * 200]


def test_plain_rounds_come_first_and_are_exact():
    def check(communicator, compression):
        parameters = make(communicator, compression)
        results = []
        for number in range(6):
            parameters.reduce(gradients(parameters, communicator.rank, number))
            results.append([value.grad.clone() for value in parameters.values])
        return results

    exact = run_ranks(2, check, Compression.none)[0]
    plain = run_ranks(2, check, Compression.powersgd(rank=1, num_plain_rounds=4))[0]
    equal = [
        all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(plain, exact, strict=True)
    ]
    assert equal == [True] * 4 + [False] * 2


def test_infinite_gradients_are_seen_and_do_not_last():
    """As GradScaler makes them: on one rank, in a step that is skipped then."""

    def check(communicator):
        parameters = make(communicator, Compression.powersgd(rank=2))
        for number in range(6):
            own = gradients(parameters, communicator.rank, number)
            if number == 3 and communicator.rank == 1:
                own[0][3, 5] = float("inf")
            parameters.reduce(own)
            is_finite = bool(parameters.values[0].grad.isfinite().all())
            assert is_finite == (number != 3)
        return all(bool(error.isfinite().all()) for error in parameters.unsent())

    assert all(run_ranks(2, check))


def test_ranks_without_a_gradient_send_zeros_and_keep_what_they_owe():
    def check(communicator):
        parameters = make(communicator, Compression.powersgd(rank=2))
        everything = gradients(parameters, communicator.rank, 0)
        parameters.reduce(everything)
        before = parameters.unsent()
        lacking = [None, *everything[1:]] if communicator.rank == 0 else everything
        parameters.reduce(lacking)
        after = parameters.unsent()
        is_kept = torch.equal(before[0], after[0])
        assert is_kept == (communicator.rank == 0)
        parameters.reduce([None, *everything[1:]])  # nobody has it
        assert parameters.values[0].grad is None
        assert torch.equal(after[0], parameters.unsent()[0])
        parameters.reduce(everything)
        return parameters.totals

    assert_same_bits(run_ranks(3, check))


@pytest.mark.parametrize("groups", [(), ((0, 3), (2, 5))])
def test_powersgd_with_several_passes_groups_and_reducers(groups):
    def check(communicator):
        pair = [
            make(communicator, Compression.powersgd(rank=r), passes=2, groups=groups)
            for r in (1, 3)
        ]
        for number in range(6):
            for parameters in pair:
                for value in parameters.values:
                    value.grad = None
                for half in range(2):
                    own = gradients(parameters, communicator.rank, 2 * number + half)
                    terms = zip(parameters.values, own, strict=True)
                    torch.stack([(v * g).sum() for v, g in terms]).sum().backward()
                parameters.reducer.step_done()
        return [value.grad for parameters in pair for value in parameters.values]

    assert_same_bits(run_ranks(2, check))


@pytest.mark.parametrize("num_plain_rounds", [0, 5])
def test_powersgd_loses_nothing_when_ranks_join(num_plain_rounds):
    """Those without data add zeros, and keep what they owe."""
    num_rounds = (4, 9, 6)

    def check(communicator):
        compression = Compression.powersgd(
            rank=2, min_saving=1.2, num_plain_rounds=num_plain_rounds
        )
        parameters = make(communicator, compression, is_average=False)
        for number in range(num_rounds[communicator.rank]):
            parameters.reduce(gradients(parameters, communicator.rank, number))
        parameters.reducer.participate_with_zeros()
        return parameters.totals, parameters.unsent()

    results = run_ranks(3, check)
    solo = make(Communicator(SoloEngine()), Compression.none)
    for index, total in enumerate(results[1][0]):
        errors = sum(unsent[index] for _, unsent in results)
        expected = torch.zeros_like(total)
        for rank in range(3):
            for number in range(num_rounds[rank]):
                expected += gradients(solo, rank, number)[index]
        limit = 64 * max(num_rounds) * 8 * 3 * torch.finfo(torch.float64).eps
        torch.testing.assert_close(total + errors, expected, rtol=0, atol=limit)


def test_powersgd_in_an_optimizer_of_a_process_set():
    def check(_):
        pair = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compression=hvd.Compression.powersgd(rank=2),
            process_set=pair,
        )
        for number in range(5):
            random = torch.Generator().manual_seed(10 * number + hvd.rank())
            optimizer.zero_grad()
            model(torch.randn(8, 30, generator=random)).square().mean().backward()
            optimizer.step()
        hvd.shutdown()
        return [p.detach() for p in model.parameters()]

    first, outsider, second = run_ranks_bare(3, check)
    assert_same_bits([first, second])
    assert not torch.equal(first[0], outsider[0])


def test_one_call_cannot_be_compressed_by_powersgd():
    def check(_):
        hvd.init()
        with pytest.raises(UsageError, match="Give it to DistributedOptimizer"):
            hvd.allreduce(torch.ones(4, 4), compression=hvd.Compression.powersgd())

    run_ranks_bare(1, check)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"num_plain_rounds": -1}, "num_plain_rounds must be >= 0, got -1"),
        ({"min_saving": 0.5}, "min_saving must be a finite number >= 1, got 0.5"),
        ({"min_saving": float("nan")}, "min_saving must be a finite number >= 1"),
    ],
)
def test_powersgd_refuses(options, message):
    with pytest.raises(UsageError, match=message):
        Compression.powersgd(**options)


def test_powersgd_is_for_optimizers():
    with pytest.raises(UsageError, match="Give it to DistributedOptimizer"):
        Compression.powersgd().compress(torch.ones(3, 4))


@pytest.mark.parametrize("compression", [Compression, Compression.powersgd, "fp16"])
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
