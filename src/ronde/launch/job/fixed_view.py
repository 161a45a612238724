"""The view of a plain job: all its workers, until the first of them fails."""

import signal
import time
from math import inf

from ronde.launch.hosts.node import AgentNode, HostLoss
from ronde.launch.job.failure import JobResult, RankEnd, find_awaited, has_lost_peer
from ronde.launch.job.generation import CAUSE_WITHIN_S, Generation
from ronde.launch.wire import messages


class FixedView:
    """Ends the job with the first failure, once its cause is known.

    A worker that lost a peer may end before that peer does. Others are not stopped for
    a moment then: a worker that is stopped cannot show its own exit code.
    """

    can_lose_hosts = False

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._cause_by_s = inf
        self._awaited: set[int] = set()  # workers of which one may be the cause

    @property
    def is_ending(self) -> bool:
        return self._cause_by_s < inf

    def begin(self, start: messages.Start) -> None:
        """Do nothing: the agents start the workers that are in their jobs."""

    def due_s(self) -> float:
        return self._cause_by_s

    def on_due(self) -> None:
        self._generation.stop(signal.SIGTERM)

    def on_message(
        self,
        node: AgentNode,  # noqa: ARG002
        message: messages.FromAgent,  # noqa: ARG002
    ) -> bool:
        return False

    def on_exit(self, exited: messages.Exited) -> None:
        was_awaited = exited.worker in self._awaited
        self._awaited.discard(exited.worker)
        if exited.status:
            end = self._generation.end_of(exited)
            if was_awaited and not end.is_secondary:
                self._awaited.clear()
            else:
                self._awaited |= self._find_awaited(end)
            wait_s = min(self._generation.grace_s, CAUSE_WITHIN_S)
            self._cause_by_s = min(self._cause_by_s, time.monotonic() + wait_s)
        if self.is_ending and not self._awaited:
            self._generation.stop(signal.SIGTERM)

    def _find_awaited(self, end: RankEnd) -> set[int]:
        workers = self._generation.workers
        running = {n: worker for n, worker in workers.items() if worker.exited is None}
        if end.is_secondary or end.status < 0 or end.traceback:
            return find_awaited(end, running.keys())
        # It does not show why. Another one's exception, of a moment ago, may be the
        # cause; unless it was handled, that one ends, too.
        after_s = time.monotonic() - CAUSE_WITHIN_S
        return {
            number
            for number, worker in running.items()
            if worker.tail.written_at_s > after_s
            and (traceback := worker.tail.traceback())
            and not has_lost_peer(traceback)
        }

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:  # noqa: ARG002
        if not self._generation.is_stopping:
            self._generation.stop(signal.SIGTERM)

    def finish(self, result: JobResult) -> JobResult:
        return result
