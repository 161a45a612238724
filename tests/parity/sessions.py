"""Functions called on every rank between ``hvd.init()`` and ``hvd.shutdown()``."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tests.ranks import run_ranks_bare

import ronde.torch as hvd

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def run_sessions(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    engine: str | None = None,
    environment: Mapping[str, str] = DYNAMIC,
    dying: Collection[int] = (),
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call ``fn(*args)`` on ``size`` ranks of a session and return the results."""
    return run_ranks_bare(
        size,
        _run,
        fn,
        args,
        engine,
        environment=environment,
        dying=dying,
        timeout_s=timeout_s,
    )


def _run(
    _: object, fn: Callable[..., Any], args: tuple[Any, ...], engine: str | None
) -> Any:
    hvd.init(engine=engine)
    result = fn(*args)
    hvd.shutdown()
    return result


def message_of(
    error: type[Exception] | tuple[type[Exception], ...],
    fn: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> str:
    """Return the first line of the error that a call raises."""
    try:
        fn(*args, **kwargs)
    except error as raised:
        return str(raised).splitlines()[0]
    raise AssertionError(f"nothing was raised by {fn.__name__}")
