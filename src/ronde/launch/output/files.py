"""Where a job's output and events go: sinks, log files, the report, the records."""

import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Protocol

from ronde.errors import UsageError
from ronde.launch.failure import JobResult, LostHost, RankEnd, signal_name
from ronde.launch.messages import Output, ProcessStack, RankSpec, Stream
from ronde.launch.program import absolute_path
from ronde.launch.signals import interrupter
from ronde.topology.machine import UNKNOWN_NODE


class Generation(NamedTuple):
    """One start of all ranks."""

    job_id: str
    epoch: int  # 0 for the first start, one more for each restart
    hosts: tuple[str, ...]  # name of each rank's host, by rank
    argv: tuple[str, ...] = ()
    plan: tuple[RankSpec, ...] = ()  # what each rank has of its own, by rank


NO_GENERATION = Generation("", 0, ())


class RankStacks(NamedTuple):
    """Where a rank is."""

    rank: int
    host: str
    processes: tuple[ProcessStack, ...]  # its own and those below it; or no answer


class OutputSink(Protocol):
    """Shows what a job reports; in the output process, where it may wait.

    The output process polls the ``pending_fds``, calls ``write_to`` for each that is
    ready, and takes no more output while ``backlog_bytes`` is large. ``write_to``
    raises BrokenPipeError when nobody reads the ranks' standard output any more.
    """

    @property
    def pending_fds(self) -> tuple[int, ...]: ...

    @property
    def backlog_bytes(self) -> int: ...

    def begin(self, generation: Generation) -> None: ...

    def output(self, output: Output, now_s: float) -> None: ...

    def notice(self, text: str) -> None: ...

    def stacks(self, taken: Sequence[RankStacks]) -> None: ...

    def finished(self, result: JobResult) -> None: ...

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to come again, None for not before output."""
        ...

    def write_to(self, fd: int) -> None: ...

    def discard(self) -> None: ...


class JobFile:
    """Writes to files what a job reports, before it is shown; the base of such.

    ``begin`` raises UsageError where it cannot write what the user asked for; what
    goes wrong later is a notice.
    """

    def __init__(self, sink: OutputSink, path: str) -> None:
        self._notice = sink.notice
        self._path = path
        self._generation = NO_GENERATION

    def begin(self, generation: Generation) -> None:
        self._generation = generation

    def began(self, timings: Mapping[str, float]) -> None:
        """All ranks run; ``timings`` are the seconds of ``agents_s``, ``ready_s``..."""

    def output(self, output: Output) -> None: ...

    def finished(self, result: JobResult) -> None: ...


SCHEMA = 1  # version of the reports' form
_DEVICES = "CUDA_VISIBLE_DEVICES"
_MAX_OPEN = 128
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
_INDEX = "index.json"


def describe_result(result: JobResult) -> dict[str, object]:
    number = result.interrupted_by
    return {
        "exit_code": result.exit_code,
        "interrupted_by": None if number is None else interrupter(number),
        "cause": _describe_failure(result.cause) if result.cause else None,
        "also_failed": [_describe_failure(end) for end in result.also_failed],
        "also_lost": [_describe_failure(lost) for lost in result.also_lost],
        "ended": [_describe_end(end) for end in result.ended],
    }


def _describe_end(end: RankEnd) -> dict[str, object]:
    return {
        "rank": end.rank,
        "host": end.host,
        "pid": end.pid,
        "exit_code": end.exit_code,
        "signal": signal_name(-end.status) if end.status < 0 else None,
        "at_s": round(end.at_s, 6),
        "was_stopped": end.was_stopped,
    }


def _describe_lost(lost: LostHost) -> dict[str, object]:
    return {**asdict(lost), "at_s": round(lost.at_s, 6)}


def _describe_failure(failure: RankEnd | LostHost) -> dict[str, object]:
    if isinstance(failure, LostHost):
        return {"kind": "host", **_describe_lost(failure)}
    return {
        "kind": "rank",
        **_describe_end(failure),
        "evidence": failure.evidence,
        "lost_its_peer": failure.is_secondary,
        "traceback": failure.traceback,
        "stderr_tail": list(failure.stderr_tail),
    }


def replace_json(path: str, content: Mapping[str, object]) -> None:
    beside = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(beside, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            # What no UTF-8 stands for is written as JSON's escapes.
            file.write(json.dumps(content, indent=1).encode() + b"\n")
        Path(beside).replace(path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise


class ErrorFile(JobFile):
    """Writes how the latest generation ended, whether well or not, to a file."""

    def __init__(self, sink: OutputSink, path: str) -> None:
        super().__init__(sink, path)
        directory = absolute_path(path).parent
        if not os.access(directory, os.W_OK | os.X_OK) or Path(path).is_dir():
            raise UsageError(
                f"--error-file must be a file in a directory that can be written, got "
                f"{path!r}. Create {str(directory)!r} or name another."
            )

    def finished(self, result: JobResult) -> None:
        try:
            write_report(self._path, result.exit_code, "", result, self._generation)
        except OSError as error:
            self._notice(f"--error-file {self._path} was not written: {error.strerror}")


def write_report(
    path: str,
    exit_code: int,
    message: str,
    result: JobResult | None = None,
    generation: Generation = NO_GENERATION,
) -> None:
    content = {
        "schema": SCHEMA,
        "job_id": generation.job_id or None,
        "epoch": generation.epoch if generation.job_id else None,
        "exit_code": exit_code,
        "message": message,
        "verdict": describe_result(result) if result else None,
    }
    replace_json(path, content)


class JobRecords(JobFile):
    """Appends a job's records to a file."""

    _began_at_s = 0.0  # monotonic; 0 while no ranks run

    def begin(self, generation: Generation) -> None:
        super().begin(generation)
        if generation.epoch:
            return
        hosts, argv = generation.hosts, list(generation.argv)
        plan = [
            _describe_rank(*each) for each in zip(hosts, generation.plan, strict=True)
        ]
        values = {"job_id": generation.job_id, "argv": argv, "size": len(plan)}
        values |= {"hosts": list(dict.fromkeys(hosts)), "plan": plan}
        try:
            self._append([("job", values)])
        except OSError as error:
            raise UsageError(
                f"--record must be a file that can be written, got {self._path!r} "
                f"({error.strerror}). Name another."
            ) from None

    def began(self, timings: Mapping[str, float]) -> None:
        self._began_at_s = time.monotonic()
        rounded = {name: round(value, 6) for name, value in timings.items()}
        values = {"hosts": list(self._generation.hosts), "timings": rounded}
        self._try_append([("generation", values)])

    def finished(self, result: JobResult) -> None:
        began_at_s, self._began_at_s = self._began_at_s, 0.0
        if not began_at_s:
            return
        failures = (result.cause, *result.also_lost)
        lost = [each for each in failures if isinstance(each, LostHost)]
        ran_s = {"ran_s": round(time.monotonic() - began_at_s, 6)}
        self._try_append(
            [
                *(("rank_end", _describe_end(end)) for end in result.ends),
                *(("host_lost", _describe_lost(host)) for host in lost),
                ("generation_end", ran_s | describe_result(result)),
            ]
        )

    def _try_append(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        which = {"job_id": self._generation.job_id, "epoch": self._generation.epoch}
        try:
            if self._path:
                self._append([(kind, {**which, **values}) for kind, values in entries])
        except OSError as error:
            self._notice(f"--record {self._path} is not written on: {error.strerror}")
            self._path = ""

    def _append(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        # Imported where it is needed: most jobs start without a record.
        from ronde.records import MachineRecord, Record, append_record

        machine = MachineRecord.here()
        for kind, values in entries:
            record = Record(kind, values, machine=machine)
            # Commands may hold secrets.
            append_record(Path(self._path), record, is_private=True)


def _describe_rank(host: str, plan: RankSpec) -> dict[str, object]:
    is_known = plan.memory_node != UNKNOWN_NODE
    return {
        "rank": plan.rank,
        "host": host,
        "cpus": list(plan.cpus),
        "memory_node": plan.memory_node if is_known else None,
        "gpus": plan.env.get(_DEVICES),
    }


def attempt_dir(directory: str, generation: Generation) -> str:
    return f"{directory}/{generation.job_id}/attempt_{generation.epoch}"


class RankLogs(JobFile):
    """Writes the output of each rank to files of its own before it is shown.

    ``DIR/<job id>/attempt_<epoch>/<rank>/{stdout,stderr}.log`` have the bytes as they
    are, ``index.json`` beside them lists them and how the ranks ended. A file that
    takes nothing more is given up with one notice for its rank.
    """

    def __init__(self, sink: OutputSink, directory: str) -> None:
        super().__init__(sink, "")
        self._directory = directory
        self._started_at_s = 0.0
        self._open: OrderedDict[tuple[int, Stream], int] = OrderedDict()
        self._given_up: set[tuple[int, Stream]] = set()
        self._complained: set[int] = set()

    def begin(self, generation: Generation) -> None:
        self._close()
        super().begin(generation)
        self._started_at_s = time.time()
        self._complained.clear()
        self._given_up.clear()
        ranks = range(len(generation.hosts))
        self._path = attempt_dir(self._directory, generation)
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            Path(self._path).parent.mkdir(mode=0o700, exist_ok=True)
            Path(self._path).mkdir(mode=0o700)
            for rank in ranks:
                Path(self._path, str(rank)).mkdir(mode=0o700)
                for stream in Stream:
                    name = f"{self._path}/{_file_name(rank, stream)}"
                    os.close(os.open(name, _CREATE, 0o600))
            self._write_index(None)
        except OSError as error:
            if generation.epoch == 0:
                raise UsageError(
                    "--log-dir must be a directory that can be written, got "
                    f"{self._directory!r} ({error.strerror}). "
                    "Create it or name another."
                ) from None
            self._given_up.update((rank, stream) for rank in ranks for stream in Stream)
            self._notice(f"no log files are written any more: {error.strerror}")

    def output(self, output: Output) -> None:
        key = (output.rank, output.stream)
        try:
            rest = memoryview(b"" if key in self._given_up else output.data)
            while rest:
                rest = rest[os.write(self._fd(key), rest) :]
        except OSError as error:
            self._given_up.add(key)
            if output.rank not in self._complained:
                self._complained.add(output.rank)
                self._notice(
                    f"{output.stream.name.lower()}.log of rank {output.rank} takes "
                    f"nothing more ({error.strerror}); it is shown here only"
                )

    def finished(self, result: JobResult) -> None:
        self._close()
        try:
            self._write_index(result)
        except OSError as error:
            self._notice(f"{_INDEX} of the log files lacks the end: {error.strerror}")

    def _write_index(self, result: JobResult | None) -> None:
        generation = self._generation
        if not generation.hosts:
            return
        ends = {} if result is None else {end.rank: end for end in result.ends}
        ranks = [
            {
                "rank": rank,
                "host": host,
                **{s.name.lower(): _file_name(rank, s) for s in Stream},
                "end": _describe_end(ends[rank]) if rank in ends else None,
            }
            for rank, host in enumerate(generation.hosts)
        ]
        content = {
            "schema": SCHEMA,
            "job_id": generation.job_id,
            "epoch": generation.epoch,
            "started_at": _utc(self._started_at_s),
            "ended_at": None if result is None else _utc(time.time()),
            "ranks": ranks,
            "verdict": None if result is None else describe_result(result),
        }
        replace_json(f"{self._path}/{_INDEX}", content)

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _fd(self, key: tuple[int, Stream]) -> int:
        fd = self._open.get(key)
        if fd is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
            fd = os.open(f"{self._path}/{_file_name(*key)}", _OPEN)
            self._open[key] = fd
        self._open.move_to_end(key)
        return fd


def _file_name(rank: int, stream: Stream) -> str:
    return f"{rank}/{stream.name.lower()}.log"


def _utc(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
