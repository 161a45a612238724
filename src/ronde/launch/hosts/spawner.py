"""Common interface for ssh and srun, and the first message of a remote Python."""

import json
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import ronde
from ronde.errors import Failure, LaunchError
from ronde.launch.host import Host
from ronde.plain_values import PlainValueError, from_plain

BOOTSTRAP = "import sys; del sys.path[0]; exec(sys.stdin.buffer.raw.readline(65536))"
"""For ``-E -S -c``: runs the first line of standard input.

It holds no secret, since every user there can read it, and no special character of a
shell. The line is read byte by byte, so that the rest stays for the agent. The deleted
entry of the path is the login's directory.
"""
UNKNOWN_NAME = Failure("unknown name", "check the spelling")
NO_ANSWER = "no answer from it"  # the beginning of a reason
MAX_NOISE_BYTES = 64 << 10  # of a login's output before the hello; the latest
MAX_HELLO_BYTES = 8 << 10
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_LONGEST_CHARS = 200


class Spawner(ABC):
    """Builds the command that runs a program on a host, and explains its failures."""

    name: ClassVar[str]  # of the program: ``ssh`` or ``srun``

    @abstractmethod
    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Return the command that runs ``words``, without secrets, on a host."""

    @abstractmethod
    def explain(self, host: Host, exit_code: int, errors: str) -> Failure:
        """Return the reason why the command exited before the hello message."""

    def explain_silence(self, host: Host) -> Failure | None:  # noqa: ARG002
        """Find the reason why a connected host sends nothing; may take seconds."""
        return None


def shell_command(program: str, host: Host) -> str:
    if program == "srun":
        return shlex.join(["srun", "--overlap", "-N1", "-n1", "-w", host.name])
    return shlex.join(["ssh", *ssh_destination(host)])


def ssh_destination(host: Host) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    return [*port, f"{host.user}@{host.name}" if host.user else host.name]


def last_line(text: str) -> str:
    lines = ["".join(filter(str.isprintable, line)) for line in text.splitlines()]
    kept = [line.strip() for line in lines if line.strip()]
    return kept[-1][:_LONGEST_CHARS] if kept else ""


def explain_program(exit_code: int, errors: str) -> Failure:
    last = last_line(errors)
    # csh reports it with exit code 1.
    is_missing = exit_code == _NOT_FOUND or last.endswith(": Command not found.")
    if is_missing or (exit_code == _NOT_EXECUTABLE and last):
        return Failure(
            f"its Python cannot be run: {last or 'it is not there'}",
            "name the one there with --python",
        )
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return Failure(
        f"no agent began ({how}): {last or 'no output'}",
        "run a command there by hand and read its output",
    )


class RemotePython(NamedTuple):
    """Versions of Python and ronde on a host, as ``remote_bootstrap`` sends them."""

    python: str  # version of the Python there: ``3.11.2``
    executable: str
    ronde: str  # version of ronde there; empty where it cannot be imported
    import_error: str

    def problem(self, host: Host, program: str) -> Failure | None:
        """Return the reason why this Python cannot run an agent; None if it can."""
        here = "{}.{}".format(*sys.version_info[:2])
        there = ".".join(self.python.split(".")[:2])
        if here != there:
            return Failure(
                f"its Python is {self.python} ({self.executable}), here it is {here}",
                f"name a Python {here} there with --python",
            )
        if self.ronde == ronde.__version__:
            return None
        cure = _copy_ronde(shell_command(program, host), self.executable)
        if self.ronde:
            return Failure(
                f"its ronde is {self.ronde}, here it is {ronde.__version__}", cure
            )
        if self.import_error.startswith("ModuleNotFoundError: No module named 'ronde'"):
            return Failure(f"ronde is missing for {self.executable}", cure)
        return Failure(f"its ronde cannot be imported: {self.import_error}", cure)


def _copy_ronde(shell: str, python: str) -> str:
    package = Path(ronde.__file__).parent
    where = '-c "import site; print(*site.getsitepackages()[:1])"'
    there = f'tar -xz -C "$({shlex.quote(python)} {where})"'
    here = shlex.join(["tar", "-C", str(package.parent), "-cz", package.name])
    return f"{here} | {shell} {shlex.quote(there)}"


class HelloReader:
    """Skips the login shell's output up to a sentinel, then reads the hello message."""

    def __init__(self, program: str, sentinel: bytes) -> None:
        self.found: RemotePython | None = None
        self.noise = b""
        self.program = program
        self._sentinel = sentinel
        self._received = b""

    def feed(self, data: bytes) -> bytes | None:
        self._received += data
        noise, is_found, after = self._received.partition(self._sentinel)
        self.noise = noise[-MAX_NOISE_BYTES:]
        if not is_found:
            self._received = self.noise
        hello, is_whole, after = after.partition(b"\n")
        if len(hello) > MAX_HELLO_BYTES:
            raise LaunchError(
                f"hello from the remote Python is longer than {MAX_HELLO_BYTES} bytes."
            )
        if not is_whole:
            return None
        try:
            found = from_plain(RemotePython, json.loads(hello))
        except PlainValueError:
            raise LaunchError(
                "hello from the remote Python must have the fields "
                f"{', '.join(RemotePython._fields)}, got {hello!r:.80}."
            ) from None
        except (ValueError, RecursionError) as error:
            raise LaunchError(
                f"hello from the remote Python is not JSON: {error}."
            ) from None
        # Remove control characters: they are shown on a terminal.
        texts = ("".join(filter(str.isprintable, text)) for text in found)
        self.found = RemotePython._make(texts)
        return after
