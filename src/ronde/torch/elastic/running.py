"""The loop around a training function that starts it again."""

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ronde.errors import CollectiveError
from ronde.torch.elastic.objects import State
from ronde.torch.elastic.updates import HostsUpdatedInterrupt, notification_manager
from ronde.torch.lifetime import init, shutdown

_logger = logging.getLogger("ronde")
S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function, so that it survives failures and new hosts.

    The function is called with rank 0's state on all ranks. When a collective fails
    (``HorovodInternalError``), the state goes back to its last commit; when hosts have
    changed, it stays as it is. In both cases the ranks meet anew and the function is
    called again. Any other exception ends it.

    Args:
        func: Takes the state first. It must begin with where the state says it is.
    """
    return run_fn(func, _meet_anew)


def run_fn(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], None]
) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function; ``run`` says what that does.

    Args:
        func: Takes the state first.
        reset: Has the ranks meet anew.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        notification_manager.register_listener(state)
        try:
            return _until_done(lambda: func(state, *args, **kwargs), state, reset)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _until_done(train: Callable[[], R], state: State, reset: Callable[[], None]) -> R:
    is_synchronized = False
    while True:
        try:
            if not is_synchronized:
                state.sync()
            return train()
        except CollectiveError as error:
            # Else a mistake of the program's own, made again each time, is never seen.
            _logger.warning("Training goes back to its last commit: %s", error)
            state.restore()
            is_synchronized = False
        except HostsUpdatedInterrupt as interrupt:
            is_synchronized = interrupt.skip_sync
        reset()
        state.on_reset()


def _meet_anew() -> None:
    shutdown()
    init()
