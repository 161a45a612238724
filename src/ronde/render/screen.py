"""A terminal with lines that scroll and, below them, progress bars that stay."""

import os

from ronde.render.channel import Channel

_MAX_BARS = 8
_RESERVED_ROWS = 2


class Screen:
    """Lines and bars on one terminal.

    Args:
        channel: The terminal.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._bars: dict[tuple[int, int], bytes] = {}
        self._num_drawn = 0

    def print(self, text: bytes) -> None:
        """Scroll whole lines in above the bars."""
        self._channel.put(self._erased() + text + self._drawn())

    def set_bar(self, key: tuple[int, int], text: bytes | None) -> None:
        """Show, change or, with None, take away one bar; bars are ordered by key."""
        if self._bars.get(key) == text:
            return
        if text is None:
            del self._bars[key]
        else:
            self._bars[key] = text
        self._channel.put(self._erased() + self._drawn())

    def _erased(self) -> bytes:
        if not self._num_drawn:
            return b""
        up = b"\x1b[%dA" % (self._num_drawn - 1) if self._num_drawn > 1 else b""
        self._num_drawn = 0
        return b"\r" + up + b"\x1b[J"

    def _drawn(self) -> bytes:
        if not self._bars:
            return b""
        columns, rows = self._size()
        num_bars = max(1, min(_MAX_BARS, rows - _RESERVED_ROWS))
        keys = sorted(self._bars)[:num_bars]
        self._num_drawn = len(keys)
        # One column less: a full line would make the terminal wrap.
        cut = [self._bars[k].decode()[: columns - 1].encode() for k in keys]
        return b"\n".join(cut)

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._channel.fd)
        except OSError:
            columns, rows = 0, 0
        # A terminal that nobody told its size says 0.
        return columns or 80, rows or 24
