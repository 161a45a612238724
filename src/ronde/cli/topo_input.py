"""Which topology ``ronde topo`` looks at: this machine's, or a saved one."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ronde.arguments import Parser
from ronde.errors import UsageError
from ronde.topology.graph import HostTopology, Topology
from ronde.topology.probes.base import Saved
from ronde.topology.sources import (
    join_topologies,
    read_file,
    read_saved,
    read_tree,
)
from ronde.world.environment import select_variables

_VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

SOURCES_EPILOG = """\
SOURCE is a file of any of these forms: NCCL's topology (NCCL_TOPO_DUMP_FILE writes it,
clouds deliver it), AMD's, hwloc's XML, the text of nvidia-smi topo -m, of lspci -nn,
Slurm's topology.conf, or what ronde topo --json wrote; - is standard input. Files of
any format are a host each. Without any it is this machine.
"""


class TopoParser(Parser):
    """The options of one verb; raises where argparse would exit.

    Args:
        verb: Of ``ronde topo``; empty for none.
        description: What it does, one sentence.
        epilog: What stands below the options, as it is.
    """

    def __init__(self, verb: str, description: str, epilog: str) -> None:
        super().__init__(
            f"ronde topo {verb}".rstrip(),
            description=description,
            epilog=epilog,
            add_help=False,
        )
        self.add_argument(
            "-h", "--help", action="store_true", help="print this and exit"
        )

    def read(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the options; None where help was asked for and printed.

        Raises:
            UsageError: The words are no options of this verb.
        """
        if any(word in ("-h", "--help") for word in words):
            print(self.format_help(), end="")
            return None
        return self.parse_args(words)


class LoadedTopology(NamedTuple):
    """What is to be looked at.

    Attributes:
        topology: All sources together.
        notices: What could not be asked, a sentence each, for people.
        saved: The files as they are.
    """

    topology: Topology
    notices: tuple[str, ...]
    saved: tuple[Saved, ...]


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to look at."""
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help="a file; without, this machine")
    add(
        "--root",
        metavar="DIR",
        help="look at a saved tree that holds sys and proc, in place of this machine",
    )


def read_sources(options: argparse.Namespace) -> tuple[Saved, ...]:
    """Return the files that the arguments name; what standard input has, once.

    Raises:
        UsageError: One cannot be read.
    """
    return tuple(read_saved(name) for name in options.sources)


def load_topology(
    options: argparse.Namespace, saved: Sequence[Saved] | None = None
) -> LoadedTopology:
    """Read what the arguments say.

    Args:
        options: The arguments.
        saved: The files, where they were read already.

    Raises:
        UsageError: A source cannot be read, or they do not go together.
    """
    saved = read_sources(options) if saved is None else tuple(saved)
    parts = [read_file(each) for each in saved]
    notices: tuple[str, ...] = ()
    if options.root is not None or not saved:
        root = Path(options.root or "/")
        environ = {} if options.root else select_variables(_VISIBILITY)
        tree, notices = read_tree(root, environ)
        parts.append(Topology((tree,)))
    return LoadedTopology(join_topologies(parts), notices, saved)


def load_host(options: argparse.Namespace) -> tuple[HostTopology, tuple[str, ...]]:
    """Read what the arguments say of one host, and notices.

    Raises:
        UsageError: Like ``load_topology``, or it is not one host.
    """
    loaded = load_topology(options)
    hosts = loaded.topology.hosts
    if len(hosts) != 1:
        names = ", ".join(host.name for host in hosts) or "none"
        raise UsageError(
            f"sources must tell of one host, got {len(hosts)} ({names}). Give one "
            "host's."
        )
    return hosts[0], loaded.notices
