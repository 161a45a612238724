"""What the ranks write, on its way to the controller."""

import selectors

from ronde.launch.frames import Output
from ronde.launch.outbox import Outbox
from ronde.launch.rank_process import OutputPipe

_DRAIN_READS = 32


class Intake:
    """Reads the ranks' pipes, as long as the outbox has room.

    Args:
        selector: Of the agent's loop; the data of each key registered here is a
            function of the descriptor.
        outbox: Where the output goes.
    """

    def __init__(self, selector: selectors.BaseSelector, outbox: Outbox) -> None:
        self._selector = selector
        self._outbox = outbox
        self._pipes: dict[int, OutputPipe] = {}
        self._is_reading = True

    def add(self, pipe: OutputPipe) -> None:
        """Read this pipe from now on."""
        self._pipes[pipe.fd] = pipe
        if self._is_reading:
            self._selector.register(pipe.fd, selectors.EVENT_READ, self._read)

    def pace(self) -> None:
        """Stop or go on reading, as the outbox is full or not."""
        is_reading = not self._outbox.is_full
        if is_reading is self._is_reading:
            return
        self._is_reading = is_reading
        for fd in self._pipes:
            if is_reading:
                self._selector.register(fd, selectors.EVENT_READ, self._read)
            else:
                self._selector.unregister(fd)

    def drain(self, pipe: OutputPipe) -> None:
        """Read what is in the pipe now, but no flood that somebody keeps up."""
        for _ in range(_DRAIN_READS):
            if not pipe.is_open or not self._read(pipe.fd):
                return

    def close(self) -> None:
        """Drain and close all pipes; nobody is left to write to them."""
        for pipe in list(self._pipes.values()):
            self.drain(pipe)
            self._forget(pipe)

    def _read(self, fd: int) -> bool:
        """Pass on one piece of output; False when there is none now."""
        pipe = self._pipes.get(fd)
        if pipe is None:
            # It was drained to its end after the selector had seen it ready.
            return False
        data = pipe.read()
        if data is None:
            if not pipe.is_open:
                self._forget(pipe)
            return False
        self._outbox.put(Output(pipe.rank, pipe.stream, data))
        return True

    def _forget(self, pipe: OutputPipe) -> None:
        if self._pipes.pop(pipe.fd, None) is not None and self._is_reading:
            self._selector.unregister(pipe.fd)
        pipe.close()
