"""The controller's end of one agent: its frames, its greeting, its last words."""

import os
from collections import deque
from typing import TYPE_CHECKING

from ronde.launch.frames import (
    FrameDecoder,
    FrameWriter,
    Output,
    Relayed,
    encode_control,
    encode_relayed,
)
from ronde.launch.messages import (
    FROM_AGENT,
    FromAgent,
    ToAgent,
    decode_message,
    encode_message,
)
from ronde.launch.wire import Wire

if TYPE_CHECKING:
    # It is of no use to a job on one machine, which must start at once.
    from ronde.launch.greeting import Greeting

_READ_BYTES = 256 << 10
_LAST_WORDS_BYTES = 4096
_RELAYED_BYTES = 32 << 10


class AgentLink:
    """One agent and the frames to and from it.

    Args:
        wire: Leads to an agent that was told nothing yet.
        greeting: What must come before the first frame, where the agent was started
            through something else that may speak as well; None for no greeting.
    """

    def __init__(self, wire: Wire, greeting: "Greeting | None" = None) -> None:
        self.wire = wire
        self.greeting = greeting
        self._is_greeted = greeting is None
        self._writer = FrameWriter(wire.write)
        self._decoder = FrameDecoder()
        self._relayed: deque[Relayed] = deque()
        self.relayed_bytes = 0
        """How much of the store's replies waits to be sent."""
        self._last_words = b""
        self.has_errors = wire.error_fd >= 0

    @property
    def is_writing(self) -> bool:
        """Whether something is still to be written, when the wire takes more."""
        return self._writer.waiting_bytes > 0 or bool(self._relayed)

    def send(self, message: ToAgent) -> None:
        """Send a message; an agent that is gone does not get it."""
        try:
            self._writer.send(encode_control(encode_message(message)))
        except BrokenPipeError:
            return

    def relay(self, relayed: Relayed) -> None:
        """Send what the store says, in pieces between which messages come first."""
        data = relayed.data
        for at in range(0, max(len(data), 1), _RELAYED_BYTES):
            piece = data[at : at + _RELAYED_BYTES]
            self._relayed.append(relayed._replace(data=piece))
        self.relayed_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Write on what the wire did not take before."""
        try:
            self._writer.flush()
            while self._relayed and not self._writer.waiting_bytes:
                relayed = self._relayed.popleft()
                self.relayed_bytes -= len(relayed.data)
                self._writer.send(encode_relayed(relayed))
        except BrokenPipeError:
            return

    def receive(self) -> list[FromAgent | Output | Relayed] | None:
        """Return what has come, None at the end of the wire.

        Raises:
            LaunchError: What came are no frames of an agent.
        """
        data = self.wire.read()
        if data is None:
            return []
        if not data:
            return None
        if self.greeting is not None and not self._is_greeted:
            rest = self.greeting.feed(data)
            if rest is None:
                return []
            self._is_greeted = True
            data = rest
        return [
            decode_message(frame, FROM_AGENT) if isinstance(frame, bytes) else frame
            for frame in self._decoder.feed(data)
        ]

    def read_errors(self) -> bool:
        """Keep the last of what the other side complained of; False at the end."""
        try:
            data = os.read(self.wire.error_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
        self.has_errors = bool(data)
        return bool(data)

    @property
    def last_words(self) -> str:
        """The last of what the other side complained of."""
        return self._last_words.decode("utf-8", "backslashreplace").strip()
