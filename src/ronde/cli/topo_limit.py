"""``ronde topo limit``: topologies -> what collectives can reach on them."""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from ronde.cli.topo_input import (
    SOURCES_EPILOG,
    TopoParser,
    add_source_arguments,
    load_topology,
)
from ronde.errors import UsageError
from ronde.render.topo_limit import judge, tabulate_limits
from ronde.topology.graph import HostTopology
from ronde.topology.limits.bounds import (
    COLLECTIVES,
    Bound,
    Limit,
    LimitWorld,
    bounds_of,
)
from ronde.topology.limits.host import KnownRates, slowest, world_of

EXIT_BELOW = 1
"""What was measured is less than --threshold allows."""

FORM = "ronde-limits"
VERSION = 1
"""Changes when a field changes its meaning or goes."""

_MEASURED = "all_reduce"
_MOST = 1 << 20

_EPILOG = f"""\
{SOURCES_EPILOG}
Bounds are busbw, as ronde bench and nccl-tests print it. Several hosts are nodes of one
job, and the slowest of them counts; one host with --nodes N stands for N like it.

exit code: 0, {EXIT_BELOW} what was measured is below --threshold, 64 a source that \
cannot be read

example:
  ronde topo limit topo.xml --nodes 2 --measured 471.2 --threshold 80
"""


def run(words: Sequence[str]) -> int:
    """Print what collectives can reach; return the exit code.

    Args:
        words: What stands after ``limit``.

    Raises:
        UsageError: A source cannot be read, or an option is wrong.
    """
    options = _parser().read(words)
    if options is None:
        return 0
    collectives = _collectives(options)
    loaded = load_topology(options)
    world = _world(loaded.topology.hosts, options)
    bounds = bounds_of(world, collectives)
    limit = _limit_to_judge(bounds, options)
    if options.json:
        print(_to_json(world, bounds, options))
    else:
        print(tabulate_limits(world, bounds), end="")
        if limit is not None:
            print("\n" + judge(limit, options.measured), end="")
    for notice in loaded.notices:
        print(f"ronde: {notice}", file=sys.stderr)
    if limit is None or options.threshold is None:
        return 0
    return 0 if limit.percent(options.measured) >= options.threshold else EXIT_BELOW


def _parser() -> TopoParser:
    parser = TopoParser(
        "limit",
        "Say what each collective can reach at most, and which link sets that.",
        _EPILOG,
    )
    add_source_arguments(parser)
    _add_world(parser)
    _add_measurement(parser)
    return parser


def _add_world(parser: TopoParser) -> None:
    add = parser.add_argument
    add("--nodes", type=_count, metavar="N", help="nodes (default: as many as told)")
    add(
        "--ranks-per-node",
        type=_count,
        metavar="G",
        help="ranks of a node (default: its GPUs, or 1)",
    )
    add(
        "--link-rate",
        type=_rate,
        metavar="GB/S",
        help="all network links of a node together, one direction",
    )
    add(
        "--gpu-rate",
        type=_rate,
        metavar="GB/S",
        help="the way out of a GPU to others of its node, one direction",
    )


def _add_measurement(parser: TopoParser) -> None:
    add = parser.add_argument
    add(
        "--collective",
        action="append",
        choices=COLLECTIVES,
        metavar="NAME",
        help="this one alone; may be repeated",
    )
    add(
        "--measured",
        type=_rate,
        metavar="GB/S",
        help=f"compare this busbw, of {_MEASURED} unless --collective names another",
    )
    add(
        "--threshold",
        type=_rate,
        metavar="PERCENT",
        help=f"exit with {EXIT_BELOW} where --measured is less of the bound",
    )
    add("--json", action="store_true", help="print one object of JSON")


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 9 and 0 < int(text) <= _MOST:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"must be a whole number from 1 to {_MOST}, got {text!r}"
    )


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


def _collectives(options: argparse.Namespace) -> Sequence[str]:
    """Return what to look at.

    Raises:
        UsageError: A measurement is of none or of several.
    """
    names: list[str] = list(dict.fromkeys(options.collective or ()))
    if options.measured is None:
        if options.threshold is not None:
            raise UsageError(
                "--threshold must come with --measured, got it alone. Give the busbw "
                "that was measured, too."
            )
        return names or COLLECTIVES
    if len(names) > 1:
        raise UsageError(
            f"--measured must be of one collective, got {len(names)}. Give one "
            "--collective."
        )
    return names or [_MEASURED]


def _world(hosts: Sequence[HostTopology], options: argparse.Namespace) -> LimitWorld:
    """Return the world that the options tell of.

    Raises:
        UsageError: There is no host.
    """
    if not hosts:
        raise UsageError("sources must tell of a host, got none. Was a file cut?")
    num_gpus = min(len(host.gpus) for host in hosts)
    num_nodes = options.nodes or len(hosts)
    ranks_per_node = options.ranks_per_node or num_gpus or 1
    given = KnownRates(options.link_rate, options.gpu_rate)
    return slowest([world_of(host, num_nodes, ranks_per_node, given) for host in hosts])


def _limit_to_judge(
    bounds: Sequence[Bound], options: argparse.Namespace
) -> Limit | None:
    """Return what a measurement is compared with; None without one.

    Raises:
        UsageError: There is no bound.
    """
    if options.measured is None:
        return None
    (bound,) = bounds
    if bound.limit is None:
        raise UsageError(
            f"--measured must have a bound to compare with, got none: {bound.reason}. "
            "Give --link-rate and --gpu-rate, or a source that tells them."
        )
    return bound.limit


def _to_json(
    world: LimitWorld, bounds: Sequence[Bound], options: argparse.Namespace
) -> str:
    entries: list[dict[str, object]] = []
    for each in bounds:
        limit = each.limit
        entry: dict[str, object] = {
            "collective": each.collective,
            "bound_gb_per_s": limit.bus_bandwidth_gb_per_s if limit else None,
            "link": limit.link if limit else "",
            "practical_gb_per_s": limit.practical_gb_per_s if limit else None,
            "practical_link": limit.practical_link if limit else "",
            "note": limit.note if limit else each.reason,
        }
        if limit and options.measured is not None:
            entry["measured_gb_per_s"] = options.measured
            entry["percent"] = limit.percent(options.measured)
        entries.append(entry)
    document = {
        "form": FORM,
        "version": VERSION,
        "num_nodes": world.layout.num_nodes,
        "ranks_per_node": world.layout.ranks_per_node,
        "unknown": list(world.unknown),
        "limits": entries,
    }
    return json.dumps(document, indent=1)
