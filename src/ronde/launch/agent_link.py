"""The controller's end of one agent: its process, its frames, its last words."""

import os
import select
import subprocess

from ronde.launch.frames import FrameDecoder, FrameWriter, Output, encode_control
from ronde.launch.messages import (
    FROM_AGENT,
    FromAgent,
    ToAgent,
    decode_message,
    encode_message,
)

_READ_BYTES = 256 << 10
_LAST_WORDS_BYTES = 4096


class AgentLink:
    """One agent and the frames to and from it.

    Args:
        process: The agent, started with three pipes and told nothing yet.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        if stdin is None or stdout is None or stderr is None:
            raise AssertionError("the agent was started with three pipes")
        self._files = (stdin, stdout, stderr)
        self._writer = FrameWriter(stdin.fileno())
        self._decoder = FrameDecoder()
        self._last_words = b""
        for file in (stdout, stderr):
            os.set_blocking(file.fileno(), False)

    @property
    def output_fd(self) -> int:
        """Where the agent's frames are read."""
        return self._files[1].fileno()

    @property
    def error_fd(self) -> int:
        """Where the agent's own complaints are read."""
        return self._files[2].fileno()

    @property
    def input_fd(self) -> int | None:
        """The descriptor to wait for when something is still to be written to it."""
        return self._writer.fd if self._writer.waiting_bytes else None

    def send(self, message: ToAgent) -> None:
        """Send a message; an agent that is gone does not get it."""
        try:
            self._writer.send(encode_control(encode_message(message)))
        except BrokenPipeError:
            return

    def flush(self) -> None:
        """Write on what the channel did not take before."""
        try:
            self._writer.flush()
        except BrokenPipeError:
            return

    def receive(self) -> list[FromAgent | Output] | None:
        """Return what has come, None at the end of the channel.

        Raises:
            LaunchError: What came are no frames of an agent.
        """
        try:
            data = os.read(self.output_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        return [
            frame if isinstance(frame, Output) else decode_message(frame, FROM_AGENT)
            for frame in self._decoder.feed(data)
        ]

    def read_errors(self) -> bool:
        """Keep the last of what the agent complained of; False at the end."""
        try:
            data = os.read(self.error_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
        return bool(data)

    @property
    def last_words(self) -> str:
        """The last of what the agent complained of."""
        return self._last_words.decode("utf-8", "backslashreplace").strip()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process's end; True when it ended by itself and well."""
        if self._process.poll() is None:
            process_fd = os.pidfd_open(self._process.pid)
            poll = select.poll()
            poll.register(process_fd, select.POLLIN)
            poll.poll(timeout_s * 1000)
            os.close(process_fd)
        return self._process.poll() == 0

    def close(self) -> None:
        """Close the channel; an agent that still lives kills all and ends."""
        for file in self._files:
            file.close()
