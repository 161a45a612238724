"""News that the hosts of a job have changed, and who is told."""

from enum import IntFlag
from threading import Lock
from typing import Protocol


class HostUpdateResult(IntFlag):
    """What has changed; the numbers are Horovod's."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """The hosts have changed: training is to start again from where it is.

    Attributes:
        skip_sync: Whether all ranks that are left have the state already.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class Listener(Protocol):
    """Who wants to know."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Take note of a change; called from any thread."""
        ...


class WorkerNotificationManager:
    """Passes news on to all that listen; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: list[Listener] = []

    def register_listener(self, listener: Listener) -> None:
        """Have ``listener`` told of every change from now on."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Tell ``listener`` no more."""
        with self._lock:
            self._listeners.remove(listener)

    def handle_hosts_updated(
        self, timestamp: float, update_res: HostUpdateResult
    ) -> None:
        """Tell all that listen.

        Args:
            timestamp: When it happened, in seconds since the epoch.
            update_res: What has changed.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
"""The one of this process, which Horovod's users know by this name."""
