"""Starts an agent on a host, and explains one that does not begin."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ronde.errors import Failure, HostFailure, LaunchError
from ronde.launch.host import LOOK_UP_S, Host, LookUp, is_here, look_up
from ronde.launch.hosts.bootstrap import start_local_agent
from ronde.launch.hosts.node import AgentNode, ProcessTransport
from ronde.launch.hosts.spawner import (
    BOOTSTRAP,
    NO_ANSWER,
    UNKNOWN_NAME,
    HelloReader,
    Spawner,
)
from ronde.launch.limits import (
    EXIT_NO_FORK,
    USUAL,
    Timeouts,
)
from ronde.launch.process_tree import end_with

_SENTINEL_BYTES = 32
_MANY = 8  # hosts whose names are looked up at once, and not one after the other
_MAX_EXPLAINED = 8


def start_remote_agent(
    spawner: Spawner, host: Host, python: str, timeouts: Timeouts = USUAL
) -> AgentNode:
    process = subprocess.Popen(
        spawner.command(host, [python, "-E", "-S", "-c", BOOTSTRAP]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        # The controller has one thread, so that code between fork and exec is safe.
        preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    )
    transport = ProcessTransport(process)
    sentinel = os.urandom(_SENTINEL_BYTES).hex()
    here = Path(__file__)
    program = here.with_name("remote_bootstrap.py").read_text(encoding="utf-8")
    call = f"bootstrap({sentinel!a}, {str(here.parents[3])!a})"
    # It is shorter than any pipe; who has gone already does not get it.
    with suppress(BrokenPipeError):
        transport.write(memoryview(f"exec({program!a}); {call}\n".encode()))
    reader = HelloReader(spawner.name, sentinel[::-1].encode())
    return AgentNode(host, transport, reader, is_here=False, timeouts=timeouts)


class AgentStarter:
    """Starts agents; ``make_spawner`` is None where all hosts are this machine.

    With ``has_aliases`` several hosts may be this machine, each with its own agent.
    """

    def __init__(
        self,
        local: "subprocess.Popen[bytes]",
        make_spawner: Callable[[], Spawner] | None = None,
        python: str = sys.executable,
        timeouts: Timeouts = USUAL,
        *,
        has_aliases: bool = False,
    ) -> None:
        self.timeouts = timeouts
        self._has_aliases = has_aliases
        self._local: subprocess.Popen[bytes] | None = local
        self._make_spawner = make_spawner
        self._python = python
        self._here: set[str] = set()
        self._found: dict[str, tuple[str, ...]] = {}
        self._asked: dict[str, LookUp] = {}

    @functools.cached_property
    def spawner(self) -> Spawner:
        if self._make_spawner is None:
            raise AssertionError("all hosts were to be this machine")
        return self._make_spawner()

    def is_here(self, host: Host) -> bool:
        if self._make_spawner is None:
            return True
        is_open = self._has_aliases or not self._here
        if is_open and is_here(host, self._found.get(host.name)):
            self._here.add(host.name)
        return host.name in self._here

    def look_up(self, hosts: Sequence[Host], stop_fd: int) -> dict[str, Failure]:
        """Look up the names of many hosts; return why some need not be connected to."""
        names = [host.name for host in hosts if host.name not in self._found]
        if self._make_spawner is None or len(names) < _MANY:
            return {}
        answers = look_up(names, stop_fd)
        self._found |= {name: answers.get(name, ()) for name in names}
        absent = [name for name, found in answers.items() if not found]
        is_vain = bool(absent) or not answers
        if not is_vain or not self.spawner.leads_by_name(names[0]):
            return {}
        silent = Failure(
            f"no name server answers within {LOOK_UP_S:g} s",
            "name addresses, or see /etc/resolv.conf",
        )
        return dict.fromkeys(absent, UNKNOWN_NAME) | {
            name: silent for name in names if name not in answers
        }

    def is_looked_up(self, host: Host) -> bool:
        """Look its name up in a thread, so that ``start`` does not wait for that."""
        name = host.name
        if self._make_spawner is None or self._found.get(name):
            return True
        asked = self._asked.pop(name, None) or LookUp([name])
        if not asked.is_over():
            self._asked[name] = asked
            return False
        # Where no name server has answered, what leads there asks once more.
        self._found[name] = asked.answers.get(name, ())
        return True

    def start(self, host: Host) -> AgentNode:
        if self.is_here(host):
            local, self._local = self._local or start_local_agent(), None
            transport = ProcessTransport(local)
            return AgentNode(host, transport, is_here=True, timeouts=self.timeouts)
        return start_remote_agent(self.spawner, host, self._python, self.timeouts)

    def explain(self, node: AgentNode, exit_code: int, complaints: str) -> Failure:
        if not node.is_here:
            return self.spawner.explain(node.host, exit_code, complaints)
        if exit_code == EXIT_NO_FORK and not self._has_aliases:
            raise LaunchError(complaints.strip())
        return Failure(f"its agent ended with exit code {exit_code}: {complaints}", "")

    def explain_silence(
        self, failures: Sequence[HostFailure], hosts: Sequence[Host]
    ) -> list[HostFailure]:
        """Return failures; of hosts that did not answer, with the reason if found."""
        # Imported where it is needed: most hosts answer.
        from concurrent.futures import ThreadPoolExecutor

        reasons = {each.host: each.failure.reason for each in failures}
        silent = [h for h in hosts if reasons.get(h.name, "").startswith(NO_ANSWER)]
        # It takes seconds a host, and many hosts mostly have one reason.
        silent = silent[:_MAX_EXPLAINED]
        with ThreadPoolExecutor(_MAX_EXPLAINED) as pool:
            found = zip(
                silent, pool.map(self.spawner.explain_silence, silent), strict=True
            )
            by_name = {host.name: failure for host, failure in found}
        return [HostFailure(e.host, by_name.get(e.host) or e.failure) for e in failures]
