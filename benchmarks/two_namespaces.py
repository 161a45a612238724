"""Two network namespaces that stand for two machines, joined by a slow line.

Needs root. What was made is taken away again: processes, namespaces, and the line with
them. Only SIGKILL leaves them; ``ip netns del`` then takes a namespace away.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_GRACE_S = 5.0
_BURST = "128kb"
_QUEUE = "50ms"


class LineError(Exception):
    """The namespaces cannot be made here."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of the line.

    Attributes:
        namespace: Its name.
        interface: The line's end in it.
        address: The end's address.
    """

    namespace: str
    interface: str
    address: str

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[str]":
        """Start a program here, under a host name of its own."""
        naming = 'hostname "$1" && shift && exec "$@"'
        here = ("ip", "netns", "exec", self.namespace, "unshare", "--uts")
        return subprocess.Popen(
            (*here, "sh", "-c", naming, "sh", self.namespace, *command),
            env=dict(environment) | {"GLOO_SOCKET_IFNAME": self.interface},
            stdout=subprocess.PIPE,
            text=True,
        )


@contextmanager
def joined_namespaces(rate: str) -> Generator[tuple[Side, Side]]:
    """Make two namespaces and a line; take them away at the end.

    Args:
        rate: What ``tc`` is to let through each way, such as ``1gbit``.

    Raises:
        LineError: This is no root, or the kernel or the tools do not allow it.
    """
    if os.geteuid() != 0:
        raise LineError("user must be root to make network namespaces, got another.")
    name = f"ronde-line-{os.getpid()}"
    sides = (
        Side(f"{name}-a", f"rl{os.getpid()}a", "10.213.7.1"),
        Side(f"{name}-b", f"rl{os.getpid()}b", "10.213.7.2"),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        _join(sides, rate)
        yield sides
    finally:
        # A second Ctrl-C shall not leave half of it behind.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for side in sides:
            _kill_all(side.namespace)
            deletion = ("ip", "netns", "del", side.namespace)
            subprocess.run(deletion, check=False, capture_output=True)
        signal.signal(signal.SIGINT, previous)


@contextmanager
def ended(processes: "Sequence[subprocess.Popen[str]]") -> Generator[None]:
    """Kill remaining processes at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(_GRACE_S)
            if process.stdout is not None:
                process.stdout.close()


def _kill_all(namespace: str) -> None:
    """End all processes there: a signal may have come in the middle of a start."""
    asking = ("ip", "netns", "pids", namespace)
    listed = subprocess.run(asking, check=False, capture_output=True, text=True)
    for word in listed.stdout.split():
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(int(word), signal.SIGKILL)
            os.waitpid(int(word), 0)


def _join(sides: tuple[Side, Side], rate: str) -> None:
    for side in sides:
        _run("ip", "netns", "add", side.namespace)
    one, other = sides
    _run(
        "ip", "link", "add", one.interface, "netns", one.namespace, "type", "veth",
        "peer", "name", other.interface, "netns", other.namespace,
    )  # fmt: skip
    for side in sides:
        ip = ("ip", "-n", side.namespace)
        _run(*ip, "address", "add", f"{side.address}/24", "dev", side.interface)
        _run(*ip, "link", "set", "lo", "up")
        _run(*ip, "link", "set", side.interface, "up")
        _run(
            "tc", "-n", side.namespace, "qdisc", "add", "dev", side.interface, "root",
            "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE,
        )  # fmt: skip


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LineError(
            f"{words[0]} must be installed, got none. Debian: apt-get install iproute2."
        ) from error
    except subprocess.CalledProcessError as error:
        raise LineError(f"{' '.join(words)} failed: {error.stderr.strip()}") from error


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)
