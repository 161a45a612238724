"""Hosts that a command prints or a host file holds: once, and while a job runs.

Note [Which answers count]
    New hosts and more slots count at once. A host that is missing, or has fewer slots,
    counts so after the second such answer in a row: one that comes and goes every
    second changes nothing. Hosts keep their order, and new ones come last. An answer
    that cannot be read, or names no host, is refused as a whole: the last one stays.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import IO

from ronde.errors import UsageError
from ronde.launch.elastic_options import DiscoverySpec, ElasticOptions
from ronde.launch.host import SLOTS_OPEN, Host, is_here, take_each
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
_SETTLE_S = 0.2  # until a file that has changed is read again
_QUIET_S = 60.0  # between two notices of one kind
_MAX_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MAX_ERROR_CHARS = 400
_CLOSE_S = 1.0


class HostChanges:
    """The hosts that count, from answer to answer: see Note [Which answers count]."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = tuple(hosts)
        self._shrunk: set[str] = set()  # of the last answer, not counted yet

    def take(self, answer: Sequence[Host]) -> tuple[Host, ...] | None:
        """Return the hosts that count now; None if they are the same as before."""
        found = {host.name: host for host in answer}
        shrunk: set[str] = set()
        kept: list[Host] = []
        for host in self.hosts:
            now = found.pop(host.name, None)
            if _is_less(now, host) and host.name not in self._shrunk:
                shrunk.add(host.name)
                now = host
            if now is not None:
                # Where it stands is no difference.
                kept.append(now._replace(named_at=host.named_at))
        hosts, self._shrunk = (*kept, *found.values()), shrunk
        is_same, self.hosts = hosts == self.hosts, hosts
        return None if is_same else hosts


def _is_less(now: Host | None, before: Host) -> bool:
    least = before.slots if before.slots >= 0 else 1
    return now is None or 0 <= now.slots < least


class Discovery:
    """Fixed hosts, and the base of the kinds that ask for them.

    ``advance`` is to be called when one of ``fds`` can be read, and at ``due_s``
    (monotonic). It never waits. A host with 0 slots is to be left.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._changes = HostChanges(hosts)
        self.due_s = inf
        self.notices: list[str] = []  # for the user; who shows them takes them out
        self._noticed: dict[str, tuple[str, float]] = {}

    @property
    def fds(self) -> tuple[int, ...]:
        return ()

    def advance(self, now_s: float) -> tuple[Host, ...] | None:  # noqa: ARG002
        """Return all hosts where they have changed, else None."""
        return None

    def close(self) -> None:
        """End a command that runs."""

    def _notice(self, kind: str, text: str, now_s: float) -> None:
        last, quiet_until_s = self._noticed.get(kind, ("", -inf))
        if text != last and now_s >= quiet_until_s:
            self._noticed[kind] = (text, now_s + _QUIET_S)
            self.notices.append(text)


class _Asking(Discovery):
    """Asks again and again, by ``ask``."""

    def __init__(
        self, spec: DiscoverySpec, hosts: Sequence[Host], every_s: float, now_s: float
    ) -> None:
        super().__init__(hosts)
        self._spec, self._every_s = spec, every_s
        self.due_s = now_s + every_s
        self._ports = {host.name: host.port for host in hosts}
        self._text: str | None = None
        self._answer: tuple[Host, ...] = ()
        self._doubles: tuple[str, ...] = ()

    def ask(self, now_s: float) -> bytes | None:
        """Return an answer, None while there is none; ``UsageError`` for no answer."""
        raise NotImplementedError

    def advance(self, now_s: float) -> tuple[Host, ...] | None:
        try:
            data = self.ask(now_s)
            if data is None:
                return None
            self.parse(data)
        except UsageError as error:
            text = str(error)[:_MAX_ERROR_CHARS].rstrip(".")
            self._notice("refused", f"{text}. Until then the hosts stay.", now_s)
            return None
        # The same fault is news again then, but not at once.
        self._noticed["refused"] = ("", self._noticed.get("refused", ("", -inf))[1])
        if self._doubles:
            self._notice("doubles", " ".join(self._doubles), now_s)
        return self._changes.take(self._answer)

    def parse(self, data: bytes) -> tuple[Host, ...]:
        spec = self._spec
        where = spec.source if spec.is_file else f"{spec.option} {spec.source}"
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{where} must be text in UTF-8, but {error}. Correct it."
            ) from None
        if text == self._text:
            return self._answer
        hosts, doubles = merge_repeated(
            parse_lines(text, where), is_counted=spec.is_file
        )
        self._answer = take_each([self._complete(h) for h in hosts], spec.num_each)
        self._text, self._doubles = text, doubles
        return self._answer

    def _complete(self, host: Host) -> Host:
        # No name is looked up here: that may take seconds.
        spec, is_own = self._spec, is_here(host, ())
        if spec.is_local and not is_own and host.name not in self._ports:
            raise UsageError(
                f"{host.named_at}: hosts must be this machine alone with --standalone, "
                f"and so in horovod.run(), got {host.name}. Leave it out."
            )
        port = host.port or self._ports.get(host.name, 0 if is_own else spec.ssh_port)
        slots = spec.slots if host.slots == SLOTS_OPEN else host.slots
        return host._replace(slots=slots, port=port)


class _Command(_Asking):
    """Hosts that a command prints; it runs again some time after it has ended."""

    limit_s = _COMMAND_LIMIT_S
    errors: int | None = subprocess.PIPE  # what ``Popen`` does with them
    _process: subprocess.Popen[bytes] | None = None
    _ends_by_s = inf

    def __init__(
        self, spec: DiscoverySpec, hosts: Sequence[Host], every_s: float, now_s: float
    ) -> None:
        super().__init__(spec, hosts, every_s, now_s)
        self._pipes: dict[IO[bytes], bytearray] = {}  # output, errors
        self._open: list[IO[bytes]] = []
        self._killed: list[subprocess.Popen[bytes]] = []

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(pipe.fileno() for pipe in self._open)

    def ask(self, now_s: float) -> bytes | None:
        self._reap()
        if self._process is None:
            if now_s >= self.due_s:
                self._start(now_s)
            return None
        code = _exit_code(self._process.pid)
        self._read()
        output, *errors = map(bytes, self._pipes.values())
        is_long = len(output) > _MAX_BYTES
        if code is None and now_s < self._ends_by_s and not is_long:
            self.due_s = min(now_s + _POLL_S, self._ends_by_s)
            return None
        self._kill()
        self.due_s = now_s + self._every_s
        if is_long:
            raise self._fault(f"it prints more than {_MAX_BYTES >> 20} MiB")
        if code is None:
            raise self._fault(f"it takes longer than {self.limit_s:g} s")
        if code:
            last = last_line(b"".join(errors).decode(errors="replace"))
            raise self._fault(f"exit code {code}{last and ': '}{last}")
        return output

    def _fault(self, why: str) -> UsageError:
        return UsageError(
            f"{self._spec.option} must print hosts and end with 0, got "
            f"{self._spec.source!r} ({why}). Run it by hand."
        )

    def close(self) -> None:
        self._kill()
        for process in self._killed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_S)
        self._reap()

    def _start(self, now_s: float) -> None:
        try:
            process = subprocess.Popen(  # noqa: S602  horovodrun takes a command line
                self._spec.source,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                process_group=0,
                # It outlives nobody who could end it.
                preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
            )
        except OSError as error:
            self.due_s = now_s + self._every_s
            raise self._fault(f"{error.strerror}") from None
        self._process = process
        self._ends_by_s = now_s + self.limit_s
        self.due_s = now_s + _POLL_S
        self._open = [pipe for pipe in (process.stdout, process.stderr) if pipe]
        self._pipes = {pipe: bytearray() for pipe in self._open}
        for pipe in self._open:
            os.set_blocking(pipe.fileno(), False)

    def _read(self) -> None:
        output = next(iter(self._pipes))
        for pipe in tuple(self._open):
            data = self._pipes[pipe]
            with suppress(BlockingIOError):
                # What never stops printing is left at some time.
                for _ in range(_MAX_BYTES // _READ_BYTES):
                    read = os.read(pipe.fileno(), _READ_BYTES)
                    data += read
                    if pipe is not output:
                        del data[:-_READ_BYTES]
                    if not read:
                        self._open.remove(pipe)
                        break

    def _kill(self) -> None:
        """Kill the command, its process group and its other descendants."""
        process, self._process = self._process, None
        if process is None:
            return
        if _exit_code(process.pid) is None:
            for child in descendants(process.pid):
                signal_process(child, signal.SIGKILL)
        # It is not reaped yet, so that its number is nobody else's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._open.clear()
        for pipe in self._pipes:
            pipe.close()
        self._killed.append(process)
        self._reap()

    def _reap(self) -> None:
        # This process adopts orphans, which nobody else reaps while the job runs.
        for process in tuple(self._killed):
            try:
                while process.poll() is not None:
                    if not os.waitpid(-process.pid, os.WNOHANG)[0]:
                        break
            except ChildProcessError:
                self._killed.remove(process)


def _exit_code(pid: int) -> int | None:
    """Return how a child has ended, without reaping it; None while it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    is_exit = ended.si_code == os.CLD_EXITED
    return ended.si_status if is_exit else 128 + ended.si_status


