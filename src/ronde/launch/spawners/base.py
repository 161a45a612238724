"""The interface of what starts a process on another host."""

from collections.abc import Sequence
from typing import Protocol

from ronde.errors import Failure
from ronde.launch.hosts.host import Host


class Spawner(Protocol):
    """Builds the command that runs a program on a host, and explains its failures."""

    @property
    def name(self) -> str:
        """The program that does it: ``ssh``, ``srun``, ``mpirun``."""
        ...

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """Return the command that runs ``words`` there.

        The command's standard input, output and error are those of the program, byte
        for byte, and end with it.

        Args:
            host: Where.
            words: Program and arguments, quoted by nobody yet. They hold no secret:
                every user there can read them.
        """
        ...

    def leads_by_name(self, name: str) -> bool:
        """Whether a host is reached by the address that its name has here, if any.

        Args:
            name: Of one of many hosts; the answer is for all of them.
        """
        ...

    def explain(self, host: Host, exit_code: int, said: str) -> Failure:
        """Say why the command ended before the program spoke.

        Args:
            host: Where.
            exit_code: The command's, minus the signal's number for a signal.
            said: What it wrote to standard error, and what it wrote to standard output
                before the program spoke.
        """
        ...
