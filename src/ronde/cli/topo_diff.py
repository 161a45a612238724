"""``ronde topo diff``: two hosts -> what differs, and what that costs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.cli.topo_input import TopoParser, load_host
from ronde.plain_values import to_plain
from ronde.render.topo_diff import tell_comparison
from ronde.topology.comparison import HostComparison, compare_hosts
from ronde.topology.graph import HostTopology

EXIT_DIFFERENT = 1

FORM = "ronde-topology-diff"
VERSION = 1
"""Changes when a field changes its meaning or goes."""

_EPILOG = f"""\
A and B are files of any form that ronde topo reads, or directories that hold sys and
proc: / is this machine. They are two nodes of a job, or a virtual machine and its host.
Elements are matched by bus address, those left over by number and name.

exit code: 0 they are alike, {EXIT_DIFFERENT} they differ, 64 one cannot be read

example:
  ronde topo diff node1.xml node2.xml
"""


def run(words: Sequence[str]) -> int:
    """Compare two hosts and print what differs; return the exit code.

    Args:
        words: What stands after ``diff``.

    Raises:
        UsageError: One cannot be read, or is not one host.
    """
    options = _parser().read(words)
    if options is None:
        return 0
    first, second = _load(options.first), _load(options.second)
    comparison = compare_hosts(first, second)
    if options.json:
        print(_to_json(comparison))
    else:
        print(tell_comparison(options.first, options.second, comparison), end="")
    return 0 if comparison.is_equal else EXIT_DIFFERENT


def _parser() -> TopoParser:
    parser = TopoParser(
        "diff",
        "Say what differs from one host to another, and what that costs.",
        _EPILOG,
    )
    add = parser.add_argument
    add("first", metavar="A", help="a file or a directory")
    add("second", metavar="B", help="what to compare with it")
    add("--json", action="store_true", help="print one object of JSON")
    return parser


def _load(name: str) -> HostTopology:
    is_tree = name != "-" and Path(name).is_dir()
    options = argparse.Namespace(
        sources=[] if is_tree else [name], root=name if is_tree else None
    )
    host, notices = load_host(options)
    for notice in notices:
        print(f"ronde: {notice}", file=sys.stderr)
    return host


def _to_json(comparison: HostComparison) -> str:
    plain = {"form": FORM, "version": VERSION, "comparison": to_plain(comparison)}
    return json.dumps(plain, indent=1)