class _Hostfile(_Asking):
    """Hosts of a file; its text counts once two readings are the same."""

    _seen: tuple[bytes, str] = b"", "not read yet"

    def ask(self, now_s: float) -> bytes | None:
        if now_s < self.due_s:
            return None
        seen, self._seen = self._seen, _read_file(Path(self._spec.source))
        is_same = seen == self._seen
        self.due_s = now_s + (
            self._every_s if is_same else min(self._every_s, _SETTLE_S)
        )
        data, fault = self._seen
        if is_same and fault:
            raise UsageError(
                f"{self._spec.option} must be a file that can be read, got "
                f"{self._spec.source!r} ({fault}). Check the path."
            )
        return data if is_same else None


def _read_file(path: Path) -> tuple[bytes, str]:
    """Return a file's bytes, or none and the reason."""
    try:
        # Of what is no file reading may never end.
        return (path.read_bytes(), "") if path.is_file() else (b"", "no such file")
    except OSError as error:
        return b"", f"{error.strerror}"


def open_discovery(
    options: ElasticOptions, hosts: Sequence[Host], now_s: float
) -> Discovery:
    """Follow the hosts of a job that starts with ``hosts``, the first answer."""
    spec, every_s = options.discovery, options.discover_every_s
    kind = _Hostfile if spec and spec.is_file else _Command
    return kind(spec, hosts, every_s, now_s) if spec else Discovery(hosts)


def discover(script: str, option: str, timeout_s: float = 60.0) -> tuple[Host, ...]:
    """Run a discovery script once and return the hosts that it prints."""
    others, spec = children(), DiscoverySpec(option, script, is_file=False)
    command = _Command(spec, (), 0.0, 0.0)
    command.limit_s, command.errors = timeout_s, None
    # Signals that end a job do so here: the loop that waits for them comes later.
    with adopting_orphans(), caught_signals() as signal_fd:
        try:
            while (printed := command.ask(time.monotonic())) is None:
                if wait_for([signal_fd, *command.fds], [], _POLL_S):
                    raise_if_stopped(signal_fd)
        except (UsageError, InterruptedStartError):
            command.close()
            sweep(spared=others)
            raise
    return command.parse(printed)
