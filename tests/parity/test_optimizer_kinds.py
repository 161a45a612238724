"""Sparse gradients, process sets, groups, Adasum and recorded buckets."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from tests.parity.problems import OddMlp, assert_close, mse
from tests.parity.sessions import named, run_cases, run_sessions
from tests.parity.test_adasum import oracle
from torch import nn

import ronde.torch as hvd
from ronde.session import current_session
from ronde.timeline import Recorded
from ronde.torch.optimizer import group_indices


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Tables(nn.Module):
    """Two sparse embeddings of which a rank may use one, both or none; no dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(7, 3, sparse=True)
        self.two = nn.Embedding(5, 2, sparse=True)

    def loss(self, rank, step, passing=0):
        """Use one of them on some ranks only; on rank 1 neither in even steps."""
        rows = torch.tensor([rank, (step + passing) % 7, rank])
        parts = [torch.zeros(1, dtype=torch.float64, requires_grad=True).sum()]
        if rank % 2 == 0 or step % 2:
            parts.append((self.one(rows) * (rank + 1.0)).square().sum())
        if (step + passing) % 2 == 0 and rank != 1:
            parts.append(self.two(rows % 5).square().sum())
        return sum(parts)


def tables():
    torch.manual_seed(0)
    return Tables().double()


MAKERS = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.SparseAdam(list(model.parameters()), lr=0.1),
}


SPARSE = {
    f"{maker}, {word}, {'dense' if is_dense else 'sparse'}": (maker, op, is_dense)
    for maker in MAKERS
    for word, op in (("average", hvd.Average), ("sum", hvd.Sum))
    for is_dense in (False, True)
}


def train_tables(maker, op, is_dense):
    model = tables()
    optimizer = hvd.DistributedOptimizer(
        MAKERS[maker](model),
        model.named_parameters(),
        op=op,
        sparse_as_dense=is_dense,
    )
    for number in range(6):
        optimizer.zero_grad()
        for passing in range(1 + number % 2):  # a second pass adds to a result
            model.loss(hvd.rank(), number, passing).backward()
        grads = [p.grad for p in model.parameters()]
        assert all(grad is None or grad.is_sparse for grad in grads)
        optimizer.step()
    return weights(model)


def train_tables_alone(maker, op, size):
    model = tables()
    optimizer = MAKERS[maker](model)
    for number in range(6):
        optimizer.zero_grad()
        for passing in range(1 + number % 2):
            for rank in range(size):
                loss = model.loss(rank, number, passing)
                (loss / size if op == hvd.Average else loss).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    ("size", "names"),
    [(3, list(SPARSE)), (2, ["sgd, average, sparse"])],
)
def test_sparse_gradients(size, names):
    cases = {name: partial(train_tables, *SPARSE[name]) for name in names}
    for name, results in run_cases(size, cases).items():
        maker, op, _ = SPARSE[name]
        with named(name):
            for result in results:
                assert_close(result, train_tables_alone(maker, op, size), num_steps=12)
                assert_close(result, results[0], num_steps=0)


def test_an_embedding_that_nobody_used_at_first_becomes_sparse():
    def check():
        model = tables()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for number in (1, 1, 2):
            optimizer.zero_grad()
            model.loss(hvd.rank(), number).backward()
            optimizer.step()
        return model.two.weight.grad.is_sparse, weights(model)

    (first, mine), (second, theirs) = run_sessions(2, check)
    assert first
    assert second
    assert_close(mine, theirs, num_steps=0)


def test_process_sets():
    def check():
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
        torch.manual_seed(hvd.rank())
        models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
        for model, process_set in zip(models, (even, odd), strict=True):
            model.weight.data.zero_()
            optimizer = hvd.DistributedOptimizer(sgd(model), process_set=process_set)
            model(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
            optimizer.synchronize()
            optimizer.step()
        return [model.weight[0, 0].item() for model in models]

    with warnings.catch_warnings():
        results = run_sessions(3, _quietly(check))
    # The mean of 1 and 3; each rank's own where it is not part of the set.
    expected = [[-0.2, -0.1], [-0.2, -0.2], [-0.2, -0.3]]
    np.testing.assert_allclose(results, expected, rtol=1e-6)


def _quietly(fn):
    def call():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = fn()
        assert [w.category for w in caught] == [UserWarning] * 2
        return result

    return call


def test_step_after_synchronize_warns_once():
    def check():
        model = OddMlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for use in ("skipped", "plain", "twice"):
            mse(model, torch.ones(2, 7), torch.ones(2, 3)).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if use != "plain":
                    optimizer.synchronize()
                if use == "skipped":
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
            text = "optimizer.step() called without optimizer.skip_synchronize()"
            texts = [str(w.message) for w in caught]
            assert [t.startswith(text) for t in texts] == [True] * (use == "twice")
            assert all(w.filename == __file__ for w in caught)
            optimizer.zero_grad()
        assert optimizer._handles == {}
        assert len(set(optimizer._parameter_names.values())) == 6

    run_sessions(2, check)


def test_groups_split_what_is_trained():
    layers = [nn.Linear(1, 1, bias=False) for _ in range(8)]
    layers[2].requires_grad_(False)
    named = [(str(i), layer.weight) for i, layer in enumerate(layers)]
    assert group_indices(named, 3) == ((0, 1, 3), (4, 5), (6, 7))
    others = [layers[2].weight, torch.zeros(1), layers[7].weight, layers[0].weight]
    assert group_indices(named, [others, []]) == ((7, 0), ())
    with pytest.warns(DeprecationWarning, match="num_groups"):
        assert group_indices(named, None, 1) == ((0, 1, 3, 4, 5, 6, 7),)


def train_deltas(passes):
    torch.manual_seed(0)
    model = OddMlp().double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        backward_passes_per_step=passes,
        op=hvd.Adasum,
    )
    for number in range(4):
        optimizer.zero_grad()
        for passing in range(passes):
            mse(model, *sample(hvd.rank(), 10 * number + passing)).backward()
        optimizer.step()
    return weights(model)


