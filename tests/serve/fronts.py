"""Fronts in the process of a test, with ranks that fail by order."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.limits import HANG_S
from tests.serve.faulty_engine import FOLDER, Orders
from tests.serve.model import END, answer_to

from ronde.serve import (
    Flight,
    Front,
    FrontOptions,
    InferenceRequest,
    ReplicaConfig,
    ReplicaOptions,
    ServingMetrics,
)

T = TypeVar("T")
ENGINE = "tests.serve.faulty_engine:make_engine"


class WatchedFront(Front):
    """A front that keeps its events, and wakes those that wait for them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.readies: list[Any] = []
        self.losses: list[int] = []  # the replicas'
        self.ready_s: list[float] = []
        self.lost_s: list[float] = []
        self._changed = asyncio.Event()

    def on_ready(self, replica: Any, ready: Any) -> None:
        super().on_ready(replica, ready)
        self.readies.append(ready)
        self.ready_s.append(time.monotonic())
        self._changed.set()

    def on_report(self, replica: Any, report: Any) -> None:
        super().on_report(replica, report)
        self._changed.set()

    def on_lost(self, replica: Any, cause: str) -> None:
        super().on_lost(replica, cause)
        self.losses.append(replica.index)
        self.lost_s.append(time.monotonic())
        self._changed.set()

    async def until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()


class Serving:
    """A front that runs while a test awaits something."""

    def __init__(
        self,
        folder: Path,
        replicas: Sequence[ReplicaOptions],
        options: FrontOptions | None = None,
    ) -> None:
        self.lines: list[str] = []
        folders = [folder / str(index) for index in range(len(replicas))]
        self.orders = [Orders(each) for each in folders]
        self._replicas: list[ReplicaOptions] = []
        for own, each in zip(folders, replicas, strict=True):
            own.mkdir(parents=True)
            self._replicas.append(each._replace(env={FOLDER: str(own)}))
        self._options = options or FrontOptions()
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        async def begin() -> WatchedFront:
            config = ReplicaConfig("toy", engine=ENGINE)
            front = WatchedFront(
                config, self._options, self._replicas, ServingMetrics(),
                self.lines.append,
            )  # fmt: skip
            self._end = asyncio.create_task(front.run())
            return front

        self.front = self.run(begin())
        return self

    def __exit__(self, *_: object) -> None:
        if not self._end.done():
            self._end.cancel()
            with suppress(asyncio.CancelledError):
                self.end()
        self._loop.close()

    def run(self, awaited: Coroutine[Any, Any, T]) -> T:
        async def in_time() -> T:
            async with asyncio.timeout(HANG_S):
                return await awaited

        return self._loop.run(in_time())

    def until(self, is_so: Callable[[], object]) -> None:
        self.run(self.front.until(is_so))

    def end(self) -> int:
        """Return the exit code of the front, once it has ended."""

        async def await_end() -> int:
            return await self._end

        return self.run(await_end())

    def submit(
        self, requests: Iterable[InferenceRequest], **options: Any
    ) -> list[Flight]:
        async def do() -> list[Flight]:
            return [self.front.submit(each, **options) for each in requests]

        return self.run(do())

    def finish(self, flights: Iterable[Flight]) -> None:
        """Wait until requests have ended."""

        async def do() -> None:
            for flight in flights:
                while not flight.is_over:
                    await flight.more(len(flight.tokens))

        self.run(do())

    def is_idle(self) -> bool:
        health = self.front.health()
        return health.num_running == health.num_waiting == health.kv_usage == 0


def tokens_of(flight: Flight) -> list[int]:
    return [each.token for each in flight.tokens]


def wrong_ones(
    requests: Sequence[InferenceRequest], flights: Sequence[Flight]
) -> list[str]:
    """Return descriptions of answers that are not the model's own."""
    found: list[str] = []
    for request, flight in zip(requests, flights, strict=True):
        wanted, got = answer_to(request), tokens_of(flight)
        is_stopped = wanted[-1] in (END, *request.stop_ids)
        finish = "stop" if is_stopped else "length"
        if flight.error or got != wanted or flight.finish != finish:
            found.append(f"{request}: {flight.error} {flight.finish} {got} {wanted}")
    return found
