"""``ronde run --listen`` and ``--agent``: the head of a job, and its other nodes."""

import argparse
import os
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ronde.cli.exit_codes import EXIT_UNREACHABLE, exit_code_of
from ronde.cli.run_options import join_timeout_s, own_slots, say, token_file
from ronde.errors import RondeError, UsageError
from ronde.launch.agent_start.starter import JobHosts
from ronde.launch.hosts.host import Host
from ronde.launch.joining.channel import (
    choose_address,
    parse_endpoint,
    release,
    with_port,
)
from ronde.launch.joining.join_client import JoinRequest, join_head, relay
from ronde.launch.joining.join_server import JoinConfig, JoinedAgents, wait_for_nodes
from ronde.launch.joining.mutual_auth import NodeInfo, host_name, read_token
from ronde.launch.process_tree import adopt_orphans
from ronde.launch.signals import InterruptedStartError, interruption_code
from ronde.launch.timeouts import Timeouts


@contextmanager
def joined_nodes(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    timeouts: Timeouts,
) -> Generator[JobHosts]:
    """Wait until all nodes have joined; at the end tell them how the job ended.

    Args:
        options: With ``--listen``.
    """
    config = read_invitation(options, environ)
    head = Host(config.head, own_slots(options))
    nodes = wait_for_nodes(config, signal_fd, say)
    hosts = (head, *(host for host, _ in nodes))
    joined = JobHosts(hosts, JoinedAgents(agent, nodes, timeouts))
    try:
        yield joined
    except InterruptedStartError as error:
        joined.exit_code = interruption_code(error.number)
        raise
    except RondeError as error:
        joined.exit_code = exit_code_of(error)
        raise
    finally:
        release([transport for _, transport in nodes], joined.exit_code)


def read_invitation(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> JoinConfig:
    """Return who may join, and where, as the options say it."""
    nodes = options.nodes
    if not (nodes.isascii() and nodes.isdecimal() and int(nodes) >= 2):
        raise UsageError(
            f"--nodes must be a whole number of at least 2 with --listen, got "
            f"{nodes or 'none'}. Type: ronde run --nodes 3 --listen 29400 ..."
        )
    host, port = parse_endpoint(options.listen, "--listen")
    return JoinConfig(
        address=choose_address(host),
        port=port,
        token=read_token(token_file(options, environ)),
        head=os.uname().nodename,
        num_nodes=int(nodes) - 1,
        timeout_s=join_timeout_s(options),
    )


def run_agent(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
) -> int:
    """Join the head, do as it says, and return the job's exit code.

    Args:
        options: With ``--agent``.
    """
    if options.program:
        raise UsageError(
            f"program must be given to the head alone, got {options.program[0]!r} with "
            "--agent. Drop it."
        )
    host, port = parse_endpoint(options.agent, "--agent")
    if not host or not port:
        raise UsageError(
            f"--agent must be the HEAD:PORT to join, got {options.agent!r}. "
            "Type: ronde run --agent node1:29400"
        )
    request = JoinRequest(
        host=host,
        port=port,
        token=read_token(token_file(options, environ)),
        node_info=NodeInfo(host_name(os.uname().nodename), own_slots(options)),
        timeout_s=join_timeout_s(options),
    )
    adopt_orphans()
    try:
        channel = join_head(request, signal_fd, say)
    except InterruptedStartError as error:
        return 128 + error.number
    where = with_port(host, port)
    say(f"{request.node_info.host} has joined {where}, and ends when that does")
    end = relay(channel, agent, signal_fd, _complain)
    if end.interrupted_by:
        return 128 + end.interrupted_by
    if end.result is None:
        say(f"the head at {where} is gone; all its ranks here were ended")
        return EXIT_UNREACHABLE
    return end.result


def _complain(data: bytes) -> None:
    os.write(2, data)
