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
from collections.abc import Callable, Mapping
from itertools import groupby
from threading import Thread
from typing import Any

from ronde.launch.signals import wait_for
from ronde.monitor.inspection import make_frame
from ronde.monitor.samples import HostSamples, SampleWindow
from ronde.monitor.stacks import NO_PYTHON, explain, explain_output, find_python, py_spy
from ronde.processes import is_alive, read_stat

_LONGEST_S, _SHORTEST_S = 20, 5
_WINDOW_SAMPLES = 2000  # reading them takes as long as a start of py-spy
# With --idle, since time also passes for a rank that sleeps or waits.
_RECORD = ("record", "--format", "speedscope", "--idle", "--nonblocking")
_ASKED_S = 5.0  # a watcher asks each second
_POLL_S = 0.25
_KILL_S = 2.0  # after py-spy was to end; it takes some ms
_READ_BYTES = 1 << 16
_MOST_FRAMES = 300  # of a stack, from the innermost: a window is one line of JSON
_RSS_FIELD = 22  # number as in proc(5), minus 2


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
        is_failing = False
        while not is_failing and self._goes_on(pid):
            # A shell of the worker may start one Python program after another.
            window = self._record(worker, find_python(pid))
            is_failing = bool(window.problem) and is_alive(window.pid)
            if window.runs or is_failing:
                self._send(HostSamples(window))

    def _goes_on(self, pid: int) -> bool:
        return time.monotonic() < self._until_s and is_alive(pid)

    def _record(self, worker: int, pid: int) -> SampleWindow:
        fd, now = os.memfd_create("samples"), time.time()
        window = SampleWindow(worker, pid, now, now, (), (), (), 0, "")
        window_s = min(max(_WINDOW_SAMPLES // self._rate_hz, _SHORTEST_S), _LONGEST_S)
        command = [py_spy(), *_RECORD, "--pid", str(pid), "--output"]
        command += [f"/proc/self/fd/{fd}", "--rate", str(self._rate_hz)]
        command += ["--duration", str(window_s)]
        with os.fdopen(fd, "rb") as file:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(fd,),
                )
            except OSError as error:
                return window._replace(problem=explain(error))
            with process:
                window, text = self._follow(process, window)
            if process.returncode < 0:  # killed, with no word on a failure
                text = ""
            if process.returncode:
                return window._replace(problem=explain_output(text))
            return add_samples(window, json.load(file))

    def _follow(
        self, process: "subprocess.Popen[bytes]", window: SampleWindow
    ) -> tuple[SampleWindow, str]:
        """Wait until py-spy ends, or end it; return its window and its messages."""
        text = ""
        output = process.stdout.fileno() if process.stdout else -1
        while True:
            if wait_for([output], [], _POLL_S):
                data = os.read(output, _READ_BYTES)
                if not data:
                    return window._replace(ended_at=time.time()), text
                if not text:  # it says that it begins
                    window = window._replace(begun_at=time.time())
                text += data.decode(errors="replace")
            if rss_bytes := _read_rss(window.pid):  # 0 once it has ended
                window = window._replace(rss_bytes=rss_bytes)
            past_s = time.monotonic() - self._until_s
            if past_s > _KILL_S:
                process.kill()
            elif past_s >= 0.0 and text:  # before, it would not say why it fails
                process.send_signal(signal.SIGINT)  # it writes its result


def _read_rss(pid: int) -> int:
    try:
        return int(read_stat(pid)[_RSS_FIELD]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def add_samples(window: SampleWindow, result: Mapping[str, Any]) -> SampleWindow:
    """Return a window with the main thread's samples in a result of py-spy."""
    main, frames = f"Thread {window.pid} ", dict[int, int]()
    found = [each for each in result["profiles"] if each["name"].startswith(main)]
    stacks: dict[tuple[int, ...], int] = {}
    runs: list[tuple[int, int]] = []
    # A sample without frames has failed.
    samples: list[list[int]] = found[0]["samples"] if found else []
    for sample, equal in groupby(filter(None, samples)):
        innermost = sample[: -_MOST_FRAMES - 1 : -1]
        stack = tuple(frames.setdefault(number, len(frames)) for number in innermost)
        runs.append((stacks.setdefault(stack, len(stacks)), sum(1 for _ in equal)))
    shared = [result["shared"]["frames"][number] for number in frames]
    return window._replace(
        frames=tuple(
            make_frame(each["name"], each["file"] or "", each["line"] or 0)
            for each in shared
        ),
        stacks=tuple(stacks),
        runs=tuple(runs),
        problem="" if runs else NO_PYTHON,
    )
