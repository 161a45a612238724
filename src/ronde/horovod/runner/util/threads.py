"""Functions that run beside the caller."""

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> Thread:
    """Call a function in a thread of its own.

    Args:
        target: The function.
        args: Its arguments.
        name: Of the thread.
        daemon: Whether the process may end before it.
        silent: Whether to keep quiet of what it raises.

    Raises:
        ValueError: ``args`` is no tuple.
    """
    _require_tuple(args)
    call = _quietly(target) if silent else target
    thread = Thread(target=call, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: Event,
    func: Callable[..., object],
    args: tuple[Any, ...] = (),
    stop: Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> Thread:
    """Call a function, in a thread of its own, once an event is set.

    Args:
        event: What to wait for.
        func: The function.
        args: Its arguments.
        stop: Set it to wait no more.
        check_stop_interval_s: How often to look at ``stop``.
        daemon: Whether the process may end before the thread.
        silent: Whether to keep quiet of what the function raises.

    Raises:
        ValueError: ``args`` is no tuple, or nothing can end a thread that is no daemon.
    """
    _require_tuple(args)
    if stop is None and not daemon:
        raise ValueError(
            "stop must be given for a thread that is no daemon, got None. Give one."
        )

    def wait_and_call() -> None:
        if stop is None:
            event.wait()
        else:
            while not event.is_set() and not stop.is_set():
                event.wait(check_stop_interval_s)
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait_and_call, daemon=daemon, silent=silent)


def _quietly(target: Callable[..., object]) -> Callable[..., None]:
    def call(*args: Any) -> None:  # noqa: ANN401  the function's own
        with suppress(Exception):  # keeping quiet is what was asked for
            target(*args)

    return call


def _require_tuple(args: object) -> None:
    if not isinstance(args, tuple):
        raise ValueError(  # noqa: TRY004  Horovod's type
            f"args must be a tuple, got {type(args).__name__}. "
            "Type (arg,) for a single one."
        )
