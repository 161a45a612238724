"""The threads that carry a coordinator on."""

import threading
import time
from collections.abc import Callable

from ronde.coordination.control.channel import Channel


class Attendance:
    """Counts the threads that carry on while they wait.

    Attributes:
        count: How many there are.
    """

    def __init__(self, channel: Channel) -> None:
        self.count = 0
        self._channel = channel
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1
        self._channel.attend()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1
        self._channel.leave()


class Listener:
    """A thread that carries on when nobody else does: asleep until something comes.

    Args:
        channel: Where it comes from.
        attending: Who else carries on.
        gather_time_s: How long submissions may gather before they are looked at.
        carry_on: What to do, again and again.
        patience_s: Returns when to do it next though nothing came; None for never.
    """

    def __init__(
        self,
        channel: Channel,
        attending: Attendance,
        gather_time_s: float,
        *,
        carry_on: Callable[[], None],
        patience_s: Callable[[], float | None],
    ) -> None:
        self._channel = channel
        self._attending = attending
        self._gather_time_s = gather_time_s
        self._carry_on = carry_on
        self._patience_s = patience_s
        self._is_stirred = False
        self._is_over = False
        self._thread = threading.Thread(
            target=self._listen, name="ronde-coordinator", daemon=True
        )
        self._thread.start()

    def stir(self) -> None:
        """Have it carry on soon."""
        if not self._is_stirred:
            self._is_stirred = True
            self._channel.wake()

    def end(self) -> None:
        """Have it do nothing more; ``join`` after the channel is closed."""
        self._is_over = True

    def join(self) -> None:
        """Wait until the thread is gone."""
        self._thread.join()

    def _listen(self) -> None:
        while not self._is_over:
            self._channel.wait(self._patience_s(), is_eager=False)
            if self._is_over:
                return
            if self._is_stirred and not self._attending.count:
                time.sleep(self._gather_time_s)
            self._is_stirred = False
            self._carry_on()
