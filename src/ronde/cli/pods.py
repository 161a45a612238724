"""Pods of a job: number, head and options, from variables of their controller.

Note [Numbers of pods]
    Controllers of Kubernetes, Volcano and SkyPilot start one command in every pod, with
    its number in variables of their own. Number 0 is the head; the others join it.
    Ronde's own variables count before those of a controller, which must agree with
    them, so that no pod trains a world of its own by mistake.

Sources: the controllers' code at the versions that docs/how-to/kubernetes.md names.
"""

import argparse
import os
import re
import socket
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ronde.arguments import CommandParser, read_nodes, read_number
from ronde.errors import UsageError
from ronde.world.launcher_env import RANK_VARIABLES

PORT = 29400
"""The head's port if no variable has one."""
INDEX = "JOB_COMPLETION_INDEX"
_HOSTFILES = (
    *("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE"),
    "HYDRA_HOST_FILE",
)
_MOST = 1 << 16
_CURE = "Correct it, or unset it."
_WINNING = (
    *("standalone", "listen", "agent", "hosts", "hostfile", "launcher"),
    *("host_discovery", "host_discovery_script", "nested"),
)
"""Attributes of options that decide where ranks run; they win over variables."""
_OF_PODS = {"RANK", "WORLD_SIZE"}
"""Variables of ranks that controllers set for pods, too."""
_KEPT = ("token_file", "join_timeout", "slots", "nproc_per_node")
"""Attributes of options that also count on the nodes that join."""
_Environment = Mapping[str, str]


class _Names(NamedTuple):
    """The variables of a controller."""

    nodes: str
    number: str
    head: str = ""
    port: str = ""
    slots: str = ""
    endpoint: str = ""  # the head with its port, which also knows itself by it