def sample(rank, number):
    generator = torch.Generator().manual_seed(100 * rank + number)
    inputs = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(4, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("size", "passes"), [(1, 1), (2, 2), (4, 1)])
def test_adasum_combines_the_ranks_steps(size, passes):
    results = run_sessions(size, train_deltas, passes)
    torch.manual_seed(0)
    model = OddMlp().double()
    models = [copy.deepcopy(model) for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for number in range(4):
        starts = [p.detach().clone() for p in models[0].parameters()]
        for rank, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            for passing in range(passes):
                mse(models[rank], *sample(rank, 10 * number + passing)).backward()
            optimizer.step()
        for start, *ends in zip(starts, *(m.parameters() for m in models), strict=True):
            deltas = [(end.data - start).flatten().numpy() for end in ends]
            together = start + torch.from_numpy(oracle(deltas)).view_as(start)
            for end in ends:
                end.data.copy_(together)
    for result in results:
        assert_close(result, weights(models[0]), num_steps=8)
        assert_close(result, results[0], num_steps=0)


def test_adasum_has_nothing_to_synchronize():
    def check():
        optimizer = hvd.DistributedOptimizer(sgd(OddMlp()), op=hvd.Adasum)
        optimizer.synchronize()
        refused = pytest.raises(AssertionError, match="Skipping synchronization is not")
        with refused, optimizer.skip_synchronize():
            pass

    run_sessions(2, check)


def test_adasum_is_kept_up_with():
    def check():
        torch.manual_seed(0)
        model = OddMlp().double()
        optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
        for number in range(3 * hvd.rank()):
            optimizer.zero_grad()
            mse(model, *sample(hvd.rank(), number)).backward()
            optimizer.step()
        return hvd.join(), weights(model)

    results = run_sessions(2, check)
    assert [last for last, _ in results] == [1, 1]
    torch.manual_seed(0)
    model = OddMlp().double()
    optimizer = sgd(model)
    for number in range(3):
        optimizer.zero_grad()
        mse(model, *sample(1, number)).backward()
        optimizer.step()
    # Nobody else went anywhere: the delta is the last rank's own.
    assert_close(results[1][1], weights(model), num_steps=3)


class Notebook:
    """A recorder that keeps all operations."""

    def __init__(self) -> None:
        self.taken: list[Recorded] = []

    def operation(self, recorded: Recorded) -> None:
        self.taken.append(recorded)

    def cycle(self, at_ns: int) -> None:
        pass


def test_buckets_are_recorded():
    def check():
        notebook = Notebook()
        current_session().states[0].coordinator.execution.recorder = notebook
        model = OddMlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for _ in range(1 + hvd.rank()):
            optimizer.zero_grad()
            mse(model, torch.ones(2, 7), torch.ones(2, 3)).backward()
            optimizer.step()
        hvd.join()
        return [each for each in notebook.taken if each.agreed_ns == 0]

    mine, theirs = run_sessions(2, check)
    names = ["gradients.scale"] * 2
    assert [each.name for each in mine] == [each.name for each in theirs] == names
    assert [each.sequence for each in mine] == [each.sequence for each in theirs]
    assert [each.submitted_ns > 0 for each in mine] == [True, False]  # it had joined
    for each in theirs:
        assert each.kind == "ALLREDUCE"
        assert each.num_fused == 6
        assert 0 < each.submitted_ns <= each.begun_ns <= each.ended_ns


def test_an_optimizer_outlives_its_session():
    """As in elastic training: all ranks start anew and go on with what they have."""

    def check():
        torch.manual_seed(0)
        model, unused = OddMlp().double(), OddMlp().double()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        others = [hvd.DistributedOptimizer(sgd(unused)) for _ in range(2)]
        for number in range(6):
            if number in (2, 4):
                hvd.shutdown()
                hvd.init()
                hvd.DistributedOptimizer(sgd(unused))
            optimizer.zero_grad()
            mse(model, *sample(hvd.rank(), number)).backward()
            optimizer.step()
            others[number % 2].step()
        return weights(model)

    results = run_sessions(2, check)
    torch.manual_seed(0)
    model = OddMlp().double()
    optimizer = sgd(model)
    for number in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            (mse(model, *sample(rank, number)) / 2).backward()
        optimizer.step()
    for result in results:
        assert_close(result, weights(model), num_steps=6)
