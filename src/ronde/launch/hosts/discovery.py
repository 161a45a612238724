"""Find hosts by a command or a host file, once or while a job runs.

Note [Changes of the host list]
    New hosts and slots are used at once. A host or slot is dropped only if two answers
    in a row lack it, so that a host that comes and goes changes nothing. Hosts keep
    their order, and new ones come last. An answer that is malformed, or names no host,
    is refused as a whole, and the last valid answer stays in force.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.elastic_options import DiscoverySpec, ElasticOptions
from ronde.launch.host import SLOTS_OPEN, Host, is_here, limit_slots
from ronde.launch.hosts.sources import merge_repeated, parse_lines
from ronde.launch.hosts.spawner import last_line
from ronde.launch.signals import (
    InterruptedStartError,
    caught_signals,
    raise_if_stopped,
    wait_for,
)
from ronde.processes import (
    adopting_orphans,
    children,
    descendants,
    end_with,
    signal_process,
    sweep,
)

_COMMAND_LIMIT_S = 10.0
_POLL_S = 0.05
_SETTLE_S = 0.2  # until a changed file is read again
_QUIET_S = 60.0  # between two notices of one kind
_MAX_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 16
_MAX_ERROR_CHARS = 400
_CLOSE_S = 1.0


class HostChanges:
    """The hosts in use, updated by each answer: see Note [Changes of the host list]."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = tuple(hosts)
        self._shrunk: set[str] = set()  # in the last answer only

    def update(self, answer: Sequence[Host]) -> tuple[Host, ...] | None:
        """Return the hosts to use from now on; None if nothing changed."""
        found = {host.name: host for host in answer}
        shrunk: set[str] = set()
        kept: list[Host] = []
        for host in self.hosts:
            now = found.pop(host.name, None)
            if _is_less(now, host) and host.name not in self._shrunk:
                shrunk.add(host.name)
                now = host
            if now is not None:
                # A host that moved to another line of the file has not changed.
                kept.append(now._replace(named_at=host.named_at))
        hosts, self._shrunk = (*kept, *found.values()), shrunk
        is_same, self.hosts = hosts == self.hosts, hosts
        return None if is_same else hosts


def _is_less(now: Host | None, before: Host) -> bool:
    least = before.slots if before.slots >= 0 else 1
    return now is None or 0 <= now.slots < least


class Discovery:
    """Finds the hosts of a running job.

    Call ``advance``, which never blocks, at the monotonic time ``due_s``.
    """

    def __init__(
        self,
        spec: DiscoverySpec | None,
        hosts: Sequence[Host],
        source: "_Source | None",
    ) -> None:
        self._spec, self._source = spec, source
        self._changes = HostChanges(hosts)
        self._ports = {host.name: host.port for host in hosts}
        self._last: tuple[bytes | None, tuple[Host, ...]] = None, ()
        self.notices: list[str] = []  # for the user; the caller removes them
        self._noticed: dict[str, tuple[str, float]] = {}

    @property
    def due_s(self) -> float:
        return self._source.due_s if self._source else inf

    def advance(self, now_s: float) -> tuple[Host, ...] | None:
        """Return all hosts if any changed; ranks must leave hosts with 0 slots."""
        if self._source is None or self._spec is None:
            return None
        try:
            data = self._source.read(now_s)
            if data is None:
                return None
            if data != self._last[0]:
                hosts, doubles = parse_answer(data, self._spec, self._ports)
                self._last = data, hosts
                if doubles:
                    self._notice("doubles", " ".join(doubles), now_s)
        except UsageError as error:
            text = str(error)[:_MAX_ERROR_CHARS].rstrip(".")
            self._notice("refused", f"{text}. Until then the hosts stay.", now_s)
            return None
        # The same error is reported again if it comes back, but not at once.
        self._noticed["refused"] = ("", self._noticed.get("refused", ("", -inf))[1])
        return self._changes.update(self._last[1])

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _notice(self, kind: str, text: str, now_s: float) -> None:
        last, quiet_until_s = self._noticed.get(kind, ("", -inf))
        if text != last and now_s >= quiet_until_s:
            self._noticed[kind] = (text, now_s + _QUIET_S)
            self.notices.append(text)


