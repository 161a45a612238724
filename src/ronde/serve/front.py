"""The front: all requests and their tokens, while ranks come and go.

Note [Resume]
    The front has every token, so a lost replica costs no request: each goes on as its
    prompt with the tokens so far. A request that ends the ranks would end them for
    ever. One that was in progress at two losses and got no token between them is a
    suspect, and is tried without other suspects; at the third such loss it is refused.
    (To refuse all that were present at two losses would refuse innocent ones, too.)
    A request that waited at the ranks for others to finish was not in progress.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ronde.errors import LaunchError
from ronde.serve.metrics import ServingMetrics
from ronde.serve.policy import POLICIES, Capacity, TokenCounts
from ronde.serve.protocol import Orders, ReplicaConfig, ReplicaReady, StepReport
from ronde.serve.requests import (
    InferenceRequest,
    Response,
    Token,
    counts_of,
    require_servable,
)
from ronde.serve.supervision import ReplicaOptions, ReplicaRanks

_MOST_LOSSES = 3  # without a token between them
_RETRY_S = 2
_AHEAD = 8  # requests that a replica has beyond those that run
_DRAIN_POLL_S = 0.02


class RejectedError(LaunchError):
    """A request is not served, or no longer; ``status`` is HTTP's."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason
        self.retry_after_s = _RETRY_S if status in (429, 503) else None


class Health(NamedTuple):
    """The state of all replicas."""

    is_ready: bool
    reason: str  # if not ready
    step: int
    generation: int  # the number of times that a replica's ranks have started
    num_running: int
    num_waiting: int
    kv_usage: float  # the share of KV blocks that running requests may take


class FrontOptions(NamedTuple):
    """Limits of the front."""

    max_queue: int = 1024
    request_timeout_s: float | None = None
    resumes: bool = True  # else requests in progress fail when ranks are lost


class Flight:
    """A request and all of its tokens."""

    def __init__(
        self, request: InferenceRequest, key: str, on_cancel: Callable[["Flight"], None]
    ) -> None:
        self.tokens: list[Token] = []
        self.finish: str | None = None
        self.error: RejectedError | None = None
        self.key = key
        self.num_losses = 0  # since its last token
        self.replica: ReplicaRanks | None = None
        self.number = 0  # its id at the replica
        self.arrived_s = self.started_s = self.token_s = time.monotonic()
        self.timer: asyncio.TimerHandle | None = None
        self._request, self._on_cancel = request, on_cancel
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def is_suspect(self) -> bool:
        return self.num_losses >= _MOST_LOSSES - 1

    @property
    def num_prompt(self) -> int:
        return len(self._request.prompt)

    @property
    def tokens_to_go(self) -> int:
        return self._request.max_tokens - len(self.tokens)

    @property
    def counts(self) -> TokenCounts:
        return counts_of(self._request)

    def rest(self, request_id: int) -> InferenceRequest:
        """Return the request for the tokens that are missing."""
        made = tuple(token.token for token in self.tokens)
        return self._request._replace(
            id=request_id,
            prompt=self._request.prompt + made,
            max_tokens=self.tokens_to_go,
            num_made=self._request.num_made + len(made),
        )

    async def more(self, num_seen: int) -> None:
        """Return once there are more than ``num_seen`` tokens, or at the end."""
        while len(self.tokens) <= num_seen and not self.is_over:
            self._news.clear()
            await self._news.wait()

    def cancel(self, finish: str = "cancel") -> None:
        if not self.is_over:
            self.finish = finish
            self._on_cancel(self)
            self.notify()

    def notify(self) -> None:
        self._news.set()


class _Queue:
    """Waiting requests: resumed ones first, then by turns of the keys."""

    def __init__(self) -> None:
        self._by_key: dict[str, deque[Flight]] = {}
        self._resumed: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._resumed) + sum(map(len, self._by_key.values()))

    def add(self, flight: Flight) -> None:
        self._by_key.setdefault(flight.key, deque()).append(flight)

    def resume(self, flights: Sequence[Flight]) -> None:
        self._resumed.extendleft(reversed(flights))

    def pop(self, *, no_suspects: bool) -> Flight | None:
        for number, flight in enumerate(self._resumed):
            if not (no_suspects and flight.is_suspect):
                del self._resumed[number]
                return flight
        for key, flights in self._by_key.items():
            flight = flights.popleft()
            del self._by_key[key]
            if flights:
                self._by_key[key] = flights  # now the last
            return flight
        return None

    def remove(self, flight: Flight) -> None:
        for flights in (self._resumed, self._by_key.get(flight.key, deque[Flight]())):
            if flight in flights:
                flights.remove(flight)
        if not self._by_key.get(flight.key, True):
            del self._by_key[flight.key]

    def clear(self) -> list[Flight]:
        found = [*self._resumed, *(each for q in self._by_key.values() for each in q)]
        self._resumed.clear()
        self._by_key.clear()
        return found


