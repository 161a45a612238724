"""Begin and end a session of a program that uses JAX."""

import atexit
import contextlib
from collections.abc import Sequence
from typing import Any

from ronde.jax.launch import initialize_distributed
from ronde.jax.primitive import jax
from ronde.session import lifetime
from ronde.session.session import ProcessSet


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    distributed: bool = False,
    engine: str = "",
) -> None:
    """Connect with the other ranks, as ``ronde.torch.init()`` does; collective.

    ``distributed`` also calls ``jax.distributed.initialize()``, for JAX's own
    collectives; nothing may have been computed with JAX before.
    """
    lifetime.init(comm, process_sets, engine=engine)
    atexit.register(_drain)  # before the session ends
    if distributed:
        initialize_distributed()


def shutdown() -> None:
    """Wait for dispatched computations, then end the session."""
    _drain()
    atexit.unregister(_drain)
    lifetime.shutdown()


def _drain() -> None:
    """Wait for dispatched computations, which may use the session."""
    arrays: list[Any] = []
    with contextlib.suppress(Exception):  # at exit JAX may have ended its backends
        arrays = jax.live_arrays()
    for array in arrays:
        # A failed computation has been reported where its result was used, if at all.
        with contextlib.suppress(Exception):
            array.block_until_ready()
    with contextlib.suppress(Exception):
        jax.effects_barrier()