_OURS = _Names("RONDE_NODES", "RONDE_NODE_INDEX", endpoint="RONDE_HEAD")
_LEADER_WORKER_SET = _Names("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
_TORCHRUN = _Names(
    *("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    *("PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT"),
)
_SKYPILOT = _Names(
    *("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
    slots="SKYPILOT_NUM_GPUS_PER_NODE",
)
_VOLCANO = _Names("WORLD_SIZE", "RANK", "MASTER_ADDR")


class PodName(NamedTuple):
    """The host name of this node, and a function that finds its domain."""

    host: str
    fqdn: Callable[[], str]

    def head(self, number: int) -> str:
        """Return the name of pod 0, if this one is ``number`` of the same Job."""
        if number == 0:
            return self.host
        first, dot, domain = self.fqdn().partition(".")
        return re.sub(r"\d+$", "0", first) + dot + domain

    def number_below(self, head: str) -> int:
        """Return 0 if this host is the head, else -1, as its number is unknown."""
        return -(head.partition(".")[0] != self.host.partition(".")[0])


class Pod(NamedTuple):
    """The number of a pod, the numbers of pods of its job, and their head."""

    source: str  # the variable of the number
    number: int  # 0 for the head, -1 if unknown
    least: int
    most: int  # above ``least`` in an elastic job
    head: str
    port: int = PORT
    slots: str = ""  # as ``--nproc-per-node``

    @property
    def nodes(self) -> str:
        """The number of nodes as ``--nodes`` takes it."""
        is_fixed = self.least == self.most
        return f"{self.least}" if is_fixed else f"{self.least}:{self.most}"

    @property
    def endpoint(self) -> str:
        # Imported here: most jobs start without ssl.
        from ronde.launch.wire.tls import with_port

        return with_port(self.head, self.port)

    def __str__(self) -> str:
        number = "pod" if self.number < 0 else f"pod {self.number}"
        does = f"joins {self.endpoint}" if self.number else "is the head"
        return f"{number} of {self.nodes} ({self.source}) {does}"


class MachineFile(NamedTuple):
    """A host file of an MPI launcher, which reaches its hosts by ssh."""

    source: str
    path: str

    def __str__(self) -> str:
        return f"hosts of {self.path} ({self.source})"


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


def find_pod(
    environ: _Environment, node: PodName, nodes: tuple[int, int] | None = None
) -> Pod | MachineFile | None:
    """Return this pod's number and head; None if no variable implies several pods.

    ``nodes`` are the least and the most that the user asks for: see
    Note [Numbers of pods].

    Raises:
        UsageError: Variables are incomplete, invalid or contradict each other.
    """
    if (file := _machine_file(environ)) is not None:
        return file
    index = _number(environ, INDEX) if INDEX in environ else -1
    found = list(_pods(environ, node))
    count = (found[0].least, found[0].most) if found else nodes
    if index >= 0 and count is not None:
        found.append(Pod(INDEX, index, *count, node.head(index)))
    if not found and index > 0:
        raise UsageError(
            f"nodes must be known in pod {index} of an Indexed Job, got {INDEX} alone. "
            "Type: ronde run --nodes N, or --standalone to train in each pod for "
            "itself."
        )
    if not found:
        return None
    pod = found[0]
    if nodes:
        found.append(pod._replace(source="--nodes", least=nodes[0], most=nodes[1]))
    for other in found[1:]:
        if other.number not in (-1, pod.number) and pod.number >= 0:
            raise _contradiction(pod.source, pod.number, other.source, other.number)
        if other.least > pod.most or pod.least > other.most:
            names = f"nodes by {pod.source}", f"by {other.source}"
            raise _contradiction(names[0], pod.nodes, names[1], other.nodes)
    pod = pod._replace(least=found[-1].least, most=found[-1].most) if nodes else pod
    if pod.least == pod.most <= pod.number:
        raise UsageError(
            f"{pod.source} must be below the number of nodes, got {pod.number} of "
            f"{pod.most}. Correct one of them."
        )
    return pod if pod.most > 1 else None


def _contradiction(name: str, value: object, other: str, its: object) -> UsageError:
    return UsageError(
        f"{name} and {other} must agree, got {value} and {its}. Unset one."
    )


def _machine_file(environ: _Environment) -> MachineFile | None:
    role = environ.get("K_MPI_JOB_ROLE")
    files = [MachineFile(n, environ[n]) for n in _HOSTFILES if environ.get(n)]
    names = ", ".join(file.path for file in files) or "none"
    there = next((file for file in files if Path(file.path).is_file()), None)
    if role == "worker":
        raise UsageError(
            "worker of an MPIJob must run sshd or ronde run --agent, got ronde run "
            "alone. Type: ronde run --agent LAUNCHER:29400"
        )
    if role == "launcher" and there is None:
        raise UsageError(
            f"launcher of an MPIJob must have a host file, got {names}. Name one "
            "with --hostfile."
        )
    return there


def _pods(environ: _Environment, node: PodName) -> Iterable[Pod]:
    """Yield the pod by the variables of ronde and of each controller."""
    is_own = _OURS.number in environ or INDEX not in environ
    ours = _OURS if is_own else _OURS._replace(number=INDEX)
    for names in (ours, _LEADER_WORKER_SET, _TORCHRUN, _SKYPILOT):
        if environ.get(names.nodes, "1") != "1":
            yield _read_pod(environ, names, node)
        else:
            _require_alone(environ, names)
    if "VC_TASK_INDEX" in environ and "RANK" in environ:
        yield _read_pod(environ, _VOLCANO, node)


def _require_alone(environ: _Environment, names: _Names) -> None:
    """Refuse variables that a pod without others does not have."""
    own = (_OURS.endpoint,) if names.nodes == _OURS.nodes else ()
    numbers = (names.number,) if environ.get(names.number, "0").strip("0") else ()
    for name in (*own, *numbers):
        if name in environ and name != INDEX:
            count = environ.get(names.nodes, "none")
            raise UsageError(
                f"{names.nodes} must be above 1 where {name} is set, got {count}. "
                f"Correct it, or unset {name}."
            )


def _read_pod(environ: _Environment, names: _Names, node: PodName) -> Pod:
    count = read_nodes(environ[names.nodes], names.nodes, _CURE)
    source, number = names.number, -1
    if source in environ:
        number = _number(environ, source)
    elif names.endpoint not in environ:
        raise _incomplete(names.nodes, source)
    heads, port = environ.get(names.head, "").split(), PORT
    if names.port in environ:
        port = _number(environ, names.port, 1)
    if not heads and names.endpoint in environ:
        from ronde.launch.wire.tls import parse_endpoint

        text = environ[names.endpoint]
        text = text if ":" in text else f"{text}:{PORT}"
        head, port = parse_endpoint(text, names.endpoint)
        heads = [head]
        if number < 0:
            source, number = names.endpoint, node.number_below(head)
    if not heads and names.head:
        raise _incomplete(names.nodes, names.head)
    head = heads[0] if heads else node.head(number)
    slots = environ.get(names.slots, "")
    slots = "" if slots in ("auto", "0") else slots
    return Pod(source, number, *count, head, port, slots)


def _incomplete(first: str, missing: str) -> UsageError:
    return UsageError(
        f"{missing} must be set where {first} is, got none. Set it, or unset {first}."
    )


def _number(environ: _Environment, name: str, least: int = 0) -> int:
    return read_number(name, environ[name], _CURE, least=least, most=_MOST)
