"""``ronde topo place``: words -> where the ranks of a host should sit."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.cli.topo_input import (
    SOURCES_EPILOG,
    TopoParser,
    add_source_arguments,
    load_topology,
)
from ronde.errors import UsageError
from ronde.topology.machine import read_cores
from ronde.topology.placement.placing import AlignmentRequest, Scope
from ronde.topology.placement.policies import Policy

_EPILOG = (
    SOURCES_EPILOG
    + """
Of this machine and of a saved tree only the cores are used that this process may use.
Rank i gets GPU i, where there are as many GPUs as ranks, and an even part of the cores.
Policies are those of Kubernetes' TopologyManager.

example:
  ronde topo place -n 8 --policy restricted
"""
)


def run(words: Sequence[str]) -> int:
    """Print where ranks should sit; return the exit code.

    Raises:
        UsageError: A source cannot be read, or ranks cannot be placed as asked.
    """
    options = _parser().read(words)
    if options is None:
        return 0
    request = AlignmentRequest(
        _number(options.ranks),
        Policy(_one_of("--policy", options.policy, list(Policy))),
        Scope(_one_of("--scope", options.scope, list(Scope))),
    )
    loaded = load_topology(options)
    for notice in loaded.notices:
        print(f"ronde: {notice}", file=sys.stderr)
    if not loaded.topology.hosts:
        raise UsageError(
            "sources must have a host, got none. Add a file that does, or give none "
            "for this machine."
        )
    from ronde.topology.placement.plan import plan_host

    allowed = None
    if options.root is not None or not options.sources:
        allowed = read_cores(str(Path(options.root or "/")).rstrip("/"))
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
        "Show which GPU, cores, memory and adapter each rank should have.",
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
    add("--json", action="store_true", help="the plan as JSON")
    return parser


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return int(text)
    raise UsageError(f"-n must be a number of at least 1, got {text!r}. Type: -n 1")


def _one_of(option: str, word: str, words: Sequence[str]) -> str:
    if word not in words:
        raise UsageError(
            f"{option} must be {', '.join(words[:-1])} or {words[-1]}, got {word!r}. "
            f"Type: {option} {words[0]}"
        )
    return word
