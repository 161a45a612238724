"""From agents that have said hello to ranks that may start: checked on every host."""

import time
from collections.abc import Sequence

from ronde.errors import Failure, HostError, HostFailure, LaunchError, UsageError
from ronde.launch.finding import Finding
from ronde.launch.frames import Output
from ronde.launch.gathering import InterruptedStartError
from ronde.launch.job import Job
from ronde.launch.messages import (
    Check,
    Checked,
    Ending,
    FromAgent,
    Locate,
    Located,
    Notice,
    Prepare,
    Ready,
    Refused,
)
from ronde.launch.node import Loss, Node
from ronde.launch.switchboard import Switchboard

_ANSWER_S = 60.0


class Starting:
    """Asks agents and waits for the answers of all; an attendant of the switchboard.

    Args:
        board: With a node for each agent to be asked.
    """

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._answers: dict[str, FromAgent] = {}
        self._asked: list[Node] = []

    def locate(
        self, nodes: Sequence[Node], addresses: Sequence[str], port: int
    ) -> list[tuple[str, ...]]:
        """Return each node's own addresses towards some others: see ``Locate``.

        Raises:
            HostError: A host was lost or does not answer.
            InterruptedStartError: The user has ended it.
        """
        for node in nodes:
            node.link.send(Locate(tuple(addresses), port))
        answers = self._await(nodes)
        return [a.sources if isinstance(a, Located) else () for a in answers]

    def check(
        self, nodes: Sequence[Node], directory: str
    ) -> dict[str, tuple[Finding, ...]]:
        """Return what each node sees of its host, by name; see ``readiness``.

        Raises:
            HostError: A host was lost or does not answer.
            InterruptedStartError: The user has ended it.
        """
        for node in nodes:
            node.link.send(Check(directory))
        answers = zip(nodes, self._await(nodes), strict=True)
        return {n.name: a.findings for n, a in answers if isinstance(a, Checked)}

    def prepare(self, nodes: Sequence[Node], jobs: Sequence[Job]) -> int:
        """Have each agent check its part; return the port held for rank 0.

        Raises:
            UsageError: The job cannot start as it was asked for.
            LaunchError: It cannot for another reason.
            HostError: A host was lost or does not answer.
            InterruptedStartError: The user has ended it.
        """
        for node, job in zip(nodes, jobs, strict=True):
            node.link.send(Prepare(job))
        answers = self._await(nodes)
        refusals = [
            (node.name, answer)
            for node, answer in zip(nodes, answers, strict=True)
            if isinstance(answer, Refused)
        ]
        if refusals:
            raise refusal(refusals, num_hosts=len(nodes))
        return max(a.master_port for a in answers if isinstance(a, Ready))

    def _await(self, nodes: Sequence[Node]) -> list[FromAgent]:
        self._answers = {}
        self._asked = list(nodes)
        due_s = time.monotonic() + _ANSWER_S
        self._board.serve(
            self,
            lambda: len(self._answers) == len(self._asked),
            lambda: due_s,
        )
        silent = [node for node in self._asked if node.name not in self._answers]
        if silent:
            failure = Failure(f"its agent did not answer within {_ANSWER_S:g} s", "")
            raise HostError(
                f"{len(silent)} of {len(nodes)} hosts do not answer.",
                [HostFailure(node.name, failure) for node in silent],
            )
        return [self._answers[node.name] for node in nodes]

    def take(self, node: Node, message: FromAgent) -> None:
        """Keep an answer."""
        if isinstance(message, Notice):
            self._board.sink.notice(message.text)
        elif isinstance(message, Ready | Refused | Located | Checked):
            self._answers[node.name] = message
        elif isinstance(message, Ending):
            raise InterruptedStartError(message.signal)
        else:
            said = type(message).__name__
            raise LaunchError(f"agent of {node.name} must answer, but it said {said}.")

    def take_output(self, output: Output) -> None:
        """Nothing runs there yet."""
        raise LaunchError(f"rank {output.rank} must not run yet, but it writes.")

    def take_loss(self, node: Node, loss: Loss) -> None:
        """Give up: nothing runs yet, and what cannot start now will not run either."""
        if node.is_here:
            raise LaunchError(
                f"agent must run until the job is over, but {loss.reason}."
            )
        raise HostError(
            "1 host was lost before the ranks ran.",
            [HostFailure(node.name, Failure(loss.reason, f"ssh {node.name}"))],
        )

    def take_signal(self, number: int) -> None:
        """End it: nothing runs yet."""
        raise InterruptedStartError(number)

    def take_broken_output(self) -> None:
        """Nothing was shown yet that anybody could miss."""


def refusal(
    refusals: Sequence[tuple[str, Refused]], num_hosts: int
) -> UsageError | LaunchError:
    """Return the error that says why agents refused; the same reason is said once.

    Args:
        refusals: Name of a host, and what it said.
        num_hosts: How many hosts there are.
    """
    by_reason: dict[str, list[str]] = {}
    for host, refused in refusals:
        by_reason.setdefault(refused.reason, []).append(host)
    told = [
        reason if num_hosts == 1 else f"{', '.join(hosts)}: {reason}"
        for reason, hosts in by_reason.items()
    ]
    is_usage = all(refused.is_usage for _, refused in refusals)
    return (UsageError if is_usage else LaunchError)("\n".join(told))
