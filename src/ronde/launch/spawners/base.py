"""The interface of what starts a process on another host."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ronde.errors import Failure
from ronde.launch.hosts.host import Host

BOOTSTRAP = "import sys; del sys.path[0]; exec(sys.stdin.buffer.raw.readline(65536))"
"""For ``-E -S -c``: runs the first line of its standard input.

The same for all hosts and jobs, since every user there can read it, and without any
character that a login shell would read as its own. The line is taken byte by byte, so
that nothing behind it is. The first entry of the path is the directory that a login
happens to begin in.
"""
UNKNOWN_NAME = Failure("unknown name", "check the spelling")
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_LONGEST_CHARS = 200


class Spawner(ABC):
    """Builds the command that runs a program on a host, and explains its failures."""

    name: ClassVar[str]
    """The program that does it: ``ssh``, ``srun``, ``mpirun``."""

    @abstractmethod
    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Return the command that runs ``words`` there.

        The command's standard input, output and error are those of the program, byte
        for byte, and end with it.
        """

    @abstractmethod
    def explain(self, host: Host, exit_code: int, said: str) -> Failure:
        """Say why the command ended before the program spoke."""

    def leads_by_name(self, name: str) -> bool:  # noqa: ARG002 - others have their own
        """Whether a host is reached by the address that its name has here, if any."""
        return False


def type_there(program: str, host: Host) -> str:
    """Return what stands before a command that a user wants to run on a host."""
    match program:
        case "srun":
            words = ["srun", "--overlap", "-N1", "-n1", "-w", host.name]
        case "mpirun":
            words = ["mpirun", "--host", host.name, "-n", "1"]
        case _:
            words = ["ssh", *type_login(host)]
    return shlex.join(words)


def type_login(host: Host) -> list[str]:
    """Return the words by which ssh and ssh-copy-id are told of a host."""
    port = ["-p", str(host.port)] if host.port else []
    return [*port, f"{host.user}@{host.name}" if host.user else host.name]


def last_line(said: str) -> str:
    """Return the last thing that was said, fit to be shown on one line; or empty."""
    lines = ["".join(filter(str.isprintable, line)) for line in said.splitlines()]
    told = [line.strip() for line in lines if line.strip()]
    return told[-1][:_LONGEST_CHARS] if told else ""


def explain_program(exit_code: int, said: str) -> Failure:
    """Say why a host was reached, but the program there did not begin."""
    last = last_line(said)
    # csh says it with exit code 1.
    is_missing = exit_code == _NOT_FOUND or last.endswith(": Command not found.")
    if is_missing or (exit_code == _NOT_EXECUTABLE and last):
        return Failure(
            f"its Python cannot be run: {last or 'it is not there'}",
            "name the one there with --python",
        )
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return Failure(
        f"no agent began ({how}): {last or 'and nothing was said'}",
        "run a command there by hand and see what it says",
    )
