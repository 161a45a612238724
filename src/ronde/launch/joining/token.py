"""The secret that all nodes of a job are given, and where it is read from."""

import hmac
import os
import stat

from ronde.errors import UsageError

MIN_CHARACTERS = 32
"""A token with fewer could be guessed by who has seen one proof of it."""

_MAX_BYTES = 4096
_FOR_OTHERS = stat.S_IROTH | stat.S_IWOTH
_MAKE_ONE = "Make one: (umask 077; openssl rand -hex 32 > token)"


class Token:
    """A shared secret that signs, and that nothing else can be done with.

    Args:
        key: The secret; it appears in no representation of this object.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of the parts, none of which can run into the next."""
        framed = (len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, b"".join(framed), "sha256")


def read_token(path: str) -> Token:
    """Read the token from a file, or from standard input where the path is ``-``.

    Raises:
        UsageError: There is no such file, others may read it, or what is in it is no
            token.
    """
    text = _read(path).strip()
    if len(text) < MIN_CHARACTERS:
        raise UsageError(
            f"token in {path!r} must have at least {MIN_CHARACTERS} characters, "
            f"got {len(text)}. {_MAKE_ONE}"
        )
    if len(text) > _MAX_BYTES or any(not 33 <= byte <= 126 for byte in text):
        raise UsageError(
            f"token in {path!r} must be one word of at most {_MAX_BYTES} ASCII "
            f"characters, got something else. {_MAKE_ONE}"
        )
    return Token(text)


def _read(path: str) -> bytes:
    if path == "-":
        return _read_some(0)
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"--token-file must be a file that can be read, got {path!r}: "
            f"{error.strerror}. {_MAKE_ONE}"
        ) from None
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_mode & _FOR_OTHERS:
            raise UsageError(
                f"--token-file must not be open to every user, got {path!r} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}. Type: chmod 600 {path} (for a "
                "secret of Kubernetes: defaultMode: 0440)"
            )
        return _read_some(fd)
    finally:
        os.close(fd)


def _read_some(fd: int) -> bytes:
    """Read to the end, or so much that it can be no token."""
    read = b""
    try:
        while len(read) <= 2 * _MAX_BYTES:
            data = os.read(fd, _MAX_BYTES)
            if not data:
                break
            read += data
    except OSError as error:
        raise UsageError(
            f"--token-file must be a file that can be read: {error.strerror}."
        ) from None
    return read
