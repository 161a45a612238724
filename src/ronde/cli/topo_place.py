"""``ronde topo place``: words -> where the ranks of a host should sit."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ronde.cli.topo_input import (
    SOURCES_EPILOG,
    TopoParser,
    add_source_arguments,
    load_topology,
)
from ronde.errors import UsageError
from ronde.topology.cores import read_cores
from ronde.topology.machine import Core
from ronde.topology.placement.policies import Policy
from ronde.topology.placement.request import DEFAULT_NODES, MOST_NODES, Request, Scope
from ronde.units import parse_size_bytes

_EPILOG = (
    SOURCES_EPILOG
    + """
Of this machine and of a saved tree only the cores are used that the process there may
use. Policies are those of Kubernetes' TopologyManager.

examples:
  ronde topo place -n 8 --policy restricted
  ronde topo place -n 4 --cores 16 --memory 64GiB --nics 1 node1.json
"""
)


def run(words: Sequence[str]) -> int:
    """Print where ranks should sit; return the exit code.

    Args:
        words: What stands after ``topo place``.

    Raises:
        UsageError: A source cannot be read, or ranks cannot be placed as asked.
    """
    options = _parser().read(words)
    if options is None:
        return 0
    request = _request(options)
    loaded = load_topology(options)
    for notice in loaded.notices:
        print(f"ronde: {notice}", file=sys.stderr)
    if not loaded.topology.hosts:
        raise UsageError(
            "sources must tell of a host, got none. Add a file that does, or give none "
            "for this machine."
        )
    from ronde.topology.placement.plan import plan_host

    allowed = _allowed(options)
    plans = [plan_host(host, request, allowed) for host in loaded.topology.hosts]
    if options.json:
        from ronde.plain_values import to_plain

        print(json.dumps([to_plain(plan) for plan in plans], indent=2))
        return 0
    from ronde.render.topo_place import tabulate_plan

    print("\n".join(tabulate_plan(plan) for plan in plans), end="")
    return 0


def _parser() -> TopoParser:
    parser = TopoParser(
        "place",
        "Say which GPU, cores, memory and adapter each rank should have.",
        _EPILOG,
    )
    add_source_arguments(parser)
    add = parser.add_argument
    add("-n", dest="ranks", metavar="RANKS", required=True, help="ranks of a host")
    add(
        "--policy",
        default=Policy.BEST_EFFORT,
        help=f"what becomes of ranks that cannot be aligned: {', '.join(Policy)} "
        f"(default: {Policy.BEST_EFFORT})",
    )
    add(
        "--scope",
        default=Scope.RANK,
        help="what is aligned as one: each rank (the default), or the job",
    )
    add(
        "--prefer-closest",
        action="store_true",
        help="of equally many memory nodes, take those near each other",
    )
    add(
        "--max-numa-nodes",
        default=str(DEFAULT_NODES),
        metavar="N",
        help=f"most memory nodes with cores that a host may have, {DEFAULT_NODES} (the "
        f"default) to {MOST_NODES}",
    )
    _add_amounts(parser)
    add("--json", action="store_true", help="the plan as JSON")
    return parser


def _add_amounts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cores",
        metavar="K",
        help="physical cores of a rank (default: an even part, of those near its GPU)",
    )
    add("--memory", metavar="SIZE", help="memory of a rank, as 64GiB (default: any)")
    add(
        "--gpus",
        metavar="K",
        help="GPUs of a rank, chosen where they fit the rest (default: the one of its "
        "number where there are as many as ranks, else none)",
    )
    add(
        "--nics",
        metavar="K",
        help="adapters of a rank, aligned too (default: the nearest to its GPU)",
    )


def _request(options: argparse.Namespace) -> Request:
    return Request(
        num_ranks=_number("-n", options.ranks),
        policy=Policy(_one_of("--policy", options.policy, list(Policy))),
        scope=Scope(_one_of("--scope", options.scope, list(Scope))),
        is_closest=options.prefer_closest,
        max_numa_nodes=_number("--max-numa-nodes", options.max_numa_nodes),
        num_cores=_number("--cores", options.cores) if options.cores else 0,
        memory_bytes=parse_size_bytes(options.memory) if options.memory else 0,
        num_gpus=_number("--gpus", options.gpus, 0) if options.gpus else None,
        num_nics=_number("--nics", options.nics, 0) if options.nics else 0,
    )


def _number(option: str, text: str, least: int = 1) -> int:
    number = least - 1
    with suppress(ValueError):
        number = int(text) if len(text) < 10 else number
    if number < least:
        raise UsageError(
            f"{option} must be a number of at least {least}, got {text!r}. "
            f"Type: {option} {max(least, 1)}"
        )
    return number


def _one_of(option: str, word: str, words: Sequence[str]) -> str:
    if word not in words:
        raise UsageError(
            f"{option} must be {', '.join(words[:-1])} or {words[-1]}, got {word!r}. "
            f"Type: {option} {words[0]}"
        )
    return word


def _allowed(options: argparse.Namespace) -> tuple[Core, ...] | None:
    """Return the cores that may be used; None where only files are read."""
    if options.sources and options.root is None:
        return None
    return read_cores(str(Path(options.root or "/")).rstrip("/"))
