"""``ronde topo``: words -> what a machine is made of, in one of several forms."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ronde.cli.options import CommandParser, attribute_of, require_alone
from ronde.errors import UsageError
from ronde.topology.graph import HostTopology, Topology
from ronde.topology.probes.base import Saved
from ronde.topology.sources import join_topologies, read_file, read_saved, read_tree
from ronde.world.environment import select_variables

_VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_HELP = """\
usage: ronde topo [SOURCE ...]            what is connected to what, and how fast
       ronde topo lint [SOURCE ...]       what is wrong with it, and how to fix it
       ronde topo diff A B                what differs between two hosts
       ronde topo place -n RANKS          where ranks should run
       ronde topo limit [SOURCE ...]      what collectives can reach on it
       ronde topo log FILE ...            what NCCL's debug log shows

ronde topo VERB --help shows more about a verb, ronde topo show --help about the first
form.
"""
ROOT_OPTION = """\
  --root DIR      read a saved tree that holds sys and proc, in place of this
                  machine
  -h, --help      show this help and exit
"""
SOURCES_HELP = """\
SOURCE is a file in one of these forms: NCCL's topology (NCCL_TOPO_DUMP_FILE writes it,
clouds ship it), AMD's, hwloc's XML, the text of nvidia-smi topo -m or lspci -nn,
Slurm's topology.conf, or the output of ronde topo --json; - is standard input. Each
file of any form is one host. Without a SOURCE it is this machine.
"""
_SHOW_HELP = f"""\
usage: ronde topo [SOURCE ...] [--json | --matrix | --paths | --nccl-paths] [options]

Show what a machine is made of.

options:
  --json          the graph as JSON
  --matrix        a table like that of nvidia-smi topo -m
  --paths         kind and bandwidth of the paths of GPUs
  --nccl-paths    all paths, as NCCL's debug log has them
  --nccl VERSION  release whose rules paths follow, 2.29 or 2.30 (default: the
                  newest)
  -x NAME=VALUE ...
                  with --nccl-paths: as if the job had this NCCL setting, such
                  as NCCL_P2P_LEVEL=SYS
  --svg FILE      draw one host into FILE
{ROOT_OPTION}
{SOURCES_HELP}\
Graphs that NCCL wrote (NCCL_GRAPH_DUMP_FILE) are shown as rings and trees, alone.

example:
  ronde topo --json > node1.json      a file to send to somebody
  ronde topo node1.json --matrix      like nvidia-smi topo -m, from any source
