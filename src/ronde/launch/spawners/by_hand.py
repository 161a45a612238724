"""What a user types, and what a program that failed has said last."""

import shlex

from ronde.errors import Failure
from ronde.launch.hosts.host import Host

UNKNOWN_NAME = Failure("unknown name", "check the spelling")

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_LONGEST_CHARS = 200


def type_there(program: str, host: Host) -> str:
    """Return what stands before a command that a user wants to run on a host.

    Args:
        program: ``ssh``, ``srun`` or ``mpirun``.
        host: Where.
    """
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
    """Say why a host was reached, but the program there did not begin.

    Args:
        exit_code: Of what ran it, minus the signal's number for a signal.
        said: All that was said meanwhile.
    """
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
