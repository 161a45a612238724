"""``ronde run --listen``: the head of a job that other nodes join by themselves."""

import argparse
import os
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ronde.cli.exit_codes import exit_code_of
from ronde.cli.join_options import join_timeout_s, own_slots, say, token_file
from ronde.errors import RondeError, UsageError
from ronde.launch.hiring import Hired
from ronde.launch.hosts.host import Host
from ronde.launch.joining.address import choose_address, parse_endpoint
from ronde.launch.joining.door import Invitation, wait_for_nodes
from ronde.launch.joining.joined import JoinedHiring
from ronde.launch.joining.token import read_token
from ronde.launch.joining.wire import dismiss
from ronde.launch.signals import InterruptedStartError, interruption_code
from ronde.launch.timeouts import Timeouts


@contextmanager
def joined_nodes(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    timeouts: Timeouts,
) -> Generator[Hired]:
    """Wait until all nodes have joined; at the end tell them how the job ended.

    Args:
        options: With ``--listen``.
        environ: Of this process.
        agent: This node's own, told nothing yet.
        signal_fd: From ``launch.signals.caught_signals``.
        timeouts: How long nodes that have joined are waited for.

    Raises:
        UsageError: The options do not fit, or it cannot be listened there.
        HostError: Not all nodes have come in time.
        InterruptedStartError: The user has ended the wait.
    """
    invitation = read_invitation(options, environ)
    head = Host(invitation.head, own_slots(options))
    nodes = wait_for_nodes(invitation, signal_fd, say)
    hosts = (head, *(host for host, _ in nodes))
    joined = Hired(hosts, JoinedHiring(agent, nodes, timeouts))
    try:
        yield joined
    except InterruptedStartError as error:
        joined.exit_code = interruption_code(error.number)
        raise
    except RondeError as error:
        joined.exit_code = exit_code_of(error)
        raise
    finally:
        dismiss([wire for _, wire in nodes], joined.exit_code)


def read_invitation(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> Invitation:
    """Return who may join, and where, as the options say it.

    Raises:
        UsageError: They do not fit.
    """
    nodes = options.nodes
    if not (nodes.isascii() and nodes.isdecimal() and int(nodes) >= 2):
        raise UsageError(
            f"--nodes must be a whole number of at least 2 with --listen, got "
            f"{nodes or 'none'}. Type: ronde run --nodes 3 --listen 29400 ..."
        )
    host, port = parse_endpoint(options.listen, "--listen")
    return Invitation(
        address=choose_address(host),
        port=port,
        token=read_token(token_file(options, environ)),
        head=os.uname().nodename,
        num_nodes=int(nodes) - 1,
        timeout_s=join_timeout_s(options),
    )
