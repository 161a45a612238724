"""Arrays that the front end of NumPy accepts and refuses."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from tests.ranks import run_ranks_bare

from ronde import numpy as npd
from ronde.errors import UsageError

BASE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
RECORD = np.zeros(3, [("one", "i1"), ("other", "f4")])
ACCEPTED = {
    "reversed": BASE[::-1, :, ::-2],
    "transposed": BASE.T,
    "broadcast": np.broadcast_to(BASE[0], (5, 3, 4)),
    "a field": RECORD["other"],
    "nothing": BASE[:0],
    "0-d": BASE[1, 1, 1, ...],
    "scalar": np.float32(3),
    "number": 2.5,
    "list": [[1, 2], [3, 4]],
    "torch": torch.ones(3, requires_grad=True).detach(),
}
REFUSED = {
    "array must have a native dtype of torch, got >f4": np.zeros(2, ">f4"),
    "got object": np.array([None]),
    "got <U1": np.array(["a"]),
    "got datetime64": np.array(["2026"], "M8[D]"),
    f"got {np.dtype(np.longdouble)}": np.zeros(2, np.longdouble),
}


def check_accepted() -> None:
    npd.init()
    for name, given in ACCEPTED.items():
        array = np.asarray(given)
        found = npd.allreduce(given, name, npd.Sum)
        assert type(found) is np.ndarray, name
        assert found.shape == array.shape, name
        assert_array_equal(found, array * npd.size(), err_msg=name)
        assert not np.shares_memory(found, array), name
    gradient = torch.ones(3, requires_grad=True)
    assert_array_equal(npd.allreduce(gradient, "gradient"), np.ones(3))
    npd.shutdown()


def check_in_place() -> None:
    npd.init()
    last = npd.size() - 1
    for name, view in {
        "plain": lambda array: array,
        "reversed": lambda array: array[::-1],
        "column": lambda array: array[:, 1],
        "fortran": lambda array: array.T,
    }.items():
        array = np.full((3, 4), npd.rank(), np.int32)
        own = view(array)
        assert npd.broadcast_(own, last, name) is own
        assert_array_equal(own, np.full_like(own, last), err_msg=name)
        assert (array == npd.rank()).sum() == (
            0 if npd.rank() != last else array.size
        ) + (array.size - own.size if npd.rank() != last else 0)
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for given in (fixed, [1, 2]):
        with pytest.raises(UsageError, match="must be a writable NumPy array"):
            npd.broadcast_(given, 0)
    npd.shutdown()


def check_handles() -> None:
    """Start groups and end them in another order; empty ones are complete."""
    npd.init()
    size, ones = npd.size(), np.ones(3)
    group = npd.grouped_allgather_async([ones, ones[:1]], "group")
    rows = npd.grouped_reducescatter_async([np.ones(size)], "rows", npd.Sum)
    even = npd.alltoall_async(np.full(size, npd.rank()), name="even")
    received, counts = npd.synchronize(even)
    assert_array_equal(received, np.arange(size))
    assert_array_equal(counts, np.ones(size, np.int32))
    assert_array_equal(npd.synchronize(rows)[0], [size])
    assert [len(each) for each in npd.synchronize(group)] == [3 * size, size]
    assert npd.grouped_allreduce([]) == ()
    splits = np.array([1] * size)
    assert len(npd.alltoall(np.ones(size), splits, "splits")) == 2
    npd.shutdown()


@pytest.mark.parametrize("check", [check_accepted, check_in_place, check_handles])
def test_arrays_of_two_ranks(check):
    run_ranks_bare(2, lambda _: check())


@pytest.mark.parametrize("text", REFUSED)
def test_an_array_that_torch_cannot_have_is_refused(text):
    with pytest.raises(UsageError) as caught:
        npd.allreduce(REFUSED[text])
    assert text in str(caught.value)


def test_a_function_has_its_own_name_and_signature():
    assert npd.allreduce.__name__ == "allreduce"
    assert (npd.broadcast_async.__doc__ or "").startswith("Start")
    with pytest.raises(TypeError, match="root_rank"):
        npd.broadcast(BASE)
