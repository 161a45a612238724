"""``ronde topo``: words -> what a machine is made of, in one of several forms."""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ronde.cli.topo_input import (
    SOURCES_EPILOG,
    TopoParser,
    add_source_arguments,
    load_topology,
    read_sources,
)
from ronde.errors import UsageError
from ronde.topology.graph import HostTopology, Topology
from ronde.topology.probes.base import Saved

if TYPE_CHECKING:
    from ronde.topology.paths.detours import Transports

HELP = """\
usage: ronde topo [SOURCE ...]            what is connected to what, and how fast
       ronde topo lint [SOURCE ...]       what is wrong with it, and what to do
       ronde topo diff A B                what differs between two hosts
       ronde topo place -n RANKS          where ranks should sit
       ronde topo limit [SOURCE ...]      what collectives can reach on it
       ronde topo log FILE ...            what NCCL's debug log says

ronde topo VERB --help says more of a verb, ronde topo show --help of the first form.
"""

_EPILOG = (
    SOURCES_EPILOG
    + """\
Graphs that NCCL wrote (NCCL_GRAPH_DUMP_FILE) are told as rings and trees, alone.

example:
  ronde topo --json > node1.json      what to send to somebody
  ronde topo node1.json --matrix      like nvidia-smi topo -m, from any source
"""
)

_ANY_WIDTH = 1 << 20


def run(words: Sequence[str]) -> int:
    """Show a topology, or run one of the verbs; return the exit code.

    Args:
        words: What stands after ``topo``.

    Raises:
        UsageError: A source cannot be read, or the words make no sense.
    """
    match list(words):
        case ["-h" | "--help", *_]:
            print(HELP, end="")
            return 0
        case ["show", *rest]:
            return _show(rest)
        case [("lint" | "diff" | "place" | "limit" | "log") as verb, *rest]:
            return _verb(verb)(rest)
        case _:
            return _show(words)


def _verb(name: str) -> Callable[[Sequence[str]], int]:
    from importlib import import_module

    found: Callable[[Sequence[str]], int] = import_module(f"ronde.cli.topo_{name}").run
    return found


def _show(words: Sequence[str]) -> int:
    options = _options(words)
    if options is None:
        return 0
    saved = read_sources(options)
    if _tells_rings(saved, options):
        return 0
    if options.settings and not options.nccl_paths:
        raise UsageError(
            f"-x must stand with --nccl-paths, got it without: {options.settings[0]!r}."
            " Add that, or leave it out."
        )
    loaded = load_topology(options, saved)
    for notice in loaded.notices:
        print(f"ronde: {notice}", file=sys.stderr)
    _require_something(loaded.topology)
    if options.svg:
        _draw(loaded.topology, Path(options.svg))
    if options.json:
        from ronde.topology.graph import write_topology

        print(write_topology(loaded.topology), end="")
    elif options.matrix or options.paths or options.nccl_paths:
        for host in loaded.topology.hosts:
            print(_table(host, options), end="")
    elif not options.svg:
        print(_overview(loaded.topology), end="")
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace | None:
    parser = TopoParser("", "Show what a machine is made of.", _EPILOG)
    add_source_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the graph as JSON")
    form.add_argument(
        "--matrix", action="store_true", help="a table like that of nvidia-smi topo -m"
    )
    form.add_argument(
        "--paths", action="store_true", help="kind and bandwidth of the paths of GPUs"
    )
    form.add_argument(
        "--nccl-paths",
        action="store_true",
        help="all paths, as NCCL's debug log has them",
    )
    parser.add_argument(
        "--nccl",
        default="",
        metavar="VERSION",
        help="whose rules paths follow, 2.29 or 2.30 (default: the newest)",
    )
    parser.add_argument(
        "-x",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="with --nccl-paths: as if the job had this setting of NCCL's, such as "
        "NCCL_P2P_LEVEL=SYS; may stand several times",
    )
    parser.add_argument("--svg", metavar="FILE", help="draw one host into FILE")
    return parser.read(words)


def _tells_rings(saved: Sequence[Saved], options: argparse.Namespace) -> bool:
    """Tell what NCCL's search has found, where its graphs are what is given.

    Raises:
        UsageError: Something else is given, or asked for, with them.
    """
    if not saved:
        return False
    from ronde.topology.search_graph import read_search_graphs, recognises_search_graph

    graphs = [each for each in saved if recognises_search_graph(each)]
    if not graphs:
        return False
    _require_alone(graphs, saved, options)
    from ronde.render.topo_rings import tell_search

    for number, each in enumerate(graphs):
        title = f"{each.name}:\n" if len(graphs) > 1 else ""
        body = tell_search(read_search_graphs(each))
        print(("\n" if number else "") + title + body, end="")
    return True


def _require_alone(
    graphs: Sequence[Saved], saved: Sequence[Saved], options: argparse.Namespace
) -> None:
    name = graphs[0].name
    others = [each.name for each in saved if each not in graphs]
    if others:
        raise UsageError(
            f"sources must be graphs of NCCL's search alone or none of them, got the "
            f"graph {name} and {others[0]}. Give them one after the other."
        )
    asked = {
        "--root": options.root is not None,
        "--json": options.json,
        "--matrix": options.matrix,
        "--paths": options.paths,
        "--nccl-paths": options.nccl_paths,
        "--nccl": options.nccl,
        "-x": options.settings,
        "--svg": options.svg is not None,
    }
    option = next((option for option, is_asked in asked.items() if is_asked), "")
    if option:
        raise UsageError(
            f"{option} must stand with what tells of a machine, got it with a graph of "
            f"NCCL's search: {name}. Leave it out."
        )


def _require_something(topology: Topology) -> None:
    if not topology.hosts and not topology.switches:
        raise UsageError(
            "sources must tell of a host or a switch, got neither. Was a file cut?"
        )


def _table(host: HostTopology, options: argparse.Namespace) -> str:
    from ronde.render.topo_tables import (
        tabulate_classes,
        tabulate_paths,
        tabulate_speeds,
    )
    from ronde.topology.paths.classes import classify
    from ronde.topology.paths.detours import add_detours
    from ronde.topology.paths.network import find_paths
    from ronde.topology.paths.speeds import LATEST, parse_release

    if options.matrix:
        return tabulate_classes(classify(host), _num_chars())
    paths = find_paths(host, parse_release(options.nccl) if options.nccl else LATEST)
    if options.nccl_paths:
        return tabulate_paths(add_detours(paths, _transports(options.settings)))
    return tabulate_speeds(paths, classify(host), _num_chars())


def _transports(settings: Sequence[str]) -> "Transports":
    from ronde.topology.paths.detours import read_transports

    unset = [each for each in settings if "=" not in each]
    if unset:
        raise UsageError(f"-x must be NAME=VALUE, got {unset[0]!r}. Give its value.")
    return read_transports(dict(each.split("=", 1) for each in settings))


def _num_chars() -> int:
    """Return how wide a table may be: what is no terminal takes any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _ANY_WIDTH


def _overview(topology: Topology) -> str:
    from ronde.render.topo_tree import draw_tree

    text = draw_tree(topology)
    for host in topology.hosts:
        # What tells of pairs alone says nothing as a tree.
        if host.relations and not host.devices:
            from ronde.render.topo_tables import tabulate_classes
            from ronde.topology.paths.classes import classify

            text += "\n" + tabulate_classes(classify(host), _num_chars())
    return text


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
