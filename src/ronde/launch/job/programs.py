"""Programs, one on each host, that answer each line of input with one line."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.launch.hosts.node import AgentNode, HostLoss
from ronde.launch.job.event_loop import EventLoop, Handler
from ronde.launch.signals import STOPPING, InterruptedStartError
from ronde.launch.wire import messages


class Answer(NamedTuple):
    """A host's answer to one line, or the reason why there is none."""

    line: str
    failure: str  # in half a sentence; empty with an answer
    asked_s: float = 0.0  # monotonic
    answered_s: float = 0.0


class RemotePrograms(Handler):
    """One program on each host; all hosts answer in parallel."""

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
            node.watch(is_watched=True)
            node.send(messages.StartProgram(module))

    def ask(self, questions: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        self._answers, self._waiting = {}, {}
        for name, line in questions.items():
            if name in self._ended:
                self._answers[name] = Answer("", self._ended[name])
                continue
            self._waiting[name] = time.monotonic()
            self._nodes[name].send(messages.ProgramLine(line))
        due_s = time.monotonic() + timeout_s
        self._loop.serve(self, lambda: not self._waiting, lambda: due_s)
        for name in list(self._waiting):
            self._num_late[name] += 1
            self._fail(name, f"no answer within {timeout_s:g} s")
        return {name: self._answers[name] for name in questions}

    def on_message(self, node: AgentNode, message: messages.FromAgent) -> None:
        name = node.name
        match message:
            case messages.ProgramLine():
                if self._num_late[name]:
                    # It answers an earlier question, too late.
                    self._num_late[name] -= 1
                elif name in self._waiting:
                    asked_s, now_s = self._waiting.pop(name), time.monotonic()
                    self._answers[name] = Answer(message.line, "", asked_s, now_s)
            case messages.ProgramExited():
                self._end(name, message.reason)
            case messages.HostEnding():
                self._end(name, "its host ended its agent")
            case _:
                super().on_message(node, message)

    def _end(self, name: str, reason: str) -> None:
        self._ended[name] = reason
        self._fail(name, reason)

    def _fail(self, name: str, reason: str) -> None:
        if self._waiting.pop(name, None) is not None:
            self._answers[name] = Answer("", reason)

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        self._end(node.name, loss.reason)

    def on_signal(self, number: int) -> None:
        if number in STOPPING:
            raise InterruptedStartError(number)
