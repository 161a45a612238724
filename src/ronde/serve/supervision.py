"""A replica: the ranks of one copy of the model, started and watched by the front."""

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ronde.launch.environments import own_environment
from ronde.plain_values import to_plain
from ronde.processes import ProcessStat, end_with
from ronde.serve.protocol import (
    MAX_LINE_BYTES,
    Orders,
    ReplicaConfig,
    ReplicaReady,
    StepReport,
    decode_from_rank,
    encode_line,
)
from ronde.store import local_socket

_STDERR = 2
_POLL_S = 0.25
_WHY_S = 15.0
_EXIT_USAGE = 64
_EXIT_FAILED = 75
_GRACE_S, _ENDING_S = 1.0, 2.5  # from SIGTERM to SIGKILL of ranks, and of their job
_RECENT_S = 600.0  # restarts in it count


class ReplicaOptions(NamedTuple):
    """The job of a replica, and when it is started again."""

    num_ranks: int
    run_options: tuple[str, ...] = ()  # of ronde run
    env: Mapping[str, str] = MappingProxyType({})  # beside this process's own
    hang_timeout_s: float = 10.0
    max_restarts: int = 5  # in ten minutes


class ReplicaEvents(Protocol):
    """The front, as a replica sees it."""

    def on_ready(self, replica: "ReplicaRanks", ready: ReplicaReady) -> None: ...

    def on_report(self, replica: "ReplicaRanks", report: StepReport) -> None: ...

    def on_lost(self, replica: "ReplicaRanks", cause: str) -> None:
        """Handle the loss of all ranks; ``on_ready`` follows, or ``run()`` ends.

        ``cause`` is a word: hang or rank.
        """


class ReplicaRanks:
    """The ranks of one copy of the model.

    ``run()`` starts them by ``ronde run`` and returns an exit code at their end.
    """

    def __init__(
        self,
        index: int,
        config: ReplicaConfig,
        options: ReplicaOptions,
        events: ReplicaEvents,
        report: Callable[[str], None],
    ) -> None:
        self.index = index
        self.is_ready = False
        self._options, self._events, self._report_line = options, events, report
        self._name = f"ronde-serve-{secrets.token_hex(8)}"
        own = ProcessStat.read(os.getpid())
        self._config = config._replace(
            socket=f"\0{self._name}", front=(own.pid, own.started)
        )
        self._writer: asyncio.StreamWriter | None = None
        self._job: asyncio.subprocess.Process | None = None
        self._process = 0  # rank 0's worker
        self._heard_s = 0.0
        self._lost_s: list[float] = []
        self._is_ending = self._has_served = False
        self._hang = ""

    def send(self, orders: Orders) -> None:
        """Send orders to the ranks; without effect while they are lost."""
        if self._writer is not None:
            self._writer.write(encode_line(orders))

    def end(self) -> None:
        """Let the ranks end; ``run()`` returns."""
        self._is_ending = True
        if self._writer is not None:
            self.send(Orders(is_last=True))
        else:
            self._end_job()

    async def run(self) -> int:
        # An abstract name: no file is left behind, however this process ends.
        server = await asyncio.start_unix_server(
            self._serve_rank, self._config.socket, limit=MAX_LINE_BYTES
        )
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                code = await self._run_job()
                if self._is_ending:
                    return 0
                if code == _EXIT_USAGE:
                    return code
                if not self._has_served:
                    self._lost_s.append(time.monotonic())
                self._on_lost()
                may_restart = self._may_restart()
                next_step = "starting it again" if may_restart else "giving up"
                self._report(f"ronde run ended with code {code}; {next_step}")
                if not may_restart:
                    return _EXIT_FAILED
        finally:
            watch.cancel()
            server.close()
            if self._writer is not None:
                self._writer.close()

    async def _run_job(self) -> int:
        """Run the ranks once; return the exit code of ``ronde run``."""
        options = self._options
        command = [
            *(sys.executable, "-m", "ronde", "run", "-n", str(options.num_ranks)),
            *("--grace", f"{_GRACE_S:g}s", *options.run_options),
            *("-m", "ronde.serve.rank", json.dumps(to_plain(self._config))),
        ]
        self._job = job = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=_STDERR,
            env={**own_environment(), **options.env},
            start_new_session=True,
            preexec_fn=end_with(os.getpid(), signal.SIGTERM),
        )
        self._has_served = False
        if self._is_ending:
            self._end_job()
        try:
            return await job.wait()
        except asyncio.CancelledError:
            self._is_ending = True
            with suppress(ProcessLookupError):
                job.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(job.wait(), _ENDING_S)
                job.kill()
            raise

    async def _serve_rank(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Handle the messages of one generation of workers."""
        if not local_socket.is_own(writer.get_extra_info("socket")):
            writer.close()
            return
        try:
            async for line in reader:
                self._heard_s = time.monotonic()
                message = decode_from_rank(line)
                if isinstance(message, ReplicaReady):
                    self._on_ready(message, writer)
                elif self._writer is writer:
                    self._events.on_report(self, message)
        except OSError:
            pass  # as good as its end
        except ValueError as error:
            self._report(f"rank 0 sent a wrong message: {error}")
        finally:
            writer.close()
            if self._writer is writer:
                self._on_lost()

    def _on_ready(self, ready: ReplicaReady, writer: asyncio.StreamWriter) -> None:
        self._on_lost()  # its end may be read after this
        if self._lost_s:
            ago = time.monotonic() - self._lost_s[-1]
            cause = self._hang or ready.cause or "ronde run was started again"
            self._report(f"ready again after {ago:.1f} s: {cause}")
        self._writer, self._process = writer, ready.process
        self.is_ready = self._has_served = True
        self._hang = ""
        if self._is_ending:
            self.send(Orders(is_last=True))
        self._events.on_ready(self, ready)

    def _on_lost(self) -> None:
        if self._writer is None or self._is_ending:
            return
        self._writer, self.is_ready = None, False
        self._lost_s.append(time.monotonic())
        may_restart = self._may_restart()
        next_step = "they start again" if may_restart else "giving up"
        self._report(f"the ranks were lost; {next_step}")
        self._events.on_lost(self, "hang" if self._hang else "rank")
        if not may_restart:
            self._end_job()

    def _end_job(self) -> None:
        if self._job is not None:
            with suppress(ProcessLookupError):
                self._job.terminate()

    def _may_restart(self) -> bool:
        now_s = time.monotonic()
        self._lost_s = [each for each in self._lost_s if now_s - each < _RECENT_S]
        return len(self._lost_s) <= self._options.max_restarts

    async def _watch(self) -> None:
        """End ranks that take no step for too long."""
        while True:
            await asyncio.sleep(_POLL_S)
            silent_s = time.monotonic() - self._heard_s
            if self.is_ready and silent_s > self._options.hang_timeout_s:
                self._hang = f"the ranks took no step for {silent_s:.0f} s"
                self._report(f"{self._hang}; their stacks:")
                writer = self._writer
                await self._show_stacks()
                if self._writer is writer:
                    with suppress(ProcessLookupError):
                        os.kill(self._process, signal.SIGKILL)
                self._heard_s = time.monotonic()

    async def _show_stacks(self) -> None:
        why = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ronde", "why", self._name, "--stacks"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=_STDERR,
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(why.wait(), _WHY_S)
        if why.returncode is None:
            why.kill()

    def _report(self, text: str) -> None:
        self._report_line(f"replica {self.index}: {text}")
