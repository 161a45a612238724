"""Agents that are connected to beside other work, and hosts that fall silent."""

import os
import signal
import time
from contextlib import contextmanager, suppress

import pytest
from tests.limits import HANG_S

from ronde.errors import Failure
from ronde.launch import (
    ELASTIC,
    AgentConnector,
    AgentStarter,
    EventLoop,
    Handler,
    Host,
    NoOutput,
    Pong,
    SshSpawner,
    StartProgress,
    caught_signals,
    start_local_agent,
)
from ronde.processes import children

NEVER_S = float("inf")
PROMPT = ELASTIC._replace(connect_s=HANG_S, ping_s=0.1, lease_s=HANG_S)
AGENT = 'for last; do :; done; exec sh -c "$last"'
"""An ``ssh`` that leads here."""


class Watching(Handler):
    """Keeps what the connector beside it does not take."""

    def __init__(self, loop, starter):
        super().__init__(loop)
        self.loop = loop
        self.connector = AgentConnector(loop, starter)
        self.lost = []

    def connect(self, *names):
        """Return what became of hosts, by name."""
        found = {}
        self.connector.add([Host(name) for name in names])
        while len(found) < len(names):
            self.connector.advance()
            due_s = self.connector.due_s
            self.loop.serve(self, self.connector.has_results, due_s)
            found |= {host.name: got for host, got in self.connector.collect()}
        return found

    def await_loss(self):
        """Serve until a host is lost; return it, and the reason."""
        self.loop.serve(self, lambda: bool(self.lost), lambda: NEVER_S)
        return self.lost.pop()

    def on_message(self, node, message):
        assert self.connector.owns(node)
        self.connector.on_message(node, message)

    def on_loss(self, node, loss):
        if self.connector.owns(node):
            self.connector.on_loss(node, loss)
        else:
            self.lost.append((node, loss.reason, time.monotonic() - node.heard_at_s))


@pytest.fixture
def watching(tmp_path, monkeypatch):
    """Return ``watching(ssh, timeouts)``, of a machine with an ``ssh`` of its own."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    before = children()

    @contextmanager
    def watching(ssh=AGENT, timeouts=PROMPT):
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\n{ssh}\n")
        program.chmod(0o755)
        output = NoOutput()
        progress = StartProgress(output.notice)
        with caught_signals() as signal_fd, start_local_agent() as local:
            starter = AgentStarter(
                local, SshSpawner, timeouts=timeouts, has_aliases=True
            )
            loop = EventLoop(output, signal_fd, progress, timeouts)
            try:
                yield Watching(loop, starter)
            finally:
                for node in loop.live_nodes:
                    node.close()
                for node in loop.nodes:
                    assert node.transport.wait(HANG_S) is not None
        assert children() == before

    return watching


def test_each_name_of_this_machine_has_its_own_agent(watching):
    with watching() as handler:
        found = handler.connect("localhost", "127.0.0.1")
        found |= handler.connect(os.uname().nodename)
        assert [node.is_here for node in found.values()] == [True] * 3
        assert len({node.transport.pid for node in found.values()}) == 3
        assert len({node.known_hello.identity for node in found.values()}) == 1


def test_a_host_may_come_back(watching):
    with watching() as handler:
        for _ in range(2):
            node = handler.connect("node.invalid")["node.invalid"]
            os.killpg(node.transport.pid, signal.SIGKILL)
            assert handler.await_loss()[0] is node


# Output of the one ends before it does, that of the other never.
@pytest.mark.parametrize("ssh", ["exec sleep 1000 >&-", "exec sleep 1000"])
def test_an_ssh_without_an_agent_is_killed(watching, ssh):
    with watching(ssh, PROMPT._replace(connect_s=0.3)) as handler:
        assert isinstance(handler.connect("node.invalid")["node.invalid"], Failure)
        left = list(handler.loop.nodes)  # until it is known to have ended
        assert all(node.is_over for node in left)
        assert handler.loop.has_strays
        for node in left:
            node.transport.wait(HANG_S)
        handler.connector.advance()
        assert handler.loop.nodes == []


def test_a_host_lost_near_its_memory_limit_says_so(watching):
    # It is not asked, as its own answer would come in between.
    with watching(timeouts=PROMPT._replace(ping_s=float("inf"))) as handler:
        node = handler.connect("node.invalid")["node.invalid"]
        node.on_pong(Pong(0.0, 0.0, 99 << 20, 100 << 20))
        os.killpg(node.transport.pid, signal.SIGKILL)
        _, reason, _ = handler.await_loss()
    assert "s before it used 99MiB of 100MiB of memory, and a container is" in reason


@contextmanager
def stopped(node):
    """Let nothing come from a host whose own addresses answer."""
    os.killpg(node.transport.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(node.transport.pid, signal.SIGCONT)


def test_a_silent_host_is_lost_after_one_lease(watching):
    with watching() as handler:
        node = handler.connect("node.invalid")["node.invalid"]
        with stopped(node):
            # Not before: an agent leaves a controller that is silent for so long.
            node.timeouts = timeouts = PROMPT._replace(lease_s=0.5)
            node.watch(is_watched=True)
            lost, reason, silence_s = handler.await_loss()
    assert lost is node
    assert reason.startswith("no message from it for ")
    assert silence_s > timeouts.lease_s - timeouts.ping_s
    assert not node.has_more_time
