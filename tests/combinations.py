"""Which combinations of what a test is given it is given whenever tests run."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def all_on_three_ranks(sizes: Iterable[int], *axes: Iterable[Any]) -> list[Any]:
    """Return each size with all combinations; on three ranks all run in CI.

    On others one of them does, another one for each size; the rest is ``long``.
    """
    combined = list(itertools.product(*axes))
    params = []
    for size in sizes:
        for index, values in enumerate(combined):
            is_run = size == 3 or index == size % len(combined)
            marks = () if is_run else pytest.mark.long
            params.append(pytest.param(size, *values, marks=marks))
    return params
