"""How torch makes a group, and how it learns of the backend."""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore

from ronde.collectives.connections import connect_at
from ronde.errors import CollectiveError, UsageError
from ronde.process_group.group import RondeProcessGroup
from ronde.process_group.works import as_backend_error

BACKEND = "ronde"
_made: Counter[str] = Counter()
"""How often this process has made a group of each name: see ``_make``."""


@dataclass(frozen=True, slots=True)
class Options:
    """What ``pg_options`` may ask for; as in ``ronde bench``."""

    engine: str = "auto"
    algorithm: str = ""


def register() -> None:
    """Have ``init_process_group("ronde")`` work; may be called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, make, extended_api=True, devices=["cpu", "cuda"]
        )


def make(given: Any, options: object) -> RondeProcessGroup:  # noqa: ANN401  torch's, without a type
    """Make a group of the members; torch calls this on each of them."""
    if options is not None and not isinstance(options, Options):
        raise UsageError(
            "pg_options must be a ronde.process_group.Options, got "
            f"{type(options).__name__}. Leave it out, or give one, such as "
            "Options(engine='gloo')."
        )
    # Under torchrun a store outlives the groups: one made again must not find its keys.
    number = _made[given.group_id]
    _made[given.group_id] += 1
    store = PrefixStore(f"ronde{number}", given.store)
    asked = options or Options()
    try:
        with torch.no_grad():
            communicator = connect_at(
                store,
                given.group_rank,
                given.group_size,
                timeout_s=given.timeout.total_seconds(),
                engine=asked.engine,
                algorithm=asked.algorithm,
            )
    except CollectiveError as error:
        raise as_backend_error(error) from error
    group = RondeProcessGroup(communicator, given.group_id, given.timeout)
    weakref.finalize(group, communicator.close)  # also when Python ends
    return group
