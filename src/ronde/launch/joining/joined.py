"""The nodes that have joined a job, as hosts with an agent each."""

import errno
import subprocess
from collections.abc import Sequence

from ronde.errors import Failure
from ronde.launch.agent_link import AgentLink
from ronde.launch.hiring import Hiring
from ronde.launch.hosts.host import Host
from ronde.launch.joining.wire import TlsWire
from ronde.launch.node import Node
from ronde.launch.timeouts import Timeouts


class JoinedHiring(Hiring):
    """Gives each host the agent that it has brought along.

    Args:
        local: An agent on this machine that was told nothing yet.
        nodes: From ``door.wait_for_nodes``.
        timeouts: How long hosts are waited for.
    """

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        nodes: Sequence[tuple[Host, TlsWire]],
        timeouts: Timeouts,
    ) -> None:
        super().__init__(local, timeouts=timeouts)
        self._brought = {host.name: wire for host, wire in nodes}
        self._names = frozenset(self._brought)

    def start(self, host: Host) -> Node:
        """Return the host's node; a host that was lost has none any more.

        Raises:
            OSError: It had joined, and is gone.
        """
        if host.name not in self._names:
            return super().start(host)
        wire = self._brought.pop(host.name, None)
        if wire is None:
            raise OSError(
                errno.ENOTCONN, "it had joined by itself, and nothing waits for it now"
            )
        return Node(host, AgentLink(wire), is_here=False, timeouts=self.timeouts)

    def explain(self, node: Node, exit_code: int, said: str) -> Failure:
        """Say why the wire to a node ended before its agent spoke."""
        if node.is_here:
            return super().explain(node, exit_code, said)
        return Failure(
            "it has joined and is gone again",
            "look at what ronde run --agent says there",
        )
