"""Samples of the main threads of a host's workers, taken from outside by py-spy.

Note [Sampling]
    One py-spy reads each Python process, without stopping it. It takes samples at
    random times with the given mean rate, so that it is not in step with a loop of the
    program. Samples of one process are in *windows*, each of one run of py-spy: a start
    takes 20 ms. A window of a process that exits ends with it. py-spy writes its result
    into a file without a name, which needs no removal.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from threading import Thread
from typing import Any, NamedTuple

from ronde.launch.signals import wait_for
from ronde.monitor.inspection import StackFrame, make_frame
from ronde.monitor.samples import HostSamples, SampleWindow
from ronde.monitor.stacks import NO_PYTHON, explain, explain_output, find_python, py_spy
from ronde.processes import is_alive, read_stat

_LONGEST_S, _SHORTEST_S = 20, 5
_WINDOW_SAMPLES = 2000  # reading them takes as long as a start of py-spy
# With --idle, since time also passes for a rank that sleeps or waits.
_RECORD = ("record", "--format", "speedscope", "--idle", "--nonblocking")
_OPTIONS = ("--rate", "--duration", "--pid", "--output")
_ASKED_S = 5.0  # a watcher asks each second
_POLL_S = 0.25
_KILL_S = 2.0  # after py-spy was to end; it takes some ms
_READ_BYTES = 1 << 16
_MOST_FRAMES = 200_000  # in the samples of a window; more are sent as several windows
_RSS_FIELD = 22  # number as in proc(5), minus 2


class PySpyRun(NamedTuple):
    """One run of py-spy, which makes the samples of a window."""

    begun_at: float  # Unix time
    ended_at: float
    rss_bytes: int
    text: str  # its messages


class Sampler:
    """Samples the workers of one host for one watcher, as long as it asks.

    Args:
        send: Called by several threads, with one window at a time.
    """

    def __init__(self, send: Callable[[HostSamples], object]) -> None:
        self._send = send
        self._rate_hz = 0
        self._until_s = 0.0
        self._threads: dict[tuple[int, int], Thread] = {}

    def ask(self, pids: Mapping[int, int], rate_hz: int) -> None:
        """Sample the processes of these workers for 5 s more; with rate 0, end now."""
        if not rate_hz:
            self.finish()
            self._send(HostSamples(None))
            return
        self._rate_hz, self._until_s = rate_hz, time.monotonic() + _ASKED_S
        for key in pids.items():
            thread = self._threads.get(key)
            if thread is None or not thread.is_alive():
                thread = Thread(target=self._sample, args=key, daemon=True)
                self._threads[key] = thread
                thread.start()

    def finish(self) -> None:
        """End sampling, and return once all windows are sent, at most after 3 s."""
        self._until_s = time.monotonic()
        ends_s = self._until_s + _KILL_S + 1.0
        for thread in self._threads.values():
            thread.join(max(0.0, ends_s - time.monotonic()))
        self._threads.clear()

    def _sample(self, worker: int, pid: int) -> None:
        problem = ""
        while not problem and time.monotonic() < self._until_s and is_alive(pid):
            # A shell of the worker may start one Python program after another.
            for window in self._record(worker, find_python(pid)):
                self._send(HostSamples(window))
                problem = window.problem

    def _record(self, worker: int, pid: int) -> Iterator[SampleWindow]:
        fd = os.memfd_create("samples")
        with os.fdopen(fd, "rb") as file:
            window_s = max(_WINDOW_SAMPLES // self._rate_hz, _SHORTEST_S)
            window_s = min(window_s, _LONGEST_S)
            values = self._rate_hz, window_s, pid, f"/proc/self/fd/{fd}"
            options = zip(_OPTIONS, map(str, values), strict=True)
            command = [py_spy(), *_RECORD, *chain.from_iterable(options)]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(fd,),
                )
            except OSError as error:
                yield _without_samples(worker, pid, explain(error))
                return
            with process:
                run = self._follow(process, pid)
            samples: Sequence[Sequence[int]] = ()
            if process.returncode == 0:
                result = json.load(file)
                samples = _samples_of(result, pid)
                frames = [_frame(each) for each in result["shared"]["frames"]]
                yield from make_windows(worker, pid, run, samples, frames)
            is_over = not is_alive(pid) or time.monotonic() >= self._until_s
            if not samples and not is_over:
                is_read = process.returncode == 0
                problem = NO_PYTHON if is_read else explain_output(run.text)
                yield _without_samples(worker, pid, problem)

    def _follow(self, process: "subprocess.Popen[bytes]", pid: int) -> PySpyRun:
        """Wait until py-spy ends, or end it."""
        text, begun_at, rss_bytes = "", 0.0, 0
        output = process.stdout.fileno() if process.stdout else -1
        while True:
            if wait_for([output], [], _POLL_S):
                data = os.read(output, _READ_BYTES)
                if not data:
                    return PySpyRun(begun_at, time.time(), rss_bytes, text)
                text += data.decode(errors="replace")
                begun_at = begun_at or time.time()
            rss_bytes = _read_rss(pid) or rss_bytes  # 0 once the process has ended
            past_s = time.monotonic() - self._until_s
            if past_s > _KILL_S:
                process.kill()
            elif past_s >= 0.0:
                process.send_signal(signal.SIGINT)  # it writes its result


def _read_rss(pid: int) -> int:
    try:
        return int(read_stat(pid)[_RSS_FIELD]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _samples_of(result: Any, pid: int) -> Sequence[Sequence[int]]:  # noqa: ANN401
    """Return the samples of the main thread, each with the outermost frame first."""
    main = f"Thread {pid} "
    found = [each for each in result["profiles"] if each["name"].startswith(main)]
    # A sample without frames has failed.
    return [each for each in found[0]["samples"] if each] if found else ()


def _frame(frame: Mapping[str, Any]) -> StackFrame:
    return make_frame(frame["name"], frame["file"] or "", frame["line"] or 0)


def make_windows(
    worker: int,
    pid: int,
    run: PySpyRun,
    samples: Sequence[Sequence[int]],
    frames: Sequence[StackFrame],
) -> Iterator[SampleWindow]:
    """Yield the samples of one run of py-spy, in several windows if they are large."""
    each_s = (run.ended_at - run.begun_at) / max(1, len(samples))
    first = depth = 0
    for end, sample in enumerate(samples, 1):
        depth += len(sample)
        if depth < _MOST_FRAMES and end < len(samples):
            continue
        own: dict[StackFrame, int] = {}
        stacks: dict[tuple[int, ...], int] = {}
        runs: list[tuple[int, int]] = []
        for equal, group in groupby(samples[first:end]):
            stack = (frames[number] for number in reversed(equal))
            numbers = tuple(own.setdefault(each, len(own)) for each in stack)
            number = stacks.setdefault(numbers, len(stacks))
            runs.append((number, sum(1 for _ in group)))
        begun_at, ended_at = (run.begun_at + each_s * n for n in (first, end))
        yield SampleWindow(
            *(worker, pid, begun_at, ended_at, tuple(own), tuple(stacks), tuple(runs)),
            rss_bytes=run.rss_bytes,
            problem="",
        )
        first, depth = end, 0


def _without_samples(worker: int, pid: int, problem: str) -> SampleWindow:
    now = time.time()
    return SampleWindow(worker, pid, now, now, (), (), (), 0, problem)
