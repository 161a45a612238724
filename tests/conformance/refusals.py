"""Errors after which every engine stays usable; each function runs on every rank."""

import pytest
import torch
from tests.conformance.samples import checks_in
from tests.resources import num_frames

from ronde.collectives import Communicator
from ronde.errors import CollectiveError, UsageError


def assert_works(communicator: Communicator, device: str) -> None:
    ones = torch.ones(3, device=device)
    assert communicator.all_reduce(ones).wait().tolist() == [communicator.size] * 3


def roots_outside_are_refused(communicator: Communicator, device: str):
    last = communicator.size - 1
    for root in (-1, communicator.size):
        with pytest.raises(UsageError, match=f"root must be in 0..{last}, got {root}"):
            communicator.broadcast(torch.ones(1, device=device), root)
    assert_works(communicator, device)


def long_messages_are_refused(communicator: Communicator, device: str):
    longest = bytes([communicator.rank]) * 512
    assert communicator.exchange(longest)[-1] == bytes([communicator.size - 1]) * 512
    with pytest.raises(UsageError, match="message must have at most 512 bytes, got 5"):
        communicator.exchange(longest + b"1")
    assert_works(communicator, device)


def bad_splits_are_refused(communicator: Communicator, device: str):
    size = communicator.size
    tensor = torch.ones(2 * size + 1, device=device)
    for splits, reason in (
        ([1] * (size + 1), "entries, one per rank"),
        ([-1] + [1] * (size - 1), "must not be negative"),
        ([2 * size + 2] + [0] * (size - 1), "splits must add up to at most"),
    ):
        with pytest.raises(UsageError, match=reason):
            communicator.all_to_all(tensor, splits)
    if size > 1:
        with pytest.raises(UsageError, match=f"number of ranks, {size}"):
            communicator.all_to_all(tensor)
    assert_works(communicator, device)


def one_ranks_bad_splits_fail_everywhere(communicator: Communicator, device: str):
    if communicator.size == 1:
        return
    tensor = torch.ones(communicator.size, device=device)
    last = communicator.size - 1
    if communicator.rank == last:
        with pytest.raises(UsageError, match="must not be negative"):
            communicator.all_to_all(tensor, [-1] * communicator.size)
    else:
        with pytest.raises(CollectiveError, match=rf"wrong arguments on rank {last}\."):
            communicator.all_to_all(tensor).wait()
    assert_works(communicator, device)


def mismatches_fail_everywhere(communicator: Communicator, device: str):
    """Every rank's error lists the ranks' arguments."""
    if communicator.size == 1:
        return
    is_odd_one = communicator.rank == 1
    plain = torch.ones(communicator.size, 3, device=device)
    for other, what in (
        (plain.double(), "dtype must be equal"),
        (plain.unsqueeze(0), "number of dimensions must be equal"),
        (plain[:, :2], "shape after dimension 0 must be equal"),
    ):
        tensor = other if is_odd_one else plain
        with pytest.raises(CollectiveError, match=f"{what}.* on rank 1"):
            communicator.all_gather(tensor).wait()
        with pytest.raises(CollectiveError, match=f"{what}.* on rank 1"):
            communicator.all_to_all(tensor, [0] * communicator.size).wait()
    call = communicator.all_gather if is_odd_one else communicator.all_to_all
    with pytest.raises(CollectiveError, match=r"call must be equal.* on rank 1"):
        call(plain).wait()
    assert_works(communicator, device)


def bad_places_are_refused(communicator: Communicator, device: str):
    size = communicator.size
    tensor = torch.ones(2 * size, 3, device=device)
    for out, reason in (
        (
            torch.ones(2 * size, 3, device=device).double(),
            "out must be a torch.float32 tensor",
        ),
        (torch.ones(2 * size, 2, device=device), "out must be a torch.float32 tensor"),
        (torch.ones(2 * size, device=device), "out must be a torch.float32 tensor"),
        (torch.ones(3, 2 * size, device=device).t(), "out must be contiguous"),
    ):
        for call in (communicator.all_gather, communicator.all_to_all):
            with pytest.raises(UsageError, match=reason):
                call(tensor[: 2 if call == communicator.all_gather else None], out=out)
        if size > 1:
            with pytest.raises(UsageError, match="out must be"):
                communicator.reduce_scatter(tensor, out=out)
    short = torch.ones(2 * size - 1, 3, device=device)
    for call in (communicator.all_gather, communicator.all_to_all):
        given = tensor[: 2 if call == communicator.all_gather else None]
        with pytest.raises(UsageError, match=rf"out must (have|be).*\b{2 * size}\b"):
            call(given, out=short).wait()
    with pytest.raises(UsageError, match=r"out must be a .* tensor on .*\[2, 3\]"):
        communicator.reduce_scatter(tensor, out=torch.ones(3, 3, device=device))
    assert_works(communicator, device)


def one_ranks_bad_place_fails_everywhere(communicator: Communicator, device: str):
    if communicator.size == 1:
        return
    last = communicator.size - 1
    tensor = torch.ones(communicator.size, device=device)
    for shape in ((2, 2), (communicator.size + 1,)):
        out = torch.ones(shape, device=device) if communicator.rank == last else None
        for call, given in (
            (communicator.all_gather, tensor[:1]),
            (communicator.all_to_all, tensor),
        ):
            if communicator.rank == last:
                with pytest.raises(UsageError, match="out must"):
                    call(given, out=out).wait()
            else:
                with pytest.raises(
                    CollectiveError, match=rf"arguments on rank {last}\."
                ):
                    call(given, out=out).wait()
    assert_works(communicator, device)


def scalars_have_no_rows(communicator: Communicator, device: str):
    scalar = torch.tensor(1.0, device=device)
    for call in (communicator.all_gather, communicator.all_to_all):
        with pytest.raises((UsageError, CollectiveError), match="at least one dim"):
            call(scalar).wait()
    assert_works(communicator, device)


def a_closed_communicator_refuses(communicator: Communicator, device: str):
    copy = communicator.duplicate()
    assert_works(copy, device)
    copy.close()
    copy.close()
    ones = torch.ones(communicator.size, device=device)
    for call in (
        lambda: copy.all_reduce(ones),
        lambda: copy.all_reduce(ones.half()),
        lambda: copy.all_gather(ones),
        lambda: copy.reduce_scatter(ones),
        lambda: copy.broadcast(ones, 0),
        lambda: copy.all_to_all(ones),
        copy.barrier,
        copy.duplicate,
    ):
        with pytest.raises(CollectiveError, match="the communicator is closed"):
            call()
    assert_works(communicator, device)


def an_error_raised_again_is_a_new_one(communicator: Communicator, device: str):
    """Frames in the traceback of a reused error would keep tensors alive."""
    copy = communicator.duplicate()
    ones = torch.ones(3, device=device)
    calls = [lambda: copy.all_reduce(ones).wait()]
    if communicator.rank == 0:
        if communicator.size == 1 or communicator.engine == "mpi":  # which tells nobody
            copy.close()
        else:
            calls.append(copy.all_reduce(ones.clone()).wait)
    communicator.barrier().wait()
    if communicator.rank > 0:
        copy.abort()
    for call in reversed(calls):
        errors = []
        for _ in range(100):
            with pytest.raises(CollectiveError) as caught:
                call()
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 100
        assert len({str(error) for error in errors[1:]}) == 1
        assert num_frames(errors[-1]) <= num_frames(errors[0]) + 2
    copy.close()
    assert_works(communicator, device)


REFUSALS = checks_in(globals())
