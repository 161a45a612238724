"""Programs on other hosts by one ``mpirun`` a host: Open MPI 5 or MPICH's Hydra.

How ``mpirun`` itself reaches a host, by ssh or by a cluster's own means, is its own
business. No ``mpirun`` passes bytes as they are: see ``line_tunnel``.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from ronde.errors import Failure, UsageError
from ronde.launch.hosts.host import Host
from ronde.launch.program import find_executable
from ronde.launch.spawners.base import BOOTSTRAP, Spawner, explain_program, last_line
from ronde.launch.spawners.ssh import explain_connection

_VERSION_S = 10.0
_FERRY = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from ronde.launch.spawners.line_tunnel import main; main()"
)
_NO_PROGRAM = ("access an executable", "execvp error on file")
_CURE = "Install Open MPI 5 or MPICH, or choose another --launcher."


class MpiSpawner(Spawner):
    """Starts programs by ``mpirun``."""

    name = "mpirun"

    def __init__(self, mpirun: str, python: str, ssh_args: Sequence[str] = ()) -> None:
        self._mpirun = mpirun
        self._python = python
        self._ssh_args = tuple(ssh_args)

    @cached_property
    def _is_hydra(self) -> bool:
        try:
            done = subprocess.run(
                [self._mpirun, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_VERSION_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"mpirun must say its version, got nothing from {self._mpirun!r} "
                f"within {_VERSION_S:g} s. {_CURE}"
            ) from None
        if "HYDRA" in done.stdout:
            return True
        if "(Open MPI) 5." in done.stdout:
            return False
        raise UsageError(
            f"mpirun must be Open MPI's, version 5, or MPICH's, got {self._mpirun!r}, "
            f"which says {last_line(done.stdout + done.stderr)!r}. {_CURE}"
        )

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        package_dir = str(Path(__file__).parents[3])
        near = [sys.executable, "-I", "-S", "-c", _FERRY, package_dir]
        call = f"tunnel_remote({list(words)!a})"
        far = [self._python, "-E", "-S", "-c", BOOTSTRAP]
        launcher = self._hydra(host) if self._is_hydra else self._open_mpi(host)
        return [*near, call, *launcher, *far]

    def _open_mpi(self, host: Host) -> list[str]:
        ssh_args = self._ssh_words(host)
        return [
            self._mpirun,
            *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
            *(["--prtemca", "plm_ssh_args", ssh_args] if ssh_args else []),
            *("--host", f"{host.name}:1", "-n", "1"),
            *("--bind-to", "none", "--wdir", "/"),
        ]

    def _hydra(self, host: Host) -> list[str]:
        ssh_args = self._ssh_words(host)
        return [
            *(["env", f"HYDRA_LAUNCHER_EXTRA_ARGS={ssh_args}"] if ssh_args else []),
            self._mpirun,
            *("-hosts", host.name, "-n", "1"),
            *("-bind-to", "none", "-wdir", "/"),
            "-genvnone",  # else it hands over all of ours, secrets too, by open TCP
        ]

    def _ssh_words(self, host: Host) -> str:
        port = ["-p", str(host.port)] if host.port else []
        user = ["-l", host.user] if host.user else []
        return shlex.join([*self._ssh_args, *port, *user])

    def explain(self, host: Host, exit_code: int, complaints: str) -> Failure:
        if any(words in complaints for words in _NO_PROGRAM):
            return Failure(
                f"its Python is not there: {self._python}",
                "name the one there with --python",
            )
        told = "\n".join(line for line in complaints.splitlines() if line.strip("-"))
        return explain_connection(host, told) or explain_program(exit_code, told)


def find_mpirun(search_path: str) -> str:
    """Return the path of ``mpirun``: on the search path, or beside this Python."""
    beside = str(Path(sys.executable).parent)
    if found := find_executable("mpirun", *search_path.split(os.pathsep), beside):
        return found
    raise UsageError(
        f"mpirun must be installed for --launcher mpi, got none on PATH. {_CURE}"
    )