"""
_FORMS = ("--json", "--matrix", "--paths", "--nccl-paths")
_ANY_WIDTH = 1 << 20
_VERBS = ("lint", "diff", "place", "limit", "log")


class LoadedTopology(NamedTuple):
    """What is to be looked at."""

    topology: Topology  # all sources together
    notices: tuple[str, ...]  # what could not be read, a sentence each, for people
    saved: tuple[Saved, ...]  # the files as they are


def run(words: Sequence[str]) -> int:
    match list(words):
        case ["-h" | "--help", *_]:
            print(_HELP, end="")
            return 0
        case [verb, *rest] if verb in _VERBS:
            from importlib import import_module

            code: int = import_module("ronde.cli.topo_verbs").run(verb, rest)
            return code
        case ["show", *rest]:
            return _show(rest)
        case _:
            return _show(words)


class SourceParser(CommandParser):
    """Reads the words of a verb of ``ronde topo`` that takes sources."""

    def __init__(
        self, verb: str, help_text: str, types: Mapping[str, Any] | None = None
    ) -> None:
        command = f"ronde topo {verb}".rstrip()
        super().__init__(command, help_text, types=types, positionals={"sources": "*"})


def read_sources(options: argparse.Namespace) -> tuple[Saved, ...]:
    return tuple(read_saved(name) for name in options.sources)


def load_topology(
    options: argparse.Namespace, saved: Sequence[Saved] | None = None
) -> LoadedTopology:
    saved = read_sources(options) if saved is None else tuple(saved)
    parts = [read_file(each) for each in saved]
    notices: tuple[str, ...] = ()
    if options.root is not None or not saved:
        environ = {} if options.root else select_variables(_VISIBILITY)
        tree, notices = read_tree(Path(options.root or "/"), environ)
        parts.append(Topology((tree,)))
    return LoadedTopology(join_topologies(parts), notices, saved)


def show_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        print(f"ronde: {notice}", file=sys.stderr)


def _show(words: Sequence[str]) -> int:
    options = SourceParser("", _SHOW_HELP).read(words)
    if options is None:
        return 0
    require_alone(options, *_FORMS)
    saved = read_sources(options)
    if _shows_rings(saved, options):
        return 0
    if options.x and not options.nccl_paths:
        raise UsageError(
            f"-x must stand with --nccl-paths, got it without: {options.x[0]!r}."
            " Add that, or leave it out."
        )
    loaded = load_topology(options, saved)
    show_notices(loaded.notices)
    topology = loaded.topology
    if not topology.hosts and not topology.switches:
        raise UsageError(
            "sources must have a host or a switch, got neither. Was a file cut?"
        )
    if options.svg:
        _draw(topology, Path(options.svg))
    if not options.svg or any(getattr(options, attribute_of(form)) for form in _FORMS):
        _print(topology, options)
    return 0


def _print(topology: Topology, options: argparse.Namespace) -> None:
    if options.json:
        from ronde.topology.graph import write_topology

        print(write_topology(topology), end="")
    elif options.matrix or options.paths or options.nccl_paths:
        for host in topology.hosts:
            print(_table(host, options), end="")
    else:
        from ronde.render.topo_tree import draw_tree

        print(draw_tree(topology), end="")
        for host in topology.hosts:
            # Where only relations of pairs are known, the tree shows nothing of them.
            if host.relations and not host.devices:
                print("\n" + _matrix(host), end="")


def _shows_rings(saved: Sequence[Saved], options: argparse.Namespace) -> bool:
    if not saved:
        return False
    from ronde.topology.search_graph import read_search_graphs, recognises_search_graph

    graphs = [each for each in saved if recognises_search_graph(each)]
    if not graphs:
        return False
    name = graphs[0].name
    others = [each.name for each in saved if each not in graphs]
    if others:
        raise UsageError(
            f"sources must be graphs of NCCL's search alone or none of them, got the "
            f"graph {name} and {others[0]}. Give them one after the other."
        )
    for option in ("--root", *_FORMS, "--nccl", "-x", "--svg"):
        if getattr(options, attribute_of(option)):
            raise UsageError(
                f"{option} must stand with the description of a machine, got it with a "
                f"graph of NCCL's search: {name}. Leave it out."
            )
    from ronde.render.topo_log import draw_search

    for number, each in enumerate(graphs):
        title = f"{each.name}:\n" if len(graphs) > 1 else ""
        body = draw_search(read_search_graphs(each))
        print(("\n" if number else "") + title + body, end="")
    return True


def _table(host: HostTopology, options: argparse.Namespace) -> str:
    if options.matrix:
        return _matrix(host)
    from ronde.render.topo_tables import tabulate_paths, tabulate_speeds
    from ronde.topology.paths.classes import classify
    from ronde.topology.paths.detours import add_detours, read_transports
    from ronde.topology.paths.network import find_paths
    from ronde.topology.paths.speeds import LATEST, parse_release

    paths = find_paths(host, parse_release(options.nccl) if options.nccl else LATEST)
    if not options.nccl_paths:
        return tabulate_speeds(paths, classify(host), _num_chars())
    unset = [each for each in options.x if "=" not in each]
    if unset:
        raise UsageError(f"-x must be NAME=VALUE, got {unset[0]!r}. Give its value.")
    transports = read_transports(dict(each.split("=", 1) for each in options.x))
    return tabulate_paths(add_detours(paths, transports))


def _matrix(host: HostTopology) -> str:
    from ronde.render.topo_tables import tabulate_classes
    from ronde.topology.paths.classes import classify

    return tabulate_classes(classify(host), _num_chars())


def _num_chars() -> int:
    """Return how wide a table may be: any width where it goes to no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _ANY_WIDTH


def _draw(topology: Topology, path: Path) -> None:
    from ronde.render.topo_svg import draw_svg
    from ronde.topology.lint.host import lint_host

    if len(topology.hosts) != 1:
        raise UsageError(
            f"--svg must have one host to draw, got {len(topology.hosts)}. Give one "
            "host's sources."
        )
    try:
        drawing = draw_svg(topology.hosts[0], lint_host(topology.hosts[0]))
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--svg must name a file that can be written, got {path}: {error.strerror}."
        ) from None
