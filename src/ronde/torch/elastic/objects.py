"""State that survives a failure: committed, restored, and equal on all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from queue import Empty, SimpleQueue
from typing import Any

from ronde.torch.elastic.updates import HostsUpdatedInterrupt, HostUpdateResult


class State(ABC):
    """What training goes on from after a failure or a change of hosts."""

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]
    ) -> None:
        """Begin with no change of hosts heard of.

        Args:
            bcast_object: Returns rank 0's object on all ranks; collective.
            get_rank: Returns this process's rank.
        """
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: SimpleQueue[tuple[float, HostUpdateResult]] = SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called after ranks were added or removed.

        Args:
            callbacks: Say, one that scales the learning rate to the new size.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new ranks: forget old news, ``reset``, call the callbacks."""
        self._host_messages = SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Take note of a change of hosts; any thread may call it.

        Args:
            timestamp: When it happened, in seconds since the epoch.
            update_res: What has changed.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, so that ``restore`` comes back to here; then check for new hosts.

        Collective. It copies all that is saved: not for every step of a large model.

        Raises:
            HostsUpdatedInterrupt: See ``check_host_updates``.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether rank 0 has heard of a change of hosts; collective.

        Raises:
            HostsUpdatedInterrupt: It has; raised on all ranks alike.
        """
        changes = HostUpdateResult.no_update
        last, is_changed = self._last_updated_timestamp, False
        while (message := self._next_message()) is not None:
            timestamp, update = message
            # Each piece of news comes once, so one of the same second is another one.
            if timestamp >= last:
                last, is_changed = timestamp, True
                changes |= update
        agreed = self._bcast_object((last, changes, is_changed))
        self._last_updated_timestamp, changes, is_changed = agreed
        if is_changed:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    @abstractmethod
    def save(self) -> None:
        """Take a copy for ``restore``."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last ``save``."""

    @abstractmethod
    def sync(self) -> None:
        """Take over rank 0's state; collective."""

    def reset(self) -> None:  # noqa: B027  most have nothing to adapt
        """Adapt to the new ranks, before ``sync``; not collective."""

    def _next_message(self) -> tuple[float, HostUpdateResult] | None:
        try:
            return self._host_messages.get_nowait()
        except Empty:
            return None


class ObjectState(State):
    """State made of attributes that can be pickled."""

    def __init__(
        self,
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        """Make each keyword an attribute.

        Args:
            bcast_object: See ``State``.
            get_rank: See ``State``.
            kwargs: Attributes, which are saved, restored and synchronised.
        """
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Copy the attributes, what they hold included."""
        self._saved_state = {
            name: deepcopy(value) for name, value in self._attributes().items()
        }

    def restore(self) -> None:
        """Set the attributes to copies of what was saved."""
        self._set_attributes()

    def sync(self) -> None:
        """Save rank 0's attributes, as they are, and set them; collective."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._attributes())
            self._set_attributes()

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, deepcopy(value))
