"""A controller that connects to more hosts while a rank runs; it prints what came.

``python -m tests.cluster.connecting SSH_CONFIG HOST...``. The first host is this one,
and has the rank. A line of JSON follows for each host: its name, why it has no agent,
and how often the rank was heard since the line before; and one with who is connected.
"""

import json
import signal
import sys

from ronde.errors import Failure, LaunchError
from ronde.launch import (
    ELASTIC,
    EXIT_INTERNAL,
    AgentConnector,
    AgentNode,
    AgentStarter,
    Controller,
    EventLoop,
    Finished,
    Handler,
    Host,
    HostLoss,
    NodeJob,
    NoOutput,
    Output,
    Ready,
    SshSpawner,
    Start,
    StopWorkers,
    WorkerSpec,
    caught_signals,
    start_local_agent,
)
from ronde.processes import adopt_orphans

CONNECT_S = 6.0
# Writes a line every hundredth of a second.
RANK = """
import os, signal
while not signal.sigtimedwait({signal.SIGTERM}, 0.01):
    os.write(1, b"x\\n")
"""


def write_line(value: object) -> None:
    """Write a line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


class Embedding(Handler):
    """Serves one rank, and a connector beside it."""

    def __init__(
        self, loop: EventLoop, node: AgentNode, connector: AgentConnector
    ) -> None:
        super().__init__(loop)
        self.connector = connector
        self._node = node
        self._is_ready = self._is_finished = False
        self._num_heard = 0  # of the rank

    def _await(self, name: str) -> None:
        self._loop.serve(self, lambda: getattr(self, name), lambda: float("inf"))

    def start_rank(self) -> None:
        argv = (sys.executable, "-I", "-S", "-c", RANK)
        job = NodeJob(
            0, "c" * 32, argv, {}, (WorkerSpec(0, {}),), "", 5.0, "127.0.0.1", 0
        )
        self._node.ranks = frozenset({0})
        self._node.send(job)
        self._await("_is_ready")
        self._node.send(Start("127.0.0.1", 0))
        self._loop.serve(self, lambda: self._num_heard > 0, lambda: float("inf"))

    def stop_rank(self) -> None:
        self._node.send(StopWorkers(signal.SIGTERM))
        self._await("_is_finished")

    def connect(self, hosts: list[Host]) -> None:
        missing, num_before = len(hosts), self._num_heard
        self.connector.add(hosts)
        while missing:
            self.connector.advance()
            self._loop.serve(self, self.connector.has_results, self.connector.due_s)
            for host, result in self.connector.collect():
                missing -= 1
                is_failed = isinstance(result, Failure)
                reason = result.reason if is_failed else ""
                write_line([host.name, reason, self._num_heard - num_before])
                num_before = self._num_heard

    def on_message(self, node: AgentNode, message: object) -> None:
        if self.connector.owns(node):
            self.connector.on_message(node, message)
            return
        self._is_ready = self._is_ready or isinstance(message, Ready)
        self._is_finished = isinstance(message, Finished)

    def on_output(self, output: Output) -> None:
        del output
        self._num_heard += 1

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        assert self.connector.owns(node)
        self.connector.on_loss(node, loss)

    def on_fault(self, node: AgentNode, error: LaunchError) -> None:
        self._loop.lose(self, node, HostLoss(str(error), EXIT_INTERNAL))


class Growing(Controller):
    """Runs one rank on the first host, and brings agents to the others meanwhile."""

    def grow(self, first: Host, others: list[Host]) -> None:
        (node,) = self.connect([first])
        connector = AgentConnector(self._loop, self._starter)
        handler = Embedding(self._loop, node, connector)
        handler.start_rank()
        handler.connect(others)
        handler.stop_rank()
        names = sorted(each.name for each in self._loop.live_nodes)
        write_line(names)


def main() -> None:
    """Read the hosts from the command line."""
    adopt_orphans()
    config, first, *others = sys.argv[1:]
    with caught_signals() as signal_fd, start_local_agent() as local:
        starter = AgentStarter(
            local,
            lambda: SshSpawner(["-F", config]),
            timeouts=ELASTIC._replace(connect_s=CONNECT_S),
            has_aliases=True,
        )
        controller = Growing(NoOutput(), signal_fd, starter)
        try:
            controller.grow(Host(first), [Host(name) for name in others])
        finally:
            controller.close()


if __name__ == "__main__":
    main()
