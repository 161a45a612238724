"""Questions to all agents before ranks run, and to programs beside them."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.errors import Failure, HostError, HostFailure, LaunchError, UsageError
from ronde.launch import messages
from ronde.launch.event_loop import EventLoop, Handler
from ronde.launch.node import EXIT_UNREACHABLE, AgentNode, HostLoss
from ronde.launch.signals import InterruptedStartError


class Starting(Handler):
    """Asks agents and waits for the answers of all.

    Where a host is lost the others are heard all the same: what they answered does not
    come when they are asked again.
    """

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(loop)
        self._answers: dict[str, messages.FromAgent] = {}
        self._lost: list[tuple[AgentNode, HostLoss]] = []

    def locate(
        self, nodes: Sequence[AgentNode], addresses: Sequence[str], port: int
    ) -> list[tuple[str, ...]]:
        """Return each node's own addresses towards some others: see ``Locate``."""
        for node in nodes:
            node.link.send(messages.Locate(tuple(addresses), port))
        step = ("to reach rank 0's port", "port reached")
        if not port:
            step = ("to look for routes", "routes found")
        answers = self._await(nodes, *step)
        return [a.sources if isinstance(a, messages.Located) else () for a in answers]

    def prepare(
        self, nodes: Sequence[AgentNode], jobs: Sequence[messages.NodeJob]
    ) -> int:
        """Have each agent check its part; return the port held for rank 0."""
        for node, job in zip(nodes, jobs, strict=True):
            node.link.send(messages.Prepare(job))
        step = ("to check program and directory", "program and directory checked")
        answers = self._await(nodes, *step)
        refusals = [
            (node.name, answer)
            for node, answer in zip(nodes, answers, strict=True)
            if isinstance(answer, messages.Refused)
        ]
        if refusals:
            raise refusal(refusals, num_hosts=len(nodes))
        return max(a.master_port for a in answers if isinstance(a, messages.Ready))

    def await_output(self) -> None:
        loop = self._loop
        loop.progress.begin("to be ready", lambda: ["the output"])
        loop.serve(self, lambda: loop.output.is_settled, lambda: float("inf"))
        loop.progress.end("output ready")
        if self._lost:
            raise _loss_error(self._lost)

    def _await(
        self, nodes: Sequence[AgentNode], step: str, done: str
    ) -> list[messages.FromAgent]:
        self._answers = {}

        def awaited() -> list[AgentNode]:
            return [n for n in nodes if not n.is_over and n.name not in self._answers]

        progress = self._loop.progress
        progress.begin(step, lambda: [node.name for node in awaited()])
        limit_s = self._loop.timeouts.answer_s
        due_s = time.monotonic() + limit_s
        self._loop.serve(self, lambda: not awaited(), lambda: due_s)
        for node in awaited():
            reason = f"its agent did not answer within {limit_s:g} s"
            node.link.transport.kill()
            self._loop.lose(self, node, HostLoss(reason, EXIT_UNREACHABLE))
        if self._lost:
            raise _loss_error(self._lost)
        progress.end(done)
        return [self._answers[node.name] for node in nodes]

    def take(self, node: AgentNode, message: messages.FromAgent) -> None:
        match message:
            case messages.Notice():
                self._loop.output.notice(message.text)
            case messages.Ready() | messages.Refused() | messages.Located():
                self._answers[node.name] = message
            case messages.HostEnding():
                raise InterruptedStartError(message.signal)
            case _:
                kind = type(message).__name__
                raise LaunchError(
                    f"agent of {node.name} must answer, but it sent {kind}."
                )

    def take_loss(self, node: AgentNode, loss: HostLoss) -> None:
        self._lost.append((node, loss))


def _loss_error(lost: Sequence[tuple[AgentNode, HostLoss]]) -> LaunchError:
    for node, loss in lost:
        if node.is_here:
            return LaunchError(
                f"agent must run until the job is over, but {loss.reason}."
            )
    hosts = "1 host was" if len(lost) == 1 else f"{len(lost)} hosts were"
    return HostError(
        f"{hosts} lost before the ranks ran.",
        [
            HostFailure(node.name, Failure(loss.reason, f"ssh {node.name}"))
            for node, loss in lost
        ],
    )


def refusal(
    refusals: Sequence[tuple[str, messages.Refused]], num_hosts: int
) -> UsageError | LaunchError:
    """Return the error that says why agents refused, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for host, refused in refusals:
        by_reason.setdefault(refused.reason, []).append(host)
    lines = [
        reason if num_hosts == 1 else f"{', '.join(hosts)}: {reason}"
        for reason, hosts in by_reason.items()
    ]
    is_usage = all(refused.is_usage for _, refused in refusals)
    return (UsageError if is_usage else LaunchError)("\n".join(lines))


class Answer(NamedTuple):
    """What came of a question to one host."""

    line: str  # the program's answer; empty where there was none
    failure: str  # why there was none, in half a sentence; empty where there was one
    asked_s: float = 0.0  # when it was sent off, on the monotonic clock
    answered_s: float = 0.0  # when the answer was here


class RemotePrograms(Handler):
    """One program on each host, which answers each line with one line.

    A host whose program has ended, or that is gone, gives no answers any more; the
    others go on.
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
            node.link.send(messages.StartProgram(module))

    def ask(self, questions: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        """Return the answers to a question a host, by the host's name."""
        self._answers, self._waiting = {}, {}
        for name, line in questions.items():
            if name in self._ended:
                self._answers[name] = Answer("", self._ended[name])
                continue
            self._waiting[name] = time.monotonic()
            self._nodes[name].link.send(messages.WriteLine(line))
        due_s = time.monotonic() + timeout_s
        self._loop.serve(self, lambda: not self._waiting, lambda: due_s)
        for name in list(self._waiting):
            self._num_late[name] += 1
            self._fail(name, f"no answer within {timeout_s:g} s")
        return {name: self._answers[name] for name in questions}

    def take(self, node: AgentNode, message: messages.FromAgent) -> None:
        name = node.name
        match message:
            case messages.ProgramLine():
                if self._num_late[name]:
                    # It belongs to a question that nobody waits for any more.
                    self._num_late[name] -= 1
                elif name in self._waiting:
                    asked_s, now_s = self._waiting.pop(name), time.monotonic()
                    self._answers[name] = Answer(message.line, "", asked_s, now_s)
            case messages.ProgramExited():
                self._end(name, message.reason)
            case messages.Notice():
                self._loop.output.notice(message.text)
            case messages.HostEnding():
                self._end(name, "its host ended its agent")
            case _:
                kind = type(message).__name__
                raise LaunchError(
                    f"agent of {name} must pass on answers, but it sent {kind}."
                )

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
