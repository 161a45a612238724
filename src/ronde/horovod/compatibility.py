"""What Horovod's ``common`` modules have, whatever the framework."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import pairwise
from typing import Any

from ronde.errors import CollectiveError as HorovodInternalError
from ronde.torch import features
from ronde.torch.elastic.state import HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

_cache = cache
"""Under the name that Horovod's own tests import."""


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that Horovod was built with: never so with ronde."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Return the message for a framework's version that was not built with."""
    return (
        f"{name} must be the version that was built with, {installed_version}, got "
        f"{version}. Install that one, or build anew."
    )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a front end exists: ``torch``, ``tensorflow`` or ``mxnet``."""
    del verbose
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a front end sees a GPU."""
    import torch

    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def _with_verbose(function: Any) -> Any:  # noqa: ANN401  of features
    @wraps(function)
    def built(verbose: bool = False) -> Any:  # noqa: ANN401  the function's own
        del verbose
        return function()

    return built


gloo_built = _with_verbose(features.gloo_built)
mpi_built = _with_verbose(features.mpi_built)
nccl_built = _with_verbose(features.nccl_built)
ddl_built = _with_verbose(features.ddl_built)
ccl_built = _with_verbose(features.ccl_built)


@contextmanager
def env(**kwargs: str | None) -> Generator[None]:
    """Set this process's variables for a while; None leaves one as it is."""
    values = {name: value for name, value in kwargs.items() if value is not None}
    environ = os.environ  # noqa: TID251  to change it is what this is asked for
    before = {name: environ[name] for name in values if name in environ}
    environ.update(values)
    try:
        yield
    finally:
        for name in values:
            environ.pop(name, None)
        environ.update(before)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Split into consecutive parts whose lengths differ by 1 at most, longer first."""
    length, num_longer = divmod(len(items), num_parts)
    starts = [i * length + min(i, num_longer) for i in range(num_parts + 1)]
    return [items[a:b] for a, b in pairwise(starts)]


def is_iterable(x: object) -> bool:
    """Return whether ``iter(x)`` works."""
    try:
        iter(x)  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether ``ver`` is at least ``target``, a ``major.minor.patch``."""
    from packaging.version import Version

    if target.count(".") != 2:
        raise ValueError(
            f"target must be major.minor.patch, got {target!r}. Fill it up with zeros."
        )
    return Version(ver) >= Version(target)
