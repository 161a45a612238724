"""The batch manager: four callbacks on rank 0 feed the loop of all ranks.

The callbacks are those of TensorRT-LLM's GptManager (docs/source/batch_manager.md).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ronde.collectives import connect
from ronde.errors import UsageError
from ronde.serve.engine import InferenceEngine
from ronde.serve.loop import LEADER, Commands, StepResult, run_loop
from ronde.serve.policy import POLICIES, Policy, TokenCounts
from ronde.serve.requests import (
    InferenceRequest,
    Response,
    Statistics,
    counts_of,
    require_servable,
)
from ronde.world import RankInfo, read_rank_info

_IDLE_S = 1.0  # a frame at least so often, so that no rank waits for long
_POLL_S = 0.005


GetRequests = Callable[[int], Iterable[InferenceRequest]]


class BatchManager:
    """A running batch on all ranks, in step, fed by callbacks on rank 0.

    All ranks make one, with engines of the same kind, and call ``run()``. It works
    under ``ronde run``, torchrun, mpirun and without a launcher.

    Args:
        engine: The model on this rank.
        get_requests: Called before each step with the number of requests that could
            start, unless that is 0, and several times a second while nothing runs.
            Returns new ones. One that is invalid, or whose id is in use, gets a final
            response with the error.
        send_response: Called after each step for each request with new tokens.
        poll_stop: Called before each step; returns ids of requests to end.
        send_stats: Called after each step with requests.
        policy: A name of ``POLICIES``: which waiting requests start when.

    Raises:
        UsageError: The policy is unknown, or the engine cannot evict as it must.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        get_requests: GetRequests,
        send_response: Callable[[Response], None],
        poll_stop: Callable[[], Iterable[int]] | None = None,
        send_stats: Callable[[Statistics], None] | None = None,
        *,
        policy: str = "guaranteed_no_evict",
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(
                f"policy must be one of {', '.join(POLICIES)}, got {policy!r}."
            )
        if policy == "max_utilization" and not engine.capacity.evicts:
            raise UsageError(
                "policy must be guaranteed_no_evict or static_batch for an engine that "
                "does not evict, got 'max_utilization'."
            )
        self._engine = engine
        callbacks = _Callbacks(get_requests, send_response, poll_stop, send_stats)
        self._desk = _Desk(engine, callbacks, POLICIES[policy])

    def stop(self) -> None:
        """Let ``run()`` end once all requests so far have ended; from any thread.

        Counts on rank 0 alone.
        """
        self._desk.is_ending.set()

    def run(self, info: RankInfo | None = None) -> None:
        """Serve until ``stop()`` was called on rank 0; collective.

        ``info`` is this rank, read from the environment if None.

        Raises:
            CollectiveError: A rank has ended, or made other tokens than rank 0.
            Exception: A callback or the engine has raised; the other ranks then raise
                ``CollectiveError``.
        """
        group = connect(info or read_rank_info())
        try:
            run_loop(group, self._engine, self._desk if group.rank == LEADER else None)
        except BaseException:
            group.abort()  # the others do not wait for this process to end
            raise
        group.close()


class _Callbacks(NamedTuple):
    get_requests: GetRequests
    send_response: Callable[[Response], None]
    poll_stop: Callable[[], Iterable[int]] | None
    send_stats: Callable[[Statistics], None] | None


class _Desk:
    """The leader: admits, cancels and answers; the only side with callbacks."""

    def __init__(
        self, engine: InferenceEngine, callbacks: _Callbacks, policy: Policy
    ) -> None:
        self._engine, self._callbacks, self._policy = engine, callbacks, policy
        self._waiting: deque[InferenceRequest] = deque()
        self._running: dict[int, TokenCounts] = {}
        self._iteration = 0
        self.is_ending = threading.Event()  # no further requests are taken

    def commands(self, *, is_idle: bool) -> Commands:
        """Return the next commands; wait while there are none and nothing runs."""
        due_s = time.monotonic() + _IDLE_S
        while True:
            self._receive()
            cancel = self._stop()
            add = self._admit()
            is_last = is_idle and self.is_ending.is_set() and not self._running
            if add or cancel or is_last or not is_idle or time.monotonic() >= due_s:
                return Commands(add, cancel, is_last)
            self.is_ending.wait(_POLL_S)

    def on_step(self, result: StepResult) -> None:
        tokens = result.tokens
        self._iteration += bool(self._running)
        for made in tokens:
            if made.id not in self._running:
                raise UsageError(
                    f"an engine must make tokens of requests in progress, got {made}."
                )
            counts = self._running[made.id]
            self._running[made.id] = counts._replace(num_made=counts.num_made + 1)
            is_final = made.finish is not None
            self._callbacks.send_response(
                Response(made.id, (made.token,), is_final, made.finish, (made.logprob,))
            )
            if is_final:
                del self._running[made.id]
        if self._callbacks.send_stats is not None and (tokens or self._running):
            self._callbacks.send_stats(self._statistics(result))

    def _receive(self) -> None:
        most = self._engine.capacity.max_requests
        num_free = most - len(self._running) - len(self._waiting)
        if num_free <= 0 or self.is_ending.is_set():
            return
        for request in self._callbacks.get_requests(num_free):
            try:
                require_servable(request, self._engine.capacity)
                self._require_new(request.id)
            except UsageError as error:
                self._callbacks.send_response(
                    Response(request.id, is_final=True, error=f"{error}")
                )
            else:
                self._waiting.append(request)

    def _require_new(self, request_id: int) -> None:
        if request_id in self._running or any(
            w.id == request_id for w in self._waiting
        ):
            raise UsageError(f"id must not be in use, got {request_id}.")

    def _stop(self) -> tuple[int, ...]:
        """End the requests that are to stop; return those that run."""
        if self._callbacks.poll_stop is None:
            return ()
        stopped: list[int] = []
        for request_id in dict.fromkeys(self._callbacks.poll_stop()):
            waiting = [each for each in self._waiting if each.id == request_id]
            if self._running.pop(request_id, None) is not None:
                stopped.append(request_id)
            elif waiting:
                self._waiting.remove(waiting[0])
            else:
                continue  # it has ended before
            self._callbacks.send_response(
                Response(request_id, is_final=True, finish="cancel")
            )
        return tuple(stopped)

    def _admit(self) -> tuple[InferenceRequest, ...]:
        running = list(self._running.values())
        waiting = [counts_of(each) for each in self._waiting]
        num = self._policy(running, waiting, self._engine.capacity)
        chosen = tuple(self._waiting.popleft() for _ in range(num))
        self._running |= {each.id: counts_of(each) for each in chosen}
        return chosen

    def _statistics(self, result: StepResult) -> Statistics:
        capacity = self._engine.capacity
        blocks = [each.most_blocks(capacity) for each in self._running.values()]
        return Statistics(
            self._iteration, len(self._running), len(self._waiting),
            sum(blocks), capacity.num_blocks, capacity.max_requests,
            result.step_s, result.frame_s,
        )  # fmt: skip