def parse_answer(
    data: bytes, spec: DiscoverySpec, ports: Mapping[str, int]
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts in an answer, and a warning for each host named twice."""
    where = spec.source if spec.is_file else f"{spec.option} {spec.source}"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"cannot read {where} as UTF-8: {error}. Correct it."
        ) from None
    hosts, doubles = merge_repeated(parse_lines(text, where), is_counted=spec.is_file)
    completed = [_complete(host, spec, ports) for host in hosts]
    return limit_slots(completed, spec.num_each), doubles


def _complete(host: Host, spec: DiscoverySpec, ports: Mapping[str, int]) -> Host:
    is_own = is_here(host, ())  # without a look-up of the name, which may take seconds
    if spec.is_local and not is_own and host.name not in ports:
        raise UsageError(
            f"{host.named_at}: --standalone and horovod.run() use this machine alone, "
            f"got {host.name}. Leave it out."
        )
    port = host.port or ports.get(host.name, 0 if is_own else spec.ssh_port)
    slots = spec.slots if host.slots == SLOTS_OPEN else host.slots
    return host._replace(slots=slots, port=port)


class _Command:
    """A command that prints hosts, run again ``every_s`` after it has ended."""

    def __init__(
        self,
        spec: DiscoverySpec,
        every_s: float,
        due_s: float,
        limit_s: float = _COMMAND_LIMIT_S,
        *,
        shows_errors: bool = False,
    ) -> None:
        self._spec, self._every_s, self._limit_s = spec, every_s, limit_s
        self._shows_errors = shows_errors
        self.due_s = due_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ends_by_s = inf
        self._output_fd = self._error_fd = -1
        self._killed: list[subprocess.Popen[bytes]] = []

    def read(self, now_s: float) -> bytes | None:
        """Return the command's output if a run has just ended, else None."""
        self._reap()
        if self._process is None:
            if now_s >= self.due_s:
                self._start(now_s)
            return None
        code = _exit_code(self._process.pid)
        sizes = [os.fstat(fd).st_size for fd in (self._output_fd, self._error_fd)]
        is_long = max(sizes) > _MAX_BYTES
        if code is None and now_s < self._ends_by_s and not is_long:
            self.due_s = min(now_s + _POLL_S, self._ends_by_s)
            return None
        output = os.pread(self._output_fd, _MAX_BYTES, 0)
        first = max(0, sizes[1] - _MAX_ERROR_BYTES)
        errors = os.pread(self._error_fd, _MAX_ERROR_BYTES, first)
        self._kill()
        self.due_s = now_s + self._every_s
        if is_long:
            raise self._error(f"it printed more than {_MAX_BYTES >> 20} MiB")
        if code is None:
            raise self._error(f"it took longer than {self._limit_s:g} s")
        if code:
            last = last_line(errors.decode(errors="replace"))
            raise self._error(f"exit code {code}{last and ': '}{last}")
        return output

    def _error(self, why: str) -> UsageError:
        return UsageError(
            f"{self._spec.option}: {self._spec.source!r} failed: {why}. Run it by hand."
        )

    def close(self) -> None:
        self._kill()
        for process in self._killed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_S)
        self._reap()

    def _start(self, now_s: float) -> None:
        self.due_s = now_s + self._every_s
        # Files, not pipes: a process that the command leaves behind delays nothing.
        self._output_fd = os.memfd_create("output")
        self._error_fd = os.memfd_create("errors")
        try:
            self._process = subprocess.Popen(  # noqa: S602 - as in horovodrun
                self._spec.source,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=self._output_fd,
                stderr=None if self._shows_errors else self._error_fd,
                process_group=0,
                preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
            )
        except OSError as error:
            self._close_files()
            raise self._error(f"{error.strerror}") from None
        self._ends_by_s = now_s + self._limit_s
        self.due_s = now_s + _POLL_S

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        is_running = _exit_code(process.pid) is None
        children = list(descendants(process.pid)) if is_running else []
        # First the shell, which reports a child that was killed: "Killed". It is not
        # reaped yet, so its pid is not reused.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            signal_process(child, signal.SIGKILL)
        self._close_files()
        self._killed.append(process)
        self._reap()

    def _close_files(self) -> None:
        os.close(self._output_fd)
        os.close(self._error_fd)

    def _reap(self) -> None:
        # This process adopts orphans: reap those of the group too.
        for process in tuple(self._killed):
            try:
                while process.poll() is not None:
                    if not os.waitpid(-process.pid, os.WNOHANG)[0]:
                        break
            except ChildProcessError:
                self._killed.remove(process)


def _exit_code(pid: int) -> int | None:
    """Return a child's exit code without reaping it; None while it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    is_exit = ended.si_code == os.CLD_EXITED
    return ended.si_status if is_exit else 128 + ended.si_status


class _Hostfile:
    """A host file; a change counts only if two successive reads agree on it."""

    def __init__(self, spec: DiscoverySpec, every_s: float, due_s: float) -> None:
        self._spec, self._every_s, self.due_s = spec, every_s, due_s
        self._seen = b"", "not read yet"

    def read(self, now_s: float) -> bytes | None:
        if now_s < self.due_s:
            return None
        seen, self._seen = self._seen, _read_file(Path(self._spec.source))
        is_same = seen == self._seen
        pause_s = self._every_s if is_same else min(self._every_s, _SETTLE_S)
        self.due_s = now_s + pause_s
        data, problem = self._seen
        if is_same and problem:
            raise UsageError(
                f"{self._spec.option}: cannot read {self._spec.source!r}: {problem}. "
                "Check the path."
            )
        return data if is_same else None

    def close(self) -> None: ...


def _read_file(path: Path) -> tuple[bytes, str]:
    try:
        # Only a regular file: another may never end.
        return (path.read_bytes(), "") if path.is_file() else (b"", "no such file")
    except OSError as error:
        return b"", f"{error.strerror}"


_Source = _Command | _Hostfile


def open_discovery(
    options: ElasticOptions, hosts: Sequence[Host], now_s: float
) -> Discovery:
    """Start the discovery of hosts for a job that begins with ``hosts``."""
    spec, every_s = options.discovery, options.discover_every_s
    if spec is None:
        return Discovery(None, hosts, None)
    kind = _Hostfile if spec.is_file else _Command
    return Discovery(spec, hosts, kind(spec, every_s, now_s + every_s))


def discover(script: str, option: str, timeout_s: float = 60.0) -> tuple[Host, ...]:
    others, spec = children(), DiscoverySpec(option, script, is_file=False)
    command = _Command(spec, 0.0, 0.0, timeout_s, shows_errors=True)
    # The event loop, which handles signals, comes later.
    with adopting_orphans(), caught_signals() as signal_fd:
        try:
            while (printed := command.read(time.monotonic())) is None:
                if wait_for([signal_fd], [], _POLL_S):
                    raise_if_stopped(signal_fd)
        except (UsageError, InterruptedStartError):
            command.close()
            sweep(spared=others)
            raise
    return parse_answer(printed, spec, {})[0]
