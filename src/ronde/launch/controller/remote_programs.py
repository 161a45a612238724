"""Questions to one program on each of several hosts, asked all at once."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.errors import LaunchError
from ronde.launch.event_loop import EventLoop, Handler
from ronde.launch.messages import (
    FromAgent,
    HostEnding,
    Notice,
    ProgramExited,
    ProgramLine,
    StartProgram,
    WriteLine,
)
from ronde.launch.node import AgentNode, HostLoss
from ronde.launch.signals import InterruptedStartError


class Answer(NamedTuple):
    """What came of a question to one host."""

    line: str  # the program's answer; empty where there was none
    failure: str  # why there was none, in half a sentence; empty where there was one
    asked_s: float = 0.0  # when it was sent off, on the monotonic clock
    answered_s: float = 0.0  # when the answer was here


class RemotePrograms(Handler):
    """One program on each host.

    The program answers each line with one line. A host whose program has ended, or that
    is gone, gives no answers any more; the others go on.
    """

    def __init__(
        self, loop: EventLoop, nodes: Sequence[AgentNode], module: str
    ) -> None:
        super().__init__(loop)
        self._nodes = {node.name: node for node in nodes}
        self._ended: dict[str, str] = {}
        self._waiting: dict[str, float] = {}
        self._answers: dict[str, Answer] = {}
        self._num_late: dict[str, int] = dict.fromkeys(self._nodes, 0)
        for node in nodes:
            # A host that falls silent is to be noticed, whatever its program does.
            node.watch(is_watched=True)
            node.link.send(StartProgram(module))

    def ask(self, questions: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        """Return the answers to a question a host, by the host's name."""
        self._answers, self._waiting = {}, {}
        for name, line in questions.items():
            if name in self._ended:
                self._answers[name] = Answer("", self._ended[name])
                continue
            self._waiting[name] = time.monotonic()
            self._nodes[name].link.send(WriteLine(line))
        due_s = time.monotonic() + timeout_s
        self._loop.serve(self, lambda: not self._waiting, lambda: due_s)
        for name in list(self._waiting):
            self._num_late[name] += 1
            self._fail(name, f"no answer within {timeout_s:g} s")
        return {name: self._answers[name] for name in questions}

    def take(self, node: AgentNode, message: FromAgent) -> None:
        """Take note of an answer, or that there will be none."""
        match message:
            case ProgramLine():
                self._take_answer(node.name, message.line)
            case ProgramExited():
                self._end(node.name, message.reason)
            case Notice():
                self._loop.output.notice(message.text)
            case HostEnding():
                self._end(node.name, "its agent was told to end")
            case _:
                said = type(message).__name__
                raise LaunchError(
                    f"agent of {node.name} must pass on answers, but it said {said}."
                )

    def _take_answer(self, name: str, line: str) -> None:
        if self._num_late[name]:
            # It belongs to a question that nobody waits for any more.
            self._num_late[name] -= 1
        elif name in self._waiting:
            asked_s = self._waiting.pop(name)
            self._answers[name] = Answer(line, "", asked_s, time.monotonic())

    def _end(self, name: str, reason: str) -> None:
        self._ended[name] = reason
        self._fail(name, reason)

    def _fail(self, name: str, reason: str) -> None:
        if self._waiting.pop(name, None) is not None:
            self._answers[name] = Answer("", reason)

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        self._end(node.name, loss.reason)

    def take_signal(self, number: int) -> None:
        raise InterruptedStartError(number)
