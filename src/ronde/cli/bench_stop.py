"""Ctrl-C and SIGTERM while a benchmark runs: it ends between two rows."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager


class Stop:
    """Whether the user wants an end; the second time it ends at once."""

    is_asked = False

    def ask(self, number: int, _frame: object) -> None:
        """Take note; a signal handler."""
        if self.is_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.is_asked = True


@contextmanager
def stopping() -> Generator[Stop]:
    """Take note of the user's signals while the block runs."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
