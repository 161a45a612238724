"""Parameters, optimizer state and objects become equal on all ranks."""

import threading
from typing import Any

import pytest
import torch
from tests.parity.sessions import message_of, run_cases
from torch import nn

import ronde.torch as hvd


def _parameters() -> None:
    root = hvd.size() - 1
    for form in (
        lambda m: m.state_dict(),
        lambda m: m.named_parameters(),
        lambda m: list(m.named_parameters()),
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
    ):
        torch.manual_seed(hvd.rank())
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        hvd.broadcast_parameters(form(model), root_rank=root)
        torch.manual_seed(root)
        expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, b)
    hvd.broadcast_parameters({"a": torch.ones(1), "b": 3, "c": None}, 0)
    # Ranks need not give them in one order.
    names = ["x", "y", "z"][:: 1 if hvd.rank() % 2 else -1]
    tensors = {n: torch.full((2,), float(hvd.rank() * 10 + ord(n))) for n in names}
    hvd.broadcast_parameters(list(tensors.items()), 0)
    assert [tensors[n][0].item() for n in "xyz"] == [float(ord(n)) for n in "xyz"]
    message = message_of(ValueError, hvd.broadcast_parameters, 3, 0)
    assert message == "invalid params of type: <class 'int'>"


def _optimizer_state() -> None:
    rank = hvd.rank()
    makers: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1 * (rank + 1), betas=(0.5, 0.9)),
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1)),
    ]
    for maker in makers:
        for has_stepped in (lambda: True, lambda: rank == 0, lambda: rank != 0):
            torch.manual_seed(rank)
            model = nn.Linear(3, 2)
            optimizer = maker(model.parameters())
            if has_stepped():
                model(torch.rand(4, 3)).sum().backward()
                optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            states = hvd.allgather_object(optimizer.state_dict())
            for state in states[1:]:
                torch.testing.assert_close(state, states[0], rtol=0, atol=0)
            assert optimizer.param_groups[0]["lr"] == 0.1
    lbfgs = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    assert message_of(ValueError, hvd.broadcast_optimizer_state, lbfgs, 0) == (
        "cannot broadcast torch.optim.LBFGS state"
    )


def _objects() -> None:
    rank, last = hvd.rank(), hvd.size() - 1
    # Horovod hangs here: it names the call after the class of each rank's object.
    given = {"epoch": 3} if rank == last else None
    assert hvd.broadcast_object(given, last) == {"epoch": 3}
    assert hvd.broadcast_object(lambda: 5, 0, name="f")() == 5
    assert hvd.broadcast_object(None) is None
    big = b"x" * 3_000_000
    assert hvd.broadcast_object(big, 0, name="big") == big
    everything = hvd.allgather_object([rank] * rank, name="lists")
    assert everything == [[r] * r for r in range(hvd.size())]
    # By name, in any order.
    names = ["p", "q"][:: 1 if rank % 2 else -1]
    results = dict(zip(names, _both(names), strict=True))
    assert results == {"p": [r * 2 for r in range(hvd.size())], "q": [1] * hvd.size()}


def _both(names: list[str]) -> list[list[int]]:
    values = {"p": hvd.rank() * 2, "q": 1}
    results: dict[str, list[int]] = {}

    def gather(name: str) -> None:
        results[name] = hvd.allgather_object(values[name], name)

    threads = [threading.Thread(target=gather, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[name] for name in names]


def _unpicklable() -> None:
    error = TypeError if hvd.rank() == 0 else hvd.HorovodInternalError
    lock = threading.Lock()
    message_of(error, hvd.broadcast_object, lock if hvd.rank() == 0 else None)
    message_of(error, hvd.allgather_object, lock if hvd.rank() == 0 else None)
    assert hvd.allgather_object(1) == [1] * hvd.size()


@pytest.mark.parametrize("size", [1, 3])
def test_broadcasts(size):
    cases = {"parameters": _parameters, "objects": _objects}
    if size > 1:
        cases |= {"optimizer state": _optimizer_state, "unpicklable": _unpicklable}
    run_cases(size, cases)
