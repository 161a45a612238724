"""Elastic states of arrays, without any framework: here the arrays are NumPy's."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.limits import HANG_S
from tests.ranks import run_ranks_bare

from ronde.errors import CollectiveError, MembershipError, UsageError
from ronde.session import ArrayState, init, rank, run_compiled, shutdown

UNKNOWN = np.dtype("V2")
"""As bfloat16 of JAX and TensorFlow: neither NumPy's own nor torch's."""


class NumpyState(ArrayState):
    def __init__(self, *arrays: np.ndarray, **kwargs) -> None:
        self.arrays = list(arrays)
        super().__init__(**kwargs)

    def read_arrays(self) -> list[np.ndarray]:
        return [array.copy() for array in self.arrays]

    def write_arrays(self, arrays) -> None:
        self.arrays = [array.copy() for array in arrays]


def on_ranks(size: int, body: Callable[[], object]) -> list:
    def fn(info):
        init()
        try:
            return body()
        finally:
            shutdown()

    return run_ranks_bare(size, fn, timeout_s=HANG_S)


def arrays_of(number: int) -> list[np.ndarray]:
    unknown = np.array([number, 7], np.int16).view(UNKNOWN)
    # A rank may have another shape, until all have that of one rank.
    rows = np.full((number + 1, 2), number, np.float32)
    return [rows, np.array(number), np.empty((0, 3)), np.array([True]), unknown]


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def test_arrays_are_copied_saved_and_restored() -> None:
    def body():
        state = NumpyState(*arrays_of(rank()), step=rank())
        state.sync()
        assert_same(state.arrays, arrays_of(0))
        assert state.step == 0
        state.arrays[0] += 1
        state.restore()
        assert_same(state.arrays, arrays_of(0))
        state.arrays[0] += 1
        state.step = 5
        state.commit()
        state.arrays[0] += 1
        state.step = 6
        state.restore()
        assert_same(state.arrays[:1], [np.ones((1, 2), np.float32)])
        assert state.step == 5

    on_ranks(3, body)


def test_every_rank_needs_as_many_arrays() -> None:
    def body():
        state = NumpyState(*arrays_of(0)[rank() :])
        # The other rank fails once this one has left.
        error, text = CollectiveError, "shut down"
        if rank():
            error, text = UsageError, r"rank 0, 5, got 4\. Build the same model"
        with pytest.raises(error, match=text):
            state.sync()

    on_ranks(2, body)


class CompiledCodeError(Exception):
    """As frameworks raise for errors in their compiled code."""


def test_failed_collectives_in_compiled_code_are_known_by_their_text() -> None:
    def body():
        errors: list[Exception] = []

        def train(state, times):
            state.calls += 1
            if errors:
                raise errors.pop(0)
            return times * state.calls

        def trained(*raised: Exception) -> int:
            errors[:] = raised
            state = NumpyState(calls=0)
            state.register_reset_callbacks([lambda: resets.append(len(errors))])
            return run_compiled(train, CompiledCodeError)(state, times=10)

        resets: list[int] = []
        inner = "INTERNAL: MembershipError: view 3 has ended.\nTraceback"
        deleted = CompiledCodeError("Array has been deleted")
        deleted.__context__ = CompiledCodeError(inner)
        assert (
            trained(
                CompiledCodeError("{{node HorovodAllreduce_grads}} failed"),
                CompiledCodeError(
                    "HorovodAllreduce_grads\nHorovodAllreduce: rank 1 left"
                ),
                CompiledCodeError(inner),
                deleted,
                MembershipError("in no compiled code"),
            )
            == 10
        )
        assert resets == [4, 3, 2, 1, 0]
        for error in (CompiledCodeError("NaN"), KeyError("MembershipError")):
            with pytest.raises(type(error)) as caught:
                trained(error)
            assert caught.value is error
        assert len(resets) == 5

    on_ranks(1, body)
