"""Agents for hosts: the one that was started here, and others through a spawner."""

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ronde.errors import Failure, LaunchError
from ronde.launch.agent_link import AgentLink
from ronde.launch.boot import start_local_agent
from ronde.launch.hosts.here import is_here
from ronde.launch.hosts.host import Host
from ronde.launch.limits import EXIT_NO_FORK
from ronde.launch.node import EXIT_INTERNAL, Node
from ronde.launch.spawners.base import Spawner
from ronde.launch.spawners.by_hand import UNKNOWN_NAME
from ronde.launch.timeouts import USUAL, Timeouts
from ronde.launch.wire import ProcessWire

_MANY = 8
"""Hosts whose names are looked up at once, and not one after the other."""


class Hiring:
    """Brings an agent to a host.

    Args:
        local: An agent on this machine that was told nothing yet; the first host that
            is this machine gets it.
        make_spawner: Makes what leads to other hosts; called once, when it is needed.
            None where all hosts are this machine.
        python: The Python to run there.
        timeouts: How long hosts are waited for.
    """

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        make_spawner: Callable[[], Spawner] | None = None,
        python: str = sys.executable,
        timeouts: Timeouts = USUAL,
    ) -> None:
        self.timeouts = timeouts
        self._local: subprocess.Popen[bytes] | None = local
        self._make_spawner = make_spawner
        self._python = python
        self._here = ""
        self._found: dict[str, tuple[str, ...]] = {}
        self.looked_up_s = 0.0
        """How long it took to find out whether the last host is this machine."""

    @functools.cached_property
    def spawner(self) -> Spawner:
        """What leads to other hosts."""
        if self._make_spawner is None:
            raise AssertionError("all hosts were to be this machine")
        return self._make_spawner()

    def is_here(self, host: Host) -> bool:
        """Say whether a host is this machine, so that nothing need lead there.

        At most one is: a name that stands for it too is found out by what its agent
        says. So no more names are looked up than there must be.
        """
        if self._make_spawner is None:
            return True
        begun_s = time.monotonic()
        if not self._here and is_here(host, self._found.get(host.name)):
            self._here = host.name
        self.looked_up_s = time.monotonic() - begun_s
        return host.name == self._here

    def look_up(self, hosts: Sequence[Host], stop_fd: int) -> dict[str, Failure]:
        """Look the names of many hosts up; return why some need not be connected to.

        Args:
            hosts: Which. Of few, and of those that were looked up before, none is.
            stop_fd: When it is readable no more answers are waited for.
        """
        names = [host.name for host in hosts if host.name not in self._found]
        if self._make_spawner is None or len(names) < _MANY:
            return {}
        # Imported where it is needed: most jobs have few hosts.
        from ronde.launch.hosts.lookup import LIMIT_S, look_up

        answers = look_up(names, stop_fd)
        self._found |= {name: answers.get(name, ()) for name in names}
        absent = [name for name, found in answers.items() if not found]
        is_vain = bool(absent) or not answers
        if not is_vain or not self.spawner.leads_by_name(names[0]):
            return {}
        silent = Failure(
            f"no name server answers within {LIMIT_S:g} s",
            "name addresses, or see /etc/resolv.conf",
        )
        return dict.fromkeys(absent, UNKNOWN_NAME) | {
            name: silent for name in names if name not in answers
        }

    def start(self, host: Host) -> Node:
        """Start an agent for a host, without waiting for it.

        Raises:
            OSError: What leads there cannot be started here.
        """
        if self.is_here(host):
            local, self._local = self._local or start_local_agent(), None
            return Node(host, AgentLink(ProcessWire(local)), is_here=True)
        # Imported where it is needed: a job on this machine starts without.
        from ronde.launch.remote_boot import start_remote_agent

        wire, greeting = start_remote_agent(self.spawner, host, self._python)
        link = AgentLink(wire, greeting)
        return Node(host, link, is_here=False, timeouts=self.timeouts)

    def explain(self, node: Node, exit_code: int, said: str) -> Failure:
        """Say why the wire to a node ended before its agent spoke.

        Raises:
            LaunchError: This machine could not start one.
        """
        if node.is_here:
            if exit_code == EXIT_NO_FORK:
                raise LaunchError(said.strip())
            return Failure(f"its agent ended with exit code {exit_code}: {said}", "")
        return self.spawner.explain(node.host, exit_code, said)


@dataclass(slots=True)
class Hired:
    """The hosts of a job and their agents.

    Attributes:
        hosts: In the order of the ranks.
        hiring: How they get agents.
        exit_code: The job's, to be set when it is known.
    """

    hosts: tuple[Host, ...]
    hiring: Hiring
    exit_code: int = EXIT_INTERNAL
