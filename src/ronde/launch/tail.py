"""The last lines of a stream."""

_KEPT_BYTES = 32 << 10


class Tail:
    """Remembers the end of what a rank wrote.

    Args:
        num_lines: Lines to remember.
    """

    def __init__(self, num_lines: int = 20) -> None:
        self._num_lines = num_lines
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self._kept += data
        if len(self._kept) > 2 * _KEPT_BYTES:
            del self._kept[:-_KEPT_BYTES]

    def lines(self) -> tuple[str, ...]:
        """Return the last lines, of each what a progress bar left on the screen."""
        lines = bytes(self._kept[-_KEPT_BYTES:]).split(b"\n")
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        if not shown[-1]:
            shown.pop()
        return tuple(
            line.decode("utf-8", "backslashreplace")
            for line in shown[-self._num_lines :]
        )
