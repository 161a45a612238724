"""The entry point that ``import torch`` calls: it never raises and imports only torch.

An error here would make ``import torch`` fail in every program of the environment.
"""

import functools
import gc
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

_REPLACE = "RONDE_REPLACE_GLOO"  # set by ``ronde run --replace-gloo``


def register() -> None:
    """Register the backend ``ronde`` of ``init_process_group``."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001  see above
        import warnings

        text = f"ronde could not register its backend of torch.distributed: {error}"
        warnings.warn(text, stacklevel=2)


def _register() -> None:
    from torch import distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "RONDE"):
        return
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend("ronde", _make, extended_api=True, devices=devices)
    if os.environ.get(_REPLACE) == "1" and dist.is_gloo_available():  # noqa: TID251  it reads no more
        from torch.distributed import distributed_c10d

        stand_in = _Replaced("ProcessGroupGloo", (), {})
        distributed_c10d.ProcessGroupGloo = stand_in  # pyright: ignore[reportAttributeAccessIssue]
    if "RONDE_CHANNEL" in os.environ:  # noqa: TID251  it reads no more
        _measure_input()
        _watch_groups()
        gc.freeze()  # Note [Frozen modules] in ``memory``


def _measure_input() -> None:
    """Add up the time that the program waits for its DataLoaders, for ``ronde top``."""
    from torch.utils.data import dataloader

    from ronde.status.steps import own_meter

    # torch has no hook for this.
    iterator: Any = getattr(dataloader, "_BaseDataLoaderIter")  # noqa: B009
    get_next, activity = iterator.__next__, own_meter().input

    def measured(self: object) -> Any:  # noqa: ANN401  the loader's own
        with activity:
            return get_next(self)

    iterator.__next__ = measured


def _watch_groups() -> None:
    """Report the pending calls of groups of Gloo and NCCL, once there is one."""
    from torch.distributed import distributed_c10d

    # torch has no hook for this.
    name = "_new_process_group_helper"
    make_group = getattr(distributed_c10d, name)

    @functools.wraps(make_group)
    def watched(*given: Any, **options: Any) -> Any:  # noqa: ANN401  torch's
        made = make_group(*given, **options)
        with suppress(Exception):
            from torch._C import _distributed_c10d as recorder

            from ronde.status.flight_recorder import watch_groups

            modules: Any = distributed_c10d, recorder
            watch_groups(*modules)
        return made

    setattr(distributed_c10d, name, watched)


def _make(given: Any, options: object) -> object:  # noqa: ANN401  torch's, without a type
    from ronde.process_group.creation import make

    return make(given, options)


class _Replaced(type):
    """The metaclass of a replacement for ``ProcessGroupGloo``."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> object:  # noqa: ANN401  torch's
        from ronde.process_group.creation import make_for_gloo

        return make_for_gloo(store, rank, size, timeout)

    def __instancecheck__(cls, group: object) -> bool:
        from torch.distributed import ProcessGroupGloo

        return isinstance(group, ProcessGroupGloo) or hasattr(group, "is_for_gloo")

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401  of Gloo's
        from torch.distributed import ProcessGroupGloo

        return getattr(ProcessGroupGloo, name)
