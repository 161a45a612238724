"""Looks for operations that wait for ranks which never ask for them."""

import logging
import time

from ronde.coordination.messages import Pending
from ronde.coordination.node import Node
from ronde.coordination.options import CoordinationOptions
from ronde.coordination.root import Root
from ronde.coordination.stall import judge_stall

_logger = logging.getLogger("ronde")
_ANSWER_WITHIN_S = 2.0
_NAMES_TOLD = 64


class Inspector:
    """One rank's part in finding stalls; the root asks, compares and warns.

    Not thread-safe: whoever drives the coordinator calls it.

    Args:
        node: Carries questions and answers.
        options: When to warn, and when to end the job.
    """

    def __init__(self, node: Node, options: CoordinationOptions) -> None:
        self._node = node
        self._options = options
        self._next_ask_s = 0.0
        self._asked_at_s = 0.0
        self._is_waiting = False

    def look(self, oldest_s: float | None) -> None:
        """Ask, compare or warn where it is time.

        To be called about once a second while anything is waited for.

        Args:
            oldest_s: For how long something is waited for here at most; None where
                nothing is.
        """
        warning_s = self._options.stall_warning_s
        if not warning_s:
            return
        now = time.monotonic()
        if oldest_s is not None and oldest_s >= warning_s and now >= self._next_ask_s:
            self._next_ask_s = now + self._repeat_s()
            self._node.ask()
        if isinstance(self._node, Root):
            self._look_as_root(self._node, now)

    def answer(
        self, number: int, waiting: dict[str, float], *, has_joined: bool
    ) -> None:
        """Tell the root what this rank waits for.

        Args:
            number: The question's.
            waiting: Names, and for how many seconds, the oldest first.
            has_joined: Whether this rank has joined.
        """
        names = list(waiting)[:_NAMES_TOLD]
        self._node.answer(
            Pending(
                self._node.tree.rank,
                has_joined,
                tuple(names),
                tuple(round(waiting[name], 3) for name in names),
                number,
            )
        )

    def _repeat_s(self) -> float:
        options = self._options
        if options.stall_shutdown_s:
            return min(options.stall_warning_s, options.stall_shutdown_s / 4, 5.0)
        return options.stall_warning_s

    def _look_as_root(self, root: Root, now: float) -> None:
        if root.is_asked and not self._is_waiting:
            root.question()
            self._asked_at_s = now
            self._is_waiting = True
        if not self._is_waiting:
            return
        size = root.tree.size
        if len(root.answers) < size and now < self._asked_at_s + _ANSWER_WITHIN_S:
            return
        self._is_waiting = False
        verdict = judge_stall(
            root.answers,
            size,
            warning_s=self._options.stall_warning_s,
            shutdown_s=self._options.stall_shutdown_s,
        )
        if verdict.text:
            _logger.warning("%s", verdict.text)
        if verdict.is_fatal:
            root.stop(verdict.text)
