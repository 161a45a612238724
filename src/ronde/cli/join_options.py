"""The options of ``ronde run`` by which nodes join a job by themselves.

Every run loads this; what listens and connects is loaded by those that do.
"""

import argparse
import sys
from collections.abc import Mapping

from ronde.errors import UsageError

_TOKEN_VARIABLE = "RONDE_TOKEN_FILE"  # noqa: S105 - a name, and of a file at that


def add_join_options(parser: argparse.ArgumentParser) -> None:
    """Add what makes a run the head of others, or one of the others."""
    add = parser.add_argument
    add(
        *("--nodes", "--nnodes"),
        metavar="N",
        default="",
        help="with --listen: how many nodes there are, this one counted",
    )
    add(
        "--listen",
        metavar="[ADDR:]PORT",
        default="",
        help="wait there until the other nodes have joined by themselves",
    )
    add(
        "--agent",
        metavar="HEAD:PORT",
        default="",
        help="join the run that listens there, follow it and end with it",
    )
    add(
        "--token-file",
        metavar="FILE",
        default="",
        help="the secret that all nodes are given; - for standard input "
        f"(default: ${_TOKEN_VARIABLE})",
    )
    add(
        "--join-timeout",
        metavar="TIME",
        default="5m",
        help="how long head and nodes wait for each other (default: 5m)",
    )


def require_listen_or_agent(options: argparse.Namespace) -> None:
    """Refuse options that say how to join where nobody joins.

    Raises:
        UsageError: There are such.
    """
    given = {"--nodes": options.nodes, "--token-file": options.token_file}
    if not options.listen and not options.agent and any(given.values()):
        raise UsageError(
            f"{' and '.join(o for o, v in given.items() if v)} must come with --listen "
            "or --agent, got neither. Type: ronde run --nodes 3 --listen 29400 ..."
        )


def token_file(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return where the user says that the token is.

    Raises:
        UsageError: Nobody says.
    """
    path = options.token_file or environ.get(_TOKEN_VARIABLE, "")
    if not path:
        raise UsageError(
            "--token-file must name a file with the secret that all nodes share, got "
            "none. Make one: (umask 077; openssl rand -hex 32 > token)"
        )
    return path


def join_timeout_s(options: argparse.Namespace) -> float:
    """Read ``--join-timeout``.

    Raises:
        UsageError: It is no duration.
    """
    from ronde.units import parse_duration_s

    try:
        return parse_duration_s(options.join_timeout)
    except ValueError as error:
        raise UsageError(f"--join-timeout: {error}") from None


def say(text: str) -> None:
    """Tell the user something that ends nothing."""
    print(f"ronde: {text}", file=sys.stderr, flush=True)
