"""``ronde run --agent HEAD:PORT``: one node of a job that the head runs."""

import argparse
import os
import subprocess
from collections.abc import Mapping

from ronde.cli.exit_codes import EXIT_UNREACHABLE
from ronde.cli.join_options import join_timeout_s, own_slots, say, token_file
from ronde.errors import UsageError
from ronde.launch.joining.address import parse_endpoint, with_port
from ronde.launch.joining.knock import Knock, join_head
from ronde.launch.joining.proof import Claim, host_name
from ronde.launch.joining.relay import relay
from ronde.launch.joining.token import read_token
from ronde.launch.lineage import adopt_orphans
from ronde.launch.signals import InterruptedStartError


def run_agent(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
) -> int:
    """Join the head, do as it says, and return the job's exit code.

    Args:
        options: With ``--agent``.
        environ: Of this process.
        agent: This node's, told nothing yet.
        signal_fd: From ``launch.signals.caught_signals``.

    Raises:
        UsageError: The options do not fit.
        HostError: The head was not there in time, or did not let this node in.
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
    knock = Knock(
        host=host,
        port=port,
        token=read_token(token_file(options, environ)),
        claim=Claim(host_name(os.uname().nodename), own_slots(options)),
        timeout_s=join_timeout_s(options),
    )
    adopt_orphans()
    try:
        channel = join_head(knock, signal_fd, say)
    except InterruptedStartError as error:
        return 128 + error.number
    where = with_port(host, port)
    say(f"{knock.claim.host} has joined {where}, and ends when that does")
    end = relay(channel, agent, signal_fd, _complain)
    if end.interrupted_by:
        return 128 + end.interrupted_by
    if end.result is None:
        say(f"the head at {where} is gone; all its ranks here were ended")
        return EXIT_UNREACHABLE
    return end.result


def _complain(data: bytes) -> None:
    os.write(2, data)
