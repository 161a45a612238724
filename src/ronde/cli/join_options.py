"""The options of ``ronde run`` by which nodes join a job by themselves.

Every run loads this; what listens and connects is loaded by those that do.
"""

import argparse
import sys
from collections.abc import Mapping

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_OPEN

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
    """Refuse options that contradict each other where nodes join, or where none do.

    Raises:
        UsageError: There are such.
    """
    how = "--listen" if options.listen else "--agent" if options.agent else ""
    if options.listen and options.agent:
        raise UsageError("--agent must stand without --listen, got both. Drop one.")
    joining = {"--nodes": options.nodes, "--token-file": options.token_file}
    naming = {
        "--hosts": options.hosts,
        "--hostfile": options.hostfile,
        "--host-discovery-script": options.host_discovery_script,
    }
    for option, value in (naming if how else joining).items():
        if not value:
            continue
        if how:
            raise UsageError(
                f"{option} must stand without {how}, got both: the nodes are those "
                "that join. Drop one."
            )
        raise UsageError(
            f"{option} must come with --listen or --agent, got neither. Type: ronde "
            "run --nodes 3 --listen 29400 ..."
        )


def own_slots(options: argparse.Namespace) -> int:
    """Return how many ranks this node takes.

    Raises:
        UsageError: ``--slots`` is no number of slots.
    """
    if options.slots is None:
        return SLOTS_OPEN
    from ronde.launch.hosts.names import MAX_SLOTS, parse_number

    return parse_number(options.slots, "slots", "--slots", lowest=1, highest=MAX_SLOTS)


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