class Front:
    """Takes requests, hands them to replicas, and keeps their tokens."""

    def __init__(
        self,
        config: ReplicaConfig,
        options: FrontOptions,
        replicas: Sequence[ReplicaOptions],
        metrics: ServingMetrics,
        report: Callable[[str], None],
    ) -> None:
        self.capacity: Capacity | None = None
        self.metrics = metrics
        self._options, self._report = options, report
        self._policy = POLICIES[config.policy]
        self._queue = _Queue()
        self._flights: dict[ReplicaRanks, dict[int, Flight]] = {}
        self._blocks: dict[ReplicaRanks, tuple[int, int]] = {}
        self._num_requests = self._step = self._generation = 0
        self.was_ready = asyncio.Event()
        self._is_draining = False
        self._ended = ""
        for index, each in enumerate(replicas):
            self._flights[ReplicaRanks(index, config, each, self, report)] = {}

    async def run(self) -> int:
        """Run all replicas until they have ended; return the exit code."""
        tasks = [asyncio.create_task(each.run()) for each in self._flights]
        try:
            for task in asyncio.as_completed(tasks):
                if code := await task:
                    return code
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._ended = "has ended"
            self._fail_all(RejectedError(503, "ended", "the server has ended."))

    def submit(
        self,
        request: InferenceRequest,
        *,
        key: str = "",
        timeout_s: float | None = None,
    ) -> Flight:
        """Queue a request; its ``id`` is ignored.

        Raises:
            UsageError: It can never be served.
            RejectedError: It is not served now.
        """
        if self._is_draining or self._ended or self.capacity is None:
            state = "ends" if self._is_draining else self._ended or "is starting"
            raise self._rejected(503, "not_serving", f"the server {state}.")
        require_servable(request._replace(id=0), self.capacity)
        if len(self._queue) >= self._options.max_queue:
            text = f"{len(self._queue)} requests are waiting; try again later."
            raise self._rejected(429, "queue_full", text)
        flight = Flight(request, key, self._on_cancel)
        limit_s = timeout_s or self._options.request_timeout_s
        if limit_s is not None:
            loop = asyncio.get_running_loop()
            flight.timer = loop.call_later(limit_s, flight.cancel, "timeout")
        self._queue.add(flight)
        self._dispatch()
        return flight

    def health(self) -> Health:
        is_ready = any(each.is_ready for each in self._flights) and not self._ended
        reason = self._ended or ("restarting" if self.capacity else "starting")
        if self._is_draining:
            is_ready, reason = False, "draining"
        used = sum(blocks for blocks, _ in self._blocks.values())
        total = sum(blocks for _, blocks in self._blocks.values())
        num_running = sum(map(len, self._flights.values()))
        return Health(
            is_ready, "" if is_ready else reason, self._step, self._generation,
            num_running, len(self._queue), used / total if total else 0.0,
        )  # fmt: skip

    async def drain(self, limit_s: float) -> None:
        """Take no further requests; let the ranks end once all requests have."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self._queue) or any(self._flights.values()):
                    await asyncio.sleep(_DRAIN_POLL_S)
        self._fail_all(RejectedError(503, "drained", "the server has ended."))
        for replica in self._flights:
            replica.end()

    # Events of replicas.

    def on_ready(self, replica: ReplicaRanks, ready: ReplicaReady) -> None:  # noqa: ARG002  others
        self.capacity = ready.capacity
        self.was_ready.set()
        self._generation += 1
        self._dispatch()

    def on_report(self, replica: ReplicaRanks, report: StepReport) -> None:
        for response in report.responses:
            self._on_response(replica, response)
        if (found := report.statistics) is not None:
            self._step += 1
            self._blocks[replica] = (found.num_blocks, found.max_blocks)
            num_tokens = sum(len(each.tokens) for each in report.responses)
            self.metrics.on_step(num_tokens, found.step_s, found.frame_s)
        self._dispatch()

    def on_lost(self, replica: ReplicaRanks, cause: str) -> None:
        self.metrics.on_restart(cause)
        self._blocks.pop(replica, None)
        num_started = self._num_started(replica)
        lost = list(self._flights[replica].values())
        self._flights[replica].clear()
        resumed: list[Flight] = []
        for number, flight in enumerate(lost):
            flight.replica = None
            if flight.is_over:
                continue
            flight.num_losses += number < num_started
            if not self._options.resumes:
                text = "the ranks were lost. Send the request again."
                self._fail(flight, RejectedError(503, "ranks_lost", text))
            elif flight.num_losses == _MOST_LOSSES:
                text = f"the ranks were lost {_MOST_LOSSES} times at this request."
                self._fail(flight, RejectedError(500, "quarantined", text))
                self._report(f"request {flight.number} is refused: {text}")
            else:
                resumed.append(flight)
        self._queue.resume(resumed)
        self.metrics.on_resumed(len(resumed))
        self._dispatch()

    def _num_started(self, replica: ReplicaRanks) -> int:
        """Return the number of requests, in order, that ranks may have begun."""
        flights = self._flights[replica].values()
        if self.capacity is None:
            return 0
        return self._policy((), [each.counts for each in flights], self.capacity)

    # One request.

    def _dispatch(self) -> None:
        orders: dict[ReplicaRanks, list[InferenceRequest]] = {}
        while len(self._queue) and (replica := self._choose()) is not None:
            flights = self._flights[replica]
            has_suspect = any(each.is_suspect for each in flights.values())
            flight = self._queue.pop(no_suspects=has_suspect)
            if flight is None:
                break
            self._num_requests += 1
            flight.replica, flight.number = replica, self._num_requests
            if not flight.tokens:
                flight.started_s = time.monotonic()
            flights[flight.number] = flight
            orders.setdefault(replica, []).append(flight.rest(flight.number))
        for replica, requests in orders.items():
            replica.send(Orders(add=tuple(requests)))

    def _choose(self) -> ReplicaRanks | None:
        """Return the ready replica with the fewest tokens to go."""
        most = self.capacity.max_requests if self.capacity else 0
        free = [
            (
                sum(each.tokens_to_go for each in flights.values()),
                replica.index,
                replica,
            )
            for replica, flights in self._flights.items()
            if replica.is_ready and len(flights) < most + _AHEAD
        ]
        return min(free)[-1] if free else None

    def _on_response(self, replica: ReplicaRanks, response: Response) -> None:
        flight = self._flights[replica].get(response.id)
        if flight is None:
            return
        if response.is_final:
            del self._flights[replica][response.id]
        if flight.is_over:
            return
        now_s = time.monotonic()
        for token, logprob in zip(response.tokens, response.logprobs, strict=True):
            if flight.tokens:
                self.metrics.on_token_gap(now_s - flight.token_s)
            else:
                queued_s = flight.started_s - flight.arrived_s
                self.metrics.on_first_token(now_s - flight.arrived_s, queued_s)
            flight.tokens.append(Token(response.id, token, response.finish, logprob))
            flight.token_s, flight.num_losses = now_s, 0
        if response.error:
            self._fail(flight, RejectedError(500, "refused", response.error))
        elif response.is_final:
            flight.finish = response.finish
            self._on_end(flight)
        flight.notify()

    def _on_cancel(self, flight: Flight) -> None:
        if flight.replica is None:
            self._queue.remove(flight)
        else:
            flight.replica.send(Orders(cancel=(flight.number,)))
        self._on_end(flight)

    def _on_end(self, flight: Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        finish = flight.finish or (flight.error.reason if flight.error else "")
        latency_s = time.monotonic() - flight.arrived_s
        self.metrics.on_end(finish, latency_s, flight.num_prompt, len(flight.tokens))

    def _fail(self, flight: Flight, error: RejectedError) -> None:
        flight.error = error
        self._on_end(flight)
        flight.notify()

    def _fail_all(self, error: RejectedError) -> None:
        flights = [each for found in self._flights.values() for each in found.values()]
        for found in self._flights.values():
            found.clear()
        for flight in [*flights, *self._queue.clear()]:
            if not flight.is_over:
                self._fail(flight, error)
                if flight.replica is not None:
                    flight.replica.send(Orders(cancel=(flight.number,)))

    def _rejected(self, status: int, reason: str, message: str) -> RejectedError:
        self.metrics.on_rejected(reason)
        return RejectedError(status, reason, message)
