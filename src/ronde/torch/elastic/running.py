"""The loop around a training function that starts it again."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ronde.errors import CollectiveError
from ronde.torch.elastic.objects import State
from ronde.torch.elastic.updates import HostsUpdatedInterrupt, notification_manager
from ronde.torch.lifetime import init, shutdown
from ronde.world.horovod_config import read_horovod_config

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
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

    The first try comes at once; where failures follow each other fast, the pause before
    the next one doubles, up to 10 s.

    Args:
        func: Takes the state first. It must begin with where the state says it is.

    Raises:
        CollectiveError: From the decorated function: the ranks were to meet anew more
            often than ``--reset-limit`` (``HOROVOD_RESET_LIMIT``) allows.
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
    resets = _Resets(read_horovod_config().reset_limit)
    is_met, is_synchronized = True, False
    while True:
        try:
            if not is_met:
                reset()
                state.on_reset()
            if not is_synchronized:
                state.sync()
            resets.began_s = time.monotonic()
            return train()
        except CollectiveError as error:
            resets.count(error)
            # Else a mistake of the program's own, made again each time, is never seen.
            _logger.warning("Training goes back to its last commit: %s", error)
            state.restore()
            is_synchronized = False
            resets.back_off()
        except HostsUpdatedInterrupt as interrupt:
            resets.count(interrupt)
            is_synchronized = interrupt.skip_sync
        is_met = False


class _Resets:
    """How often the ranks have met anew, and how soon they may again.

    Attributes:
        began_s: When training began last.
    """

    def __init__(self, limit: int | None) -> None:
        self.began_s = 0.0
        self._limit = limit
        self._number = 0
        self._pause_s = 0.0

    def count(self, reason: Exception) -> None:
        """Count one more.

        Raises:
            CollectiveError: That is more than the limit.
        """
        self._number += 1
        if self._limit is not None and self._number > self._limit:
            raise CollectiveError(
                f"reset_limit must be at least the number of resets, {self._number}, "
                f"got {self._limit}. Find out why training was interrupted so often "
                f"(the last time: {reason}), or give a higher --reset-limit."
            ) from reason

    def back_off(self) -> None:
        """Pause before the next try, twice as long where failures come fast."""
        if time.monotonic() - self.began_s > _LONGEST_PAUSE_S:
            self._pause_s = 0.0
        time.sleep(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


def _meet_anew() -> None:
    shutdown()
    init()
