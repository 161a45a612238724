"""Functions that torch calls to make groups of the backend."""

import ctypes
import os
import weakref
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from ronde.collectives import Communicator
from ronde.collectives.connections import connect_at
from ronde.errors import CollectiveError, UsageError
from ronde.process_group.group import RondeProcessGroup
from ronde.process_group.works import as_backend_error
from ronde.world.environment import own_or, read_algorithm, read_drift, read_engine


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The type of ``pg_options``; empty values are read from the environment."""

    engine: str = ""
    algorithm: str = ""


def make(given: Any, options: object) -> RondeProcessGroup:  # noqa: ANN401  torch's, without a type
    """Make a group of backend "ronde"; torch calls this on each member."""
    if options is not None and not isinstance(options, GroupOptions):
        raise UsageError(
            "pg_options must be a ronde.process_group.GroupOptions, got "
            f"{type(options).__name__}. Omit it, or pass GroupOptions(engine='gloo')."
        )
    rank, size = given.group_rank, given.group_size
    return _make(given.store, rank, size, given.timeout, options or GroupOptions())


def make_for_gloo(
    store: Store, rank: int, size: int, timeout: timedelta
) -> RondeProcessGroup:
    """Make a group that replaces torch's Gloo group."""
    group = _make(store, rank, size, timeout, GroupOptions())
    group.is_for_gloo = True
    group.options = SimpleNamespace()  # torch sets its attributes
    return group


def _make(
    store: Store, rank: int, size: int, timeout: timedelta, options: GroupOptions
) -> RondeProcessGroup:
    try:
        # A store may outlive its groups: a new group must not find the old one's keys.
        number = store.add(f"ronde/{rank}", 1)
        environ = own_or(None)
        store = PrefixStore(f"ronde{number}", store)
        with torch.no_grad():
            communicator = connect_at(
                store,
                rank,
                size,
                timeout_s=timeout.total_seconds(),
                engine=options.engine or read_engine(environ),
                algorithm=options.algorithm or read_algorithm(environ),
            )
    except CollectiveError as error:
        raise as_backend_error(error) from error
    group = RondeProcessGroup(communicator, store, timeout, read_drift(environ))
    weakref.finalize(group, _close, communicator, os.getpid())  # also at exit
    return group


def _close(communicator: Communicator, process: int) -> None:
    if os.getpid() == process:
        communicator.close()
    else:
        # Never freed: Gloo would wait for its threads, which do not exist in a fork.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
