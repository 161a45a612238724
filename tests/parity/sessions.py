"""Functions called on every rank between ``hvd.init()`` and ``hvd.shutdown()``."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.limits import HANG_S
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
    timeout_s: float = HANG_S,
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


def run_cases(
    size: int,
    cases: Mapping[str, Callable[[], Any]],
    *,
    engine: str | None = None,
    environment: Mapping[str, str] = DYNAMIC,
) -> dict[str, list[Any]]:
    """Call each case in a session of its own, all on ranks that are started once.

    Returns:
        What the ranks gave in each case, by its name.
    """
    of_ranks = run_ranks_bare(
        size, _run_each, cases, engine, environment=environment, timeout_s=HANG_S
    )
    return {name: [results[name] for results in of_ranks] for name in cases}


def _run_each(
    _: object, cases: Mapping[str, Callable[[], Any]], engine: str | None
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, case in cases.items():
        with named(name):
            results[name] = _run(_, case, (), engine)
    return results


@contextmanager
def named(case: str) -> Iterator[None]:
    """Name a case in the errors that it raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The case is {case!r}.")
        raise


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
