"""Which combinations of what a test is given it is given whenever tests run."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def all_on_three_ranks(sizes: Iterable[int], *axes: Iterable[Any]) -> list[Any]:
    """Return each size with all combinations; on three ranks all run in CI.

    On others a third of them does, so that each value is in some; the rest is ``long``.
    """
    combined = list(itertools.product(*map(enumerate, axes)))
    params = []
    for size, case in itertools.product(sizes, combined):
        is_run = size == 3 or sum(index for index, _ in case) % 3 == size % 3
        values = [value for _, value in case]
        marks = () if is_run else pytest.mark.long
        params.append(pytest.param(size, *values, marks=marks))
    return params
