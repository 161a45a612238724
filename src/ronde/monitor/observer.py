"""The observer: a process on each host of a job that answers a watcher's questions.

The agent of the host starts it for the first question, and ends it with the job. A
question is a JSON object on a line of standard input, and an answer is one on a line of
standard output. ``reader`` identifies the watcher; ``pids`` has the process of each
worker of this host. ``ask`` is ``inspect``, for the state of each worker's process and
its stack, ``usage`` for the figures of this host, its GPUs and the processes, or
``profile`` for samples of the stacks: see ``Sampler``.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, cast

from ronde.monitor.host import UsageReader
from ronde.monitor.inspection import HostInspection, Inspection, KernelLine
from ronde.monitor.sampler import Sampler
from ronde.monitor.send_queues import sample_queues
from ronde.monitor.stacks import find_python, read_stack
from ronde.plain_values import to_plain
from ronde.processes import read_stat, read_text
from ronde.topology.kernel_log import read_log

_SAMPLE_S = 0.3
_NUM_THREADS = 4
_RECENT_S = 600.0
_MOST_LINES = 5
_TROUBLE = re.compile(
    r"NVRM: Xid|oom-kill|Out of memory|blocked for more than|I/O error|NETDEV WATCHDOG"
    r"|nfs: server \S+ not responding|Lustre.*(?:timed out|evicted)"
)


class Observer:
    """Answers questions from standard input, each in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS)
        self._samplers: dict[int, Sampler] = {}  # by reader
        self._answers: dict[object, Callable[[_Pids], object]] = {
            "inspect": inspect,
            "usage": UsageReader().read,
        }

    def run(self) -> None:
        for line in sys.stdin:
            question = json.loads(line)
            answer = self._answers.get(question.get("ask"))
            if answer is not None:
                self._pool.submit(_answer, answer, question)
            elif question.get("ask") == "profile":
                self._sample(question)
        for sampler in self._samplers.values():
            sampler.finish()
        self._pool.shutdown(cancel_futures=True)

    def _sample(self, question: dict[str, Any]) -> None:
        reader = question["reader"]
        if reader not in self._samplers:
            self._samplers[reader] = Sampler(partial(_send, reader))
        self._samplers[reader].ask(_pids_of(question), question["rate_hz"])


_Pids = Mapping[int, int]
"""The process of each worker."""

_sending = Lock()  # the parts of long lines would mix


def _pids_of(question: dict[str, Any]) -> _Pids:
    return {int(worker): int(pid) for worker, pid in question["pids"].items()}


def _answer(answer: Callable[[_Pids], object], question: dict[str, Any]) -> None:
    _send(question["reader"], answer(_pids_of(question)))


def _send(reader: int, answer: object) -> None:
    found = cast("dict[str, object]", to_plain(answer))
    line = json.dumps({"reader": reader, **found}) + "\n"
    with _sending, suppress(BrokenPipeError):  # the job is over
        unsent = memoryview(line.encode())
        while unsent:
            unsent = unsent[os.write(1, unsent) :]


def main() -> None:
    """Run the observer of this host until its standard input ends."""
    Observer().run()


def inspect(pids: _Pids) -> HostInspection:
    """Inspect the processes of workers, given by worker id."""
    pids = {worker: find_python(pid) for worker, pid in pids.items()}
    began_s = time.monotonic()
    before = {worker: _read_usage(pid) for worker, pid in pids.items()}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        stacks = dict(zip(pids, pool.map(read_stack, pids.values()), strict=True))
    queues = sample_queues(pids.values(), began_s + _SAMPLE_S)
    took_s = time.monotonic() - began_s
    inspections: list[Inspection] = []
    for worker, pid in pids.items():
        usage, frames = _read_usage(pid), stacks[worker]
        inspections.append(
            Inspection(
                worker=worker,
                pid=pid,
                state=usage.state,
                waits_in=read_text(f"/proc/{pid}/wchan").strip("0"),
                cpu=max(0.0, usage.cpu_s - before[worker].cpu_s) / took_s,
                faults_per_s=max(0, usage.num_faults - before[worker].num_faults)
                / took_s,
                frames=() if isinstance(frames, str) else frames,
                problem=frames if isinstance(frames, str) else "",
                cpu_wait=max(0.0, usage.waited_s - before[worker].waited_s) / took_s,
                nice=usage.nice,
            )
        )
    return HostInspection(tuple(inspections), find_kernel_lines(), queues)


def find_kernel_lines(root: str = "") -> tuple[KernelLine, ...]:
    """Return the newest lines about memory, GPUs, disks and network file systems.

    They are of the last ten minutes; none if the log may not be read.
    """
    try:
        lines = [KernelLine(age_s, text) for age_s, text in read_log(root)]
    except OSError:
        return ()
    found = [each for each in lines if each.age_s < _RECENT_S]
    found = [each for each in found if _TROUBLE.search(each.text)]
    return tuple(found[-_MOST_LINES:])


class _Usage(NamedTuple):
    state: str
    cpu_s: float
    num_faults: int
    nice: int = 0
    waited_s: float = 0.0  # of its main thread, for a CPU


def _read_usage(pid: int) -> _Usage:
    try:
        fields = read_stat(pid)
    except OSError:
        return _Usage("", 0.0, 0)
    schedule = read_text(f"/proc/{pid}/schedstat").split()  # of the main thread
    # Numbers of fields as in proc(5), minus 2.
    ticks = int(fields[12]) + int(fields[13])
    return _Usage(
        state=fields[1],
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        num_faults=int(fields[10]),
        nice=int(fields[17]),
        waited_s=int(schedule[1]) / 1e9 if schedule else 0.0,
    )
