"""What a host's own name resolves to, as Gloo and others ask before they listen."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ronde.check.facts import Value
from ronde.topology.kernel_files import read_text

TIMEOUT_S = 2.0

Resolve = Callable[[str], list[str]]
"""Returns the numeric addresses of a name, the first to be tried first."""


class OwnName(NamedTuple):
    """A look-up under way, in a thread: a name server may never answer.

    Attributes:
        name: The host's own.
        thread: Ends when there is an answer.
        told: Gets ``addresses`` or ``error``.
    """

    name: str
    thread: threading.Thread
    told: dict[str, Value]

    @classmethod
    def look_up(cls, root: str, resolve: Resolve | None = None) -> "OwnName":
        """Begin to ask for the host's own name.

        Args:
            root: Of a saved tree, of which ``etc/hosts`` alone is asked; empty for
                this host, which asks what the C library asks.
            resolve: Asks instead.
        """
        name = read_text(f"{root}/proc/sys/kernel/hostname") or socket.gethostname()
        chosen = resolve or (_resolve if not root else _reader(root))
        told: dict[str, Value] = {}

        def ask() -> None:
            try:
                told["addresses"] = chosen(name)
            except (OSError, UnicodeError) as error:
                told["error"] = getattr(error, "strerror", None) or str(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return cls(name, thread, told)

    def wait(self, timeout_s: float = TIMEOUT_S) -> dict[str, Value]:
        """Return ``name``, ``addresses`` in their order, and ``error``, else empty."""
        self.thread.join(timeout_s)
        late = {"error": f"no answer within {timeout_s:g} s"}
        return {
            "name": self.name,
            "addresses": list[str](),
            "error": "",
            **(self.told or late),
        }


def _resolve(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _reader(root: str) -> Resolve:
    def resolve(name: str) -> list[str]:
        found: list[str] = []
        for line in Path(f"{root}/etc/hosts").read_text(errors="replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            if name in names:
                found.append(address)
        if not found:
            raise OSError(0, "it is not in /etc/hosts")
        return found

    return resolve
