"""The options of ``ronde run`` by which nodes join a job by themselves.

Every run loads this; what listens and connects is loaded by those that do.
"""

import argparse
import sys
from collections.abc import Mapping

from ronde.cli.host_options import read_slots
from ronde.cli.rank_options import read_num_each
from ronde.errors import UsageError
from ronde.launch.hosts.allocation import take_each
from ronde.launch.hosts.host import Host

_TOKEN_VARIABLE = "RONDE_TOKEN_FILE"  # noqa: S105 - a name, and of a file at that

# Options of ronde run, by their attributes.
_OF_JOINING = ("token_file", "join_timeout")
_OF_A_NODE = ("agent", "token_file", "join_timeout", "slots", "nproc_per_node")
_JOINED = "the nodes are those that join"
_NOT_REACHED = "the nodes join by themselves, and nothing is started there from here"
_OF_OTHER_HOSTS = {
    "hosts": _JOINED,
    "hostfile": _JOINED,
    "host_discovery_script": _JOINED,
    "standalone": "nodes that join make several hosts",
    "launcher": _NOT_REACHED,
    "ssh_args": _NOT_REACHED,
    "ssh-port": _NOT_REACHED,
    "ssh-identity-file": _NOT_REACHED,
    "python": "each node runs the Python that its own ronde run is started with",
    "sync": "a node that joins must have the directory already",
}
"""What names or reaches other hosts, and why that is for nothing where nodes join."""


def add_join_options(parser: argparse.ArgumentParser) -> None:
    """Add what makes a run the head of others, or one of the others."""
    add = parser.add_argument_group("nodes that join by themselves").add_argument
    add(
        "--listen",
        metavar="[ADDR:]PORT",
        default="",
        help="wait there until as many nodes as --nodes says have joined",
    )
    add(
        "--agent",
        metavar="HEAD:PORT",
        default="",
        help="join the run that listens there, with --slots of this node's own",
    )
    add(
        "--token-file",
        metavar="FILE",
        default="",
        help="file with the secret of all nodes; - is standard input "
        f"(default: ${_TOKEN_VARIABLE})",
    )
    add(
        "--join-timeout",
        metavar="TIME",
        default="5m",
        help="how long head and nodes wait for each other (default: 5m)",
    )


def require_listen_or_agent(
    options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    """Refuse options that would change nothing where nodes join, or where none do.

    Args:
        options: Of ``ronde run``.
        given: From ``RunParser.given``.

    Raises:
        UsageError: There are such, or both of the two ways to join.
    """
    how = "--listen" if options.listen else "--agent" if options.agent else ""
    if options.listen and options.agent:
        raise UsageError("--agent must stand without --listen, got both. Drop one.")
    for option, name in given.items():
        if not how and option in _OF_JOINING:
            raise UsageError(
                f"{name} must come with --listen or --agent, got neither. Type: ronde "
                "run --nodes 3 --listen 29400 ..."
            )
        if how and option in _OF_OTHER_HOSTS:
            raise UsageError(
                f"{name} must stand without {how}, got both: "
                f"{_OF_OTHER_HOSTS[option]}. Drop one."
            )
        if options.agent and option not in _OF_A_NODE:
            raise UsageError(
                f"{name} must be given to the head alone, got it with --agent. Drop it "
                "here, and give it to ronde run --listen."
            )


def own_slots(options: argparse.Namespace) -> int:
    """Return how many ranks this node takes.

    Raises:
        UsageError: ``--slots`` or ``--nproc-per-node`` is no such number.
    """
    node = Host("this node", read_slots(options), said_at="--slots")
    return take_each([node], read_num_each(options))[0].slots


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
