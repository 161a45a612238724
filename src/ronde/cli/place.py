"""Options of ``ronde run`` in a pod, from the variables of what started it."""

import argparse
import os
import socket
from collections.abc import Container, Mapping
from functools import partial

from ronde.arguments import CommandParser
from ronde.launch.hosts.place import INDEX, MachineFile, NodeName, find_place

_WINNING = (
    *("standalone", "listen", "agent", "hosts", "hostfile", "launcher"),
    *("host_discovery", "host_discovery_script", "nested"),
)
"""Attributes of options that decide where ranks run; they win over variables."""
_KEPT = ("token_file", "join_timeout", "slots", "nproc_per_node")
"""Attributes of options that also count on the nodes that join."""


def place_node(
    parser: CommandParser,
    options: argparse.Namespace,
    given: Container[str],
    environ: Mapping[str, str],
) -> tuple[argparse.Namespace, str]:
    """Return the options of this node, and a line that names its place or is empty.

    Raises:
        UsageError: As ``find_place``, or a number of slots is wrong.
    """
    if any(name in given for name in _WINNING):
        return options, ""
    host = os.uname().nodename
    node = NodeName(host, partial(socket.getfqdn, host))
    place = find_place(environ, node, options.nodes or "")
    if place is None:
        is_alone = environ.get(INDEX) == "0"
        text = f"{INDEX}=0 alone: if there are more pods, each trains for itself"
        return options, text if is_alone else ""
    if isinstance(place, MachineFile):
        options.hostfile, options.awaits_hosts = place.path, True
        return options, str(place)
    if place.number:
        kept = {name: getattr(options, name) for name in _KEPT}
        options = parser.parse_args(["--agent", place.endpoint])
        vars(options).update(kept)
    else:
        options.listen, options.nodes = str(place.port), place.nodes
    if place.slots and not any(name in given for name in _KEPT[-2:]):
        words = ["--nproc-per-node", place.slots]
        options.nproc_per_node = parser.parse_args(words).nproc_per_node
    options.place = place
    return options, str(place)
