"""A rank of a served model: ``python -m ronde.serve.rank CONFIG``, by ``ronde run``.

Note [Restart by fork]
    Importing torch and transformers takes seconds of CPU time, so a rank imports them
    once and forks a worker, which loads the model and serves. If a worker is lost, its
    generation ends: every rank ends its worker and forks the next one. The parent has
    no process group and no GPU. It ends with the last request, with the front, or if
    workers fail before they have served.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from math import inf
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import DistBackendError

from ronde.collectives.rendezvous import open_store
from ronde.errors import CollectiveError, StoreError, UsageError
from ronde.plain_values import from_plain
from ronde.processes import FORKED_RANK, read_process
from ronde.serve.engine import InferenceEngine
from ronde.serve.engines import load_engine
from ronde.serve.link import FrontLink
from ronde.serve.loop import OutOfStepError
from ronde.serve.manager import BatchManager
from ronde.serve.protocol import ReplicaConfig
from ronde.world import RankInfo, read_rank_info

MakeEngine = Callable[[ReplicaConfig, RankInfo], InferenceEngine]
_POLL_MS = 50
_STOPPED_S = 1.0
_NOTICE_S = 0.3  # for workers to report by themselves that a peer is lost
_JOIN_S = 300.0
_ENDED_S = 10.0  # for all ranks to end a generation
_MOST_UNREADY = 3  # generations in a row that never served
_REASON_BYTES = 2000
_READY, _UNREADY = b"+", b"-"  # the first byte that a worker writes to its parent
_EXIT_USAGE = 64
_EXIT_NOTICED = 75  # another rank is the cause
_NOTICED = (CollectiveError, DistBackendError)


class RankParent:
    """The process that forks the workers of one rank."""

    def __init__(self, config: ReplicaConfig, info: RankInfo) -> None:
        self._config, self._info = config, info
        self._front = -1
        if info.rank == 0:
            pid, started = config.front
            self._front = os.pidfd_open(pid)
            found = read_process(pid)
            if found is None or found.started != started:
                raise ProcessLookupError(pid)
        self._store = open_store(info, _JOIN_S)

    def run(self, make: MakeEngine) -> int:
        """Fork workers until one has served its last request; return the exit code."""
        cause, num_unready = "", 0
        for generation in count():
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                own = self._info._replace(job_id=f"{self._info.job_id}/{generation}")
                link = FrontLink(self._config.socket, generation, cause)
                _serve(make, self._config, own, link, writer)
            os.close(writer)
            code, killed_for = self._await(pid, generation)
            os.set_blocking(reader, False)  # a child of the worker may hold it open
            with os.fdopen(reader, "rb", 0) as pipe:
                written = pipe.read(1 + _REASON_BYTES) or b""
            is_ready = written[:1] == _READY
            reason = written[1:].decode(errors="replace")
            if code in (0, _EXIT_USAGE):
                return code
            cause = self._end_generation(generation, code, killed_for or reason)
            num_unready = 0 if is_ready else num_unready + 1
            if num_unready == (_MOST_UNREADY if generation else 1):
                sys.stderr.write(f"ronde: not started: {cause}\n")
                return 1
        raise AssertionError

    def _await(self, pid: int, generation: int) -> tuple[int, str]:
        """Return the worker's exit code, and the reason if it was killed here.

        It is killed if it is stopped for long, or another rank's worker is lost.
        """
        worker, poll = os.pidfd_open(pid), select.poll()
        for fd in {worker, self._front} - {-1}:
            poll.register(fd, select.POLLIN)
        key, reason, ends_s = f"lost/{generation}", "", {"peer": inf, "stop": inf}
        while worker not in (ended := [fd for fd, _ in poll.poll(_POLL_MS)]):
            now_s = time.monotonic()
            process = read_process(pid)
            is_stopped = process is not None and process.state == "T"
            ends_s["stop"] = (
                min(ends_s["stop"], now_s + _STOPPED_S) if is_stopped else inf
            )
            if ends_s["peer"] == inf and self._store.check([key]):
                ends_s["peer"] = now_s + _NOTICE_S
            if self._front in ended or min(ends_s.values()) < now_s:
                if is_stopped:
                    reason = f"rank {self._info.rank}, process {pid}, was stopped"
                os.kill(pid, signal.SIGKILL)
            if self._front in ended:
                sys.exit("ronde: ronde serve has ended")
        os.close(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        was_peer = not reason and ends_s["peer"] < time.monotonic()
        return _EXIT_NOTICED if was_peer else code, reason

    def _end_generation(self, generation: int, code: int, reason: str) -> str:
        """End this generation on all ranks; return the cause.

        A rank whose parent takes too long for that ends the job.
        """
        if code < 0 and not reason:
            reason = f"rank {self._info.rank} was ended by {signal.Signals(-code).name}"
        kind = "noticed" if code == _EXIT_NOTICED else "cause"
        if reason:
            self._store.compare_set(f"{kind}/{generation}", "", reason)
        self._store.set(f"lost/{generation}", "")
        self._store.set(f"ended/{generation}/{self._info.rank}", "")
        ended = [f"ended/{generation}/{rank}" for rank in range(self._info.size)]
        try:
            self._store.wait(ended, timedelta(seconds=_ENDED_S))
        except StoreError as error:
            sys.exit(f"ronde: rank {self._info.rank} cannot start again: {error}")
        for kind in ("cause", "noticed"):
            if self._store.check([f"{kind}/{generation}"]):
                return self._store.get(f"{kind}/{generation}").decode()
        return f"rank {self._info.rank} ended with exit code {code}"


def _serve(
    make: MakeEngine, config: ReplicaConfig, info: RankInfo, link: FrontLink, pipe: int
) -> NoReturn:
    """Serve as one generation's worker of a rank, and end this process."""
    code, is_ready = 0, False

    def on_ready() -> None:
        nonlocal is_ready
        is_ready = os.write(pipe, _READY) == 1

    Path("/proc/self/comm").write_text(FORKED_RANK, encoding="ascii")
    try:
        with torch.inference_mode():
            engine = make(config, info)
            manager = BatchManager(
                engine,
                link.get_requests,
                link.send_response,
                link.poll_stop,
                link.send_stats,
                policy=config.policy,
            )
            link.attach(engine.capacity, manager.stop, on_ready)
            if info.rank > 0:
                on_ready()
            manager.run(info)
    except BaseException as error:  # noqa: BLE001  this process's outermost line
        is_noticed = isinstance(error, _NOTICED) and not isinstance(
            error, OutOfStepError
        )
        code = _EXIT_NOTICED if is_noticed else 1
        if isinstance(error, UsageError) and not is_ready:
            code = _EXIT_USAGE
        if code == 1:
            traceback.print_exc()
        else:
            sys.stderr.write(f"ronde: {error}\n")
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        reason = f"{error}" if is_noticed else f"rank {info.rank} failed: {first}"
        text = reason.encode()[:_REASON_BYTES]
        os.write(pipe, text if is_ready else _UNREADY + text)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # the interpreter's own end takes seconds


def main(text: str) -> int:
    config = from_plain(ReplicaConfig, json.loads(text))
    make = load_engine(config.engine)
    prepare = getattr(sys.modules[make.__module__], "prepare", None)
    if prepare is not None:
        prepare(config)
    return RankParent(config, read_rank_info()).run(make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
