"""The program's folder, copied to hosts that share no file system with this one.

It travels as one tar archive. Nothing is deleted there.
"""

import os
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from ronde.errors import Failure, HostError, HostFailure, UsageError
from ronde.launch.host import Host
from ronde.launch.hosts.spawner import Spawner, last_line
from ronde.launch.program import absolute_path
from ronde.launch.signals import raise_if_stopped, wait_for
from ronde.processes import end_with
from ronde.units import format_size

EXCLUDED = frozenset({".git", "__pycache__", ".venv"})
"""Files and folders of these names stay here, wherever they are."""
MAX_COPYING = 16  # hosts that are copied to at a time
_LAST_BYTES = 64 << 10
_POLL_S = 0.02
_SSH_FAILED = 255
_TAR_SUMMARIES = ("tar: Exiting", "tar: Error")
_UNPACK = 'mkdir -p "$0" && cd "$0" && exec tar -xof -'


class _Copy(NamedTuple):
    host: Host
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]

    def printed(self) -> str:
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - _LAST_BYTES))
        return self.output.read().decode("utf-8", "backslashreplace")


def sync_folder(
    folder: str, hosts: Sequence[Host], spawner: Spawner, signal_fd: int
) -> str:
    """Copy a folder to all hosts; return a summary."""
    began_s = time.monotonic()
    path = absolute_path(folder)
    if not path.is_dir():
        raise UsageError(
            f"--sync must be a folder, got {folder!r}. Name that of the program."
        )
    try:
        with tempfile.TemporaryFile() as archive:
            sizes = _pack(path, archive, signal_fd)
            copied = _copy_to_all(path, hosts, spawner, archive, signal_fd)
    except OSError as error:
        raise UsageError(
            f"--sync must be a folder that can be read, got {folder!r} ({error}). "
            "Name that of the program."
        ) from None
    failures = [
        HostFailure(each.host.name, _explain(each, spawner))
        for each in copied
        if each.process.returncode
    ]
    if failures:
        message = f"{len(failures)} of {len(hosts)} hosts did not get {path}."
        failed = {failure.host for failure in failures}
        ready = [host.name for host in hosts if host.name not in failed]
        raise HostError(message, failures, ready)
    return (
        f"{len(sizes)} files, {format_size(sum(sizes))}, copied to {len(hosts)} hosts "
        f"in {time.monotonic() - began_s:.1f} s"
    )


def _explain(copied: _Copy, spawner: Spawner) -> Failure:
    code, printed = copied.process.returncode, copied.printed()
    if code == _SSH_FAILED:
        return spawner.explain(copied.host, code, printed)
    lines = [x for x in printed.splitlines() if not x.startswith(_TAR_SUMMARIES)]
    last = last_line("\n".join(lines)) or f"exit code {code}"
    return Failure(f"not copied: {last}", "see the space and the rights there")


def _pack(path: Path, archive: IO[bytes], signal_fd: int) -> list[int]:
    """Return the sizes of all that is no folder."""
    sizes: list[int] = []

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        raise_if_stopped(signal_fd)
        if Path(entry.name).name in EXCLUDED:
            return None
        if not entry.isdir():
            sizes.append(entry.size)
        return entry

    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(path, arcname=".", filter=keep)
    archive.flush()
    return sizes


def _copy(host: Host, words: Sequence[str], archive: IO[bytes]) -> _Copy:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the copy has ended
    # Opened anew, for each reads at a place of its own.
    with Path(f"/proc/self/fd/{archive.fileno()}").open("rb") as given:
        process = subprocess.Popen(
            words,
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The controller has one thread: code after the fork is safe.
            preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
        )
    return _Copy(host, process, output)


def _copy_to_all(
    path: Path,
    hosts: Sequence[Host],
    spawner: Spawner,
    archive: IO[bytes],
    signal_fd: int,
) -> list[_Copy]:
    unpack = ["sh", "-c", _UNPACK, str(path)]
    waiting, running, done = list(reversed(hosts)), list[_Copy](), list[_Copy]()
    try:
        while waiting or running:
            while waiting and len(running) < MAX_COPYING:
                host = waiting.pop()
                running.append(_copy(host, spawner.command(host, unpack), archive))
            if wait_for([signal_fd], [], _POLL_S):
                raise_if_stopped(signal_fd)
            done += [each for each in running if each.process.poll() is not None]
            running = [each for each in running if each.process.returncode is None]
    finally:
        for each in running:
            os.killpg(each.process.pid, signal.SIGTERM)
            each.process.wait()
    return done
