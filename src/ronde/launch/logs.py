"""The ranks' output as files: all of it, byte for byte, on the controller's host."""

import os
import time
from collections import OrderedDict
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.frames import Output, Stream
from ronde.launch.report import SCHEMA, describe_end, describe_verdict, replace_json
from ronde.launch.sink import Generation, Sink
from ronde.launch.through import Through
from ronde.launch.verdict import Verdict

_MAX_OPEN = 128
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
_INDEX = "index.json"


def attempt_dir(directory: str, generation: Generation) -> str:
    """Return where the files of one start of all ranks are."""
    return f"{directory}/{generation.job_id}/attempt_{generation.epoch}"


class RankLogs(Through):
    """Writes what each rank says to files of its own before it is shown.

    ``DIR/<job id>/attempt_<epoch>/<rank>/{stdout,stderr}.log`` have the bytes as they
    are, ``index.json`` beside them says what is whose and, in the end, how it ended. A
    file that takes nothing more is given up with one notice for its rank; the job and
    the other files go on. Only the user can read them.

    Args:
        inner: Gets everything, after the files.
        directory: DIR; made where it is not there.
    """

    def __init__(self, inner: Sink, directory: str) -> None:
        super().__init__(inner)
        self._directory = directory
        self._generation: Generation | None = None
        self._started_at_s = 0.0
        self._files = _LogFiles("")
        self._complained: set[int] = set()

    def begin(self, generation: Generation) -> None:
        """Make the files of a generation.

        Raises:
            UsageError: They cannot be made. Of a later generation that is only told.
        """
        self._files.close()
        self._generation = generation
        self._started_at_s = time.time()
        self._complained.clear()
        path = attempt_dir(self._directory, generation)
        self._files = _LogFiles(path)
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            Path(path).parent.mkdir(mode=0o700, exist_ok=True)
            self._files.create(len(generation.hosts))
            self._write_index(None)
        except OSError as error:
            if generation.epoch == 0:
                raise UsageError(
                    "--log-dir must be a directory that can be written, got "
                    f"{self._directory!r} ({error.strerror}). "
                    "Create it or name another."
                ) from None
            self._files.give_up(range(len(generation.hosts)))
            self.notice(f"no log files are written any more: {error.strerror}")
        super().begin(generation)

    def output(self, output: Output, now_s: float) -> None:
        """Write output of a rank, and hand it on."""
        try:
            self._files.write(output)
        except OSError as error:
            if output.rank not in self._complained:
                self._complained.add(output.rank)
                self.notice(
                    f"{output.stream.name.lower()}.log of rank {output.rank} takes "
                    f"nothing more ({error.strerror}); it is shown here only"
                )
        super().output(output, now_s)

    def finished(self, verdict: Verdict) -> None:
        """Close the files and complete the index."""
        self._files.close()
        try:
            self._write_index(verdict)
        except OSError as error:
            self.notice(f"{_INDEX} of the log files lacks the end: {error.strerror}")
        super().finished(verdict)

    def _write_index(self, verdict: Verdict | None) -> None:
        generation = self._generation
        if generation is None:
            return
        ends = {} if verdict is None else {end.rank: end for end in verdict.ends}
        ranks = [
            {
                "rank": rank,
                "host": host,
                **{s.name.lower(): _file_name(rank, s) for s in Stream},
                "end": describe_end(ends[rank]) if rank in ends else None,
            }
            for rank, host in enumerate(generation.hosts)
        ]
        content = {
            "schema": SCHEMA,
            "job_id": generation.job_id,
            "epoch": generation.epoch,
            "started_at": _utc(self._started_at_s),
            "ended_at": None if verdict is None else _utc(time.time()),
            "ranks": ranks,
            "verdict": None if verdict is None else describe_verdict(verdict),
        }
        replace_json(f"{attempt_dir(self._directory, generation)}/{_INDEX}", content)


class _LogFiles:
    """The files of one generation, some of them open.

    Args:
        directory: Where they are.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._open: OrderedDict[tuple[int, Stream], int] = OrderedDict()
        self._given_up: set[tuple[int, Stream]] = set()

    def create(self, num_ranks: int) -> None:
        """Make all files, empty, in directories that are not there yet.

        Raises:
            OSError: One cannot be made.
        """
        Path(self._directory).mkdir(mode=0o700)
        for rank in range(num_ranks):
            Path(self._directory, str(rank)).mkdir(mode=0o700)
            for stream in Stream:
                os.close(os.open(self._path(rank, stream), _CREATE, 0o600))

    def write(self, output: Output) -> None:
        """Append to a rank's file, if it was not given up.

        Raises:
            OSError: It takes no more; it is given up.
        """
        key = (output.rank, output.stream)
        if key in self._given_up:
            return
        try:
            rest = memoryview(output.data)
            while rest:
                rest = rest[os.write(self._fd(key), rest) :]
        except OSError:
            self._given_up.add(key)
            raise

    def give_up(self, ranks: range) -> None:
        """Write nothing of these ranks any more."""
        self._given_up.update((rank, stream) for rank in ranks for stream in Stream)

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _fd(self, key: tuple[int, Stream]) -> int:
        fd = self._open.get(key)
        if fd is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
            fd = self._open[key] = os.open(self._path(*key), _OPEN)
        self._open.move_to_end(key)
        return fd

    def _path(self, rank: int, stream: Stream) -> str:
        return f"{self._directory}/{_file_name(rank, stream)}"


def _file_name(rank: int, stream: Stream) -> str:
    return f"{rank}/{stream.name.lower()}.log"


def _utc(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
