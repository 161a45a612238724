"""The head's end of the connection to a node that has joined, as a wire."""

import select
import ssl
import time
from collections.abc import Sequence

from ronde.launch.joining.channel import Channel

_GOODBYE_S = 2.0
_UNANSWERED_S = 20.0
"""Longer than the head gives a silent node."""


class TlsWire:
    """A wire to an agent that a joined node has started; see ``launch.wire.Wire``.

    Args:
        sock: Proven, and non-blocking.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._channel = Channel(sock)
        # A node never stands still; a head does that its user has suspended.
        self._channel.require_answers(_UNANSWERED_S)

    @property
    def read_fd(self) -> int:
        """See ``Wire``."""
        return self._channel.fd

    @property
    def write_fd(self) -> int:
        """See ``Wire``."""
        return self._channel.fd

    @property
    def error_fd(self) -> int:
        """See ``Wire``: the node shows its agent's complaints itself."""
        return -1

    def read(self) -> bytes | None:
        """See ``Wire``."""
        return self._channel.read()

    def write(self, data: memoryview) -> int:
        """See ``Wire``."""
        return self._channel.write(data)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the agent's end.

        Returns:
            Its exit code as the node tells it, 0 where the connection ended without
            one, None when it has not ended in time.
        """
        ends_at = time.monotonic() + timeout_s
        while (data := self._channel.read()) != b"":
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or (data is None and not _is_readable(self.read_fd, left_s)):
                return None
        return self._channel.result or 0

    def close(self) -> None:
        """See ``Wire``; the node still waits for the job's exit code."""
        self._channel.end()

    def kill(self) -> None:
        """See ``Wire``."""
        self._channel.close()

    def tell_result(self, code: int) -> None:
        """Tell the node how the job ended: with this exit code it ends itself."""
        self._channel.tell_result(code)


def dismiss(wires: Sequence[TlsWire], code: int) -> None:
    """Tell all nodes the job's exit code and let them go.

    It waits a little for their end: a connection that is closed while something of
    theirs is unread is reset, and what they were told is lost.
    """
    for wire in wires:
        wire.tell_result(code)
    ends_at = time.monotonic() + _GOODBYE_S
    for wire in wires:
        if wire.read_fd >= 0:
            wire.wait(max(0.0, ends_at - time.monotonic()))
        wire.kill()


def _is_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
