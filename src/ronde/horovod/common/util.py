"""Horovod's odds and ends that scripts and tests import."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

from ronde.torch import features

_cache = cache
"""Under the name that Horovod's own tests import."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Say whether a front end is there.

    Args:
        ext_base_name: ``torch``, ``tensorflow`` or ``mxnet``.
        verbose: Not used.
    """
    del verbose
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Say whether a front end sees a GPU.

    Args:
        ext_base_name: As in ``extension_available``.
        verbose: Not used.
    """
    import torch

    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def gloo_built(verbose: bool = False) -> bool:
    """Say whether ranks can do without MPI, by Gloo."""
    del verbose
    return features.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """Say whether MPI can move tensors."""
    del verbose
    return features.mpi_built()


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL as one number; 0 without it."""
    del verbose
    return features.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not used."""
    del verbose
    return features.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Intel's oneCCL is not used."""
    del verbose
    return features.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Generator[None]:
    """Set this process's variables for a while.

    Args:
        kwargs: Names and values; None leaves a variable as it is.
    """
    values = {name: value for name, value in kwargs.items() if value is not None}
    environ = os.environ  # noqa: TID251  to change it is what this is asked for
    before = {name: environ.get(name) for name in values}
    environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Say whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Split into consecutive parts whose lengths differ by 1 at most.

    Args:
        items: What to split.
        num_parts: How many parts; the first ones are the longer ones.
    """
    length, num_longer = divmod(len(items), num_parts)
    starts = [i * length + min(i, num_longer) for i in range(num_parts + 1)]
    return [items[a:b] for a, b in pairwise(starts)]


def is_iterable(x: object) -> bool:
    """Say whether ``iter(x)`` works."""
    try:
        iter(x)  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare two versions.

    Args:
        ver: Any version.
        target: ``major.minor.patch``.

    Raises:
        ValueError: They are no versions, or ``target`` has not three parts.
    """
    from packaging.version import Version

    if target.count(".") != 2:
        raise ValueError(
            f"target must be major.minor.patch, got {target!r}. Fill it up with zeros."
        )
    return Version(ver) >= Version(target)
