"""Options of ``ronde run`` in a pod, from the variables of its controller."""

import argparse
import os
import socket
from collections.abc import Container, Mapping
from functools import partial

from ronde.arguments import CommandParser, read_nodes
from ronde.launch.hosts.pods import INDEX, MachineFile, PodName, find_pod
from ronde.world.launcher_env import RANK_VARIABLES

_WINNING = (
    *("standalone", "listen", "agent", "hosts", "hostfile", "launcher"),
    *("host_discovery", "host_discovery_script", "nested"),
)
"""Attributes of options that decide where ranks run; they win over variables."""
_OF_PODS = {"RANK", "WORLD_SIZE"}
"""Variables of ranks that controllers set for pods, too."""
_KEPT = ("token_file", "join_timeout", "slots", "nproc_per_node")
"""Attributes of options that also count on the nodes that join."""


def apply_pod(
    parser: CommandParser,
    options: argparse.Namespace,
    given: Container[str],
    environ: Mapping[str, str],
) -> tuple[argparse.Namespace, str]:
    """Return the options of this node, and a line that names its pod or is empty.

    Raises:
        UsageError: As ``find_pod``, or a number of slots is wrong.
    """
    is_rank = bool(environ.keys() & (RANK_VARIABLES - _OF_PODS))
    if is_rank or any(name in given for name in _WINNING):
        return options, ""
    host = os.uname().nodename
    node = PodName(host, partial(socket.getfqdn, host))
    nodes = read_nodes(options.nodes) if options.nodes else None
    pod = find_pod(environ, node, nodes)
    if pod is None:
        is_alone = environ.get(INDEX) == "0"
        text = f"{INDEX}=0 alone: if there are more pods, each trains for itself"
        return options, text if is_alone else ""
    if isinstance(pod, MachineFile):
        options.hostfile, options.awaits_hosts = pod.path, True
        return options, str(pod)
    if pod.number:
        kept = {name: getattr(options, name) for name in _KEPT}
        options = parser.parse_args(["--agent", pod.endpoint])
        vars(options).update(kept)
    else:
        options.listen, options.nodes = str(pod.port), pod.nodes
    if pod.slots and not any(name in given for name in _KEPT[-2:]):
        words = ["--nproc-per-node", pod.slots]
        options.nproc_per_node = parser.parse_args(words).nproc_per_node
    options.pod = pod
    return options, str(pod)
