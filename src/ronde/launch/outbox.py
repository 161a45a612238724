"""What an agent has still to tell its controller."""

from collections import deque

from ronde.launch.frames import (
    FrameWriter,
    Output,
    Relayed,
    encode_control,
    encode_output,
    encode_relayed,
    pipe_writer,
)
from ronde.launch.messages import FromAgent, encode_message

FIRST_CREDIT_BYTES = 16 << 10
"""Output that an agent may send before the controller has granted any."""

_FULL_BYTES = 64 << 10


class Outbox:
    """Messages at once, then what goes to the store, then output for which is credit.

    A terminal that takes nothing more uses up the credit and so, in the end, blocks
    the ranks that write to it. Messages overtake the output that waits: that a rank
    failed is known all the same.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._writer = FrameWriter(pipe_writer(fd))
        self._waiting: deque[Output] = deque()
        self._relayed: deque[Relayed] = deque()
        self._last_message: FromAgent | None = None
        self._is_discarding = False
        self._waiting_bytes = 0
        self._relayed_bytes = 0
        self._credit_bytes = FIRST_CREDIT_BYTES

    @property
    def is_writing(self) -> bool:
        """Whether ``flush`` should be called when the descriptor takes more."""
        return self._writer.waiting_bytes > 0

    @property
    def is_full(self) -> bool:
        """Whether the ranks should not be read for now."""
        return self._waiting_bytes >= _FULL_BYTES

    @property
    def is_store_full(self) -> bool:
        """Whether the ranks' connections to the store should not be read for now."""
        return self._relayed_bytes >= _FULL_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed over."""
        is_all_sent = (
            not self._waiting and not self._relayed and self._last_message is None
        )
        return is_all_sent and not self.is_writing

    def tell(self, message: FromAgent) -> None:
        """Send a message ahead of all output that waits.

        Raises:
            BrokenPipeError: The controller is gone.
        """
        self._writer.send(encode_control(encode_message(message)))

    def tell_last(self, message: FromAgent) -> None:
        """Send a message when all output is sent; the last word of this agent."""
        self._last_message = message
        self.flush()

    def put(self, output: Output) -> None:
        """Send output when there is credit for it."""
        if self._is_discarding:
            return
        self._waiting.append(output)
        self._waiting_bytes += len(output.data)
        self.flush()

    def discard(self) -> None:
        """Forget the output that waits, and what comes."""
        self._is_discarding = True
        self._waiting.clear()
        self._waiting_bytes = 0

    def relay(self, relayed: Relayed) -> None:
        """Send what goes to the store, ahead of all output."""
        self._relayed.append(relayed)
        self._relayed_bytes += len(relayed.data)
        self.flush()

    def grant(self, num_bytes: int) -> None:
        """Take note of the controller's credit."""
        self._credit_bytes += num_bytes
        self.flush()

    def flush(self) -> None:
        """Write what credit and descriptor allow now.

        Raises:
            BrokenPipeError: The controller is gone.
        """
        self._writer.flush()
        while self._relayed and not self.is_writing:
            relayed = self._relayed.popleft()
            self._relayed_bytes -= len(relayed.data)
            self._writer.send(encode_relayed(relayed))
        while self._waiting and self._credit_bytes > 0 and not self.is_writing:
            output = self._waiting.popleft()
            # What is handed over can be overtaken by nothing any more.
            now, later = (
                output.data[: self._credit_bytes],
                output.data[self._credit_bytes :],
            )
            if later:
                self._waiting.appendleft(output._replace(data=later))
            self._waiting_bytes -= len(now)
            self._credit_bytes -= len(now)
            self._writer.send(encode_output(output._replace(data=now)))
        if self._last_message is not None and not self._waiting:
            message, self._last_message = self._last_message, None
            self.tell(message)
