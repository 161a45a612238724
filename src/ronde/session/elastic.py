"""Elastic states of every front end, and the decorator ``run`` that restores them."""

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from enum import IntFlag
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from ronde.errors import CollectiveError, MembershipError
from ronde.membership.member import Member, own_member
from ronde.membership.view import NEW, ViewBegins
from ronde.session.lifetime import init, reform, shutdown
from ronde.session.session import current_session, is_initialized
from ronde.world.horovod_config import read_horovod_config

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_logger = logging.getLogger("ronde")


class HostUpdateResult(IntFlag):
    """Kinds of host changes, with Horovod's values."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """Raised when hosts were added or removed.

    ``skip_sync`` means that the remaining ranks have equal state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class WorkerNotificationManager:
    """Notifies all listeners when hosts are added or removed; thread-safe."""

    def __init__(self) -> None:
        self._listeners: list[State] = []

    def register_listener(self, listener: "State") -> None:
        """Notify ``listener`` of all later changes."""
        self._listeners.append(listener)

    def remove_listener(self, listener: "State") -> None:
        """Stop notifying ``listener``."""
        self._listeners.remove(listener)

    def handle_hosts_updated(
        self, timestamp: float, update_res: HostUpdateResult
    ) -> None:
        """Notify all listeners; ``timestamp`` is in seconds since the epoch."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
"""This process's manager; the name is Horovod's."""


class State(ABC):
    """Base class of training state that survives failures and changes of hosts.

    ``bcast_object`` returns the object of rank 0, or of ``root_rank``, on every rank;
    ``get_rank`` returns this process's rank.

    Note [Positions]
        In an elastic job, each rank counts its calls of ``check_host_updates``, which
        ``commit`` calls too. The rank with the largest count has the newest state. A
        change of hosts takes effect after the same call on all ranks.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: SimpleQueue[tuple[float, HostUpdateResult]] = SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after ranks were added or removed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Drop queued changes, call ``reset``, and call the callbacks."""
        self._host_messages = SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Store a change of hosts for the next check; thread-safe."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then check for changes of hosts; collective."""
        self.save()
        member = own_member()
        if member is not None:
            member.saved_step = member.step + 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks if the hosts have changed."""
        member = own_member()
        if member is not None:
            member.step += 1
            member.allow(member.step + 1)
            if member.should_settle(member.step):
                raise HostsUpdatedInterrupt(skip_sync=True)
            return
        changes = HostUpdateResult.no_update
        last, is_changed = self._last_updated_timestamp, False
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            # Each change comes once, so an equal timestamp is another change.
            if timestamp >= last:
                last, is_changed = timestamp, True
                changes |= update
        agreed = self._bcast_object((last, changes, is_changed))
        self._last_updated_timestamp, changes, is_changed = agreed
        if is_changed:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    @abstractmethod
    def save(self) -> None:
        """Copy the state for ``restore``."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last ``save``."""

    @abstractmethod
    def sync(self) -> None:
        """Copy the state of rank ``source()`` to all ranks, and save it; collective."""

    def reset(self) -> None:  # noqa: B027  most have nothing to adapt
        """Adapt to the new ranks, before ``sync``; not collective."""


def source() -> int:
    """Return the rank with the newest commit."""
    return current_session().source


class ObjectState(State):
    """State with picklable attributes, passed as keyword arguments."""

    def __init__(
        self,
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved_state = deepcopy(self._attributes())

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, deepcopy(value))

    def sync(self) -> None:
        if self._saved_state:
            root = {"root_rank": source()} if is_initialized() and source() else {}
            for name, value in self._bcast_object(self._attributes(), **root).items():
                setattr(self, name, value)
            ObjectState.save(self)

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}


S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function to continue after failures and changes of hosts.

    The function's first argument is the state, which is equal on all ranks. When a
    collective fails (``HorovodInternalError``), the state returns to its last commit;
    when hosts change, it stays. In both cases the ranks reconnect, and the function is
    called again. Repeated quick failures are followed by pauses of 0.1 s to 10 s.

    Raises:
        CollectiveError: There were more resets than ``HOROVOD_RESET_LIMIT`` allows.
    """
    return run_fn(func, _reset)


def _reset() -> ViewBegins | None:
    if own_member() is not None:
        return reform()
    shutdown()
    init()
    return None


def run_fn(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], object]
) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function like ``run``; ``reset`` reconnects the ranks."""

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        notification_manager.register_listener(state)
        try:
            return _until_done(lambda: func(state, *args, **kwargs), state, reset)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _until_done(train: Callable[[], R], state: State, reset: Callable[[], object]) -> R:
    member = own_member()
    if member is not None:
        member.on_change = _notify
    limit = None if member else read_horovod_config().reset_limit
    # A rank that joins a running job is in no view yet.
    is_connected = member is None or current_session().view is not None
    is_synchronized = False
    number, pause = 0, _Pause()
    while True:
        number += 1
        try:
            if not is_connected:
                begins = reset()
                state.on_reset()
                if isinstance(begins, ViewBegins):
                    is_synchronized &= begins.is_equal
            if not is_synchronized:
                state.sync()
            if member is not None:
                _begin(member, is_synchronized=is_synchronized)
            pause.began_s = time.monotonic()
            return _finish(member, train())
        except CollectiveError as error:
            _count(number, limit, error)
            # Logged, as a fault of the program itself may recur each time.
            _logger.warning(
                "Training returns to its last commit after a failure: %s", error
            )
            state.restore()
            is_synchronized = False
            is_new = time.monotonic() - pause.began_s > _LONGEST_PAUSE_S
            if member is not None:
                member.step = step = member.saved_step
                is_new = isinstance(error, MembershipError) or step > pause.step
                pause.step = step
            pause.sleep(is_new=is_new)
        except HostsUpdatedInterrupt as interrupt:
            _count(number, limit, interrupt)
            is_synchronized = interrupt.skip_sync
        is_connected = False


def _notify() -> None:
    # The kind of change is unknown here.
    notification_manager.handle_hosts_updated(time.time(), HostUpdateResult.mixed)


class _Pause:
    """The pause between attempts: 0 at first, longer after each quick failure."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.next_s = 0.0
        self.step = NEW  # of the last failure

    def sleep(self, *, is_new: bool) -> None:
        if is_new:
            self.next_s = 0.0
        time.sleep(self.next_s)
        self.next_s = min(max(2 * self.next_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


def _finish(member: Member | None, result: R) -> R:
    if member is not None:
        member.done(member.step)
    return result


def _begin(member: Member, *, is_synchronized: bool) -> None:
    begins = current_session().begins
    if begins is not None and not is_synchronized:
        member.step = member.saved_step = max(begins.step, 0)
    member.running()


def _count(number: int, limit: int | None, reason: Exception) -> None:
    if limit is not None and number > limit:
        raise CollectiveError(
            f"training was interrupted {number} times, more than the reset limit of "
            f"{limit}. Find the cause (the last one: {reason}), or raise --reset-limit."
        ) from reason
