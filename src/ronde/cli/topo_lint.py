"""``ronde topo lint``: topologies -> what is wrong with them."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ronde.cli.topo_input import (
    SOURCES_EPILOG,
    TopoParser,
    add_source_arguments,
    load_topology,
    read_sources,
)
from ronde.errors import UsageError
from ronde.plain_values import to_plain
from ronde.render.topo_findings import count_findings, tell_findings
from ronde.render.wrapping import wrap
from ronde.topology.graph import Diagnostic, HostTopology, Level
from ronde.topology.lint.host import CATALOGUE, lint_fleet, lint_host
from ronde.topology.paths.speeds import LATEST
from ronde.topology.search_graph import (
    check_search_graphs,
    read_search_graphs,
    recognises_search_graph,
)

EXIT_FOUND = 1
"""Something of more weight than a note was found."""

FORM = "ronde-findings"
VERSION = 1
"""Changes when a field changes its meaning or goes."""

_EPILOG = f"""\
{SOURCES_EPILOG}
A graph that NCCL wrote (NCCL_GRAPH_DUMP_FILE) is checked, too. Several hosts are also
compared with each other.

exit code: 0 nothing but notes, {EXIT_FOUND} a warning or an error, 64 a source that \
cannot be read

example:
  NCCL_TOPO_DUMP_FILE=topo.xml ronde run -n 8 train.py && ronde topo lint topo.xml
"""


class _Checked(NamedTuple):
    """What was looked at, and what was found."""

    subject: str
    findings: tuple[Diagnostic, ...]
    notices: tuple[str, ...]


def run(words: Sequence[str]) -> int:
    """Look for what is wrong and print it; return the exit code.

    Args:
        words: What stands after ``lint``.

    Raises:
        UsageError: A source cannot be read, or an option is wrong.
    """
    options = _parser().read(words)
    if options is None:
        return 0
    if options.rules:
        print(_tell_rules(), end="")
        return 0
    wanted = _select(options.rule, options.ignore)
    checked = _check(options)
    findings = tuple(f for f in checked.findings if f.rule in wanted)
    if options.json:
        print(_to_json(findings))
    else:
        print(f"{checked.subject}: {count_findings(findings)}.")
        print("\n" + tell_findings(findings) if findings else "", end="")
    for notice in checked.notices:
        print(f"ronde: {notice}", file=sys.stderr)
    is_clean = all(finding.severity is Level.NOTE for finding in findings)
    return 0 if is_clean else EXIT_FOUND


def _parser() -> TopoParser:
    parser = TopoParser(
        "lint",
        "Say what is wrong with a machine, or with a file that tells of "
        "one, what it costs and what to do.",
        _EPILOG,
    )
    add = parser.add_argument
    add_source_arguments(parser)
    add("--json", action="store_true", help="print one object of JSON")
    add("--rule", action="append", metavar="NAME[,NAME]", help="look for these alone")
    add("--ignore", action="append", metavar="NAME[,NAME]", help="leave these out")
    add("--rules", action="store_true", help="print what is looked for and exit")
    return parser


def _select(only: list[str] | None, ignored: list[str] | None) -> frozenset[str]:
    """Return the names of the rules that count.

    Raises:
        UsageError: A name is no rule's.
    """
    known = {entry.name for entry in CATALOGUE}
    wanted = _names("--rule", only, known) if only else known
    return frozenset(wanted - _names("--ignore", ignored or [], known))


def _names(option: str, given: Sequence[str], known: set[str]) -> set[str]:
    names = {name.strip() for text in given for name in text.split(",")}
    unknown = sorted(names - known)
    if unknown:
        raise UsageError(
            f"{option} must name rules, got {unknown[0]!r}. Type: ronde topo lint "
            "--rules"
        )
    return names


def _check(options: argparse.Namespace) -> _Checked:
    sources = read_sources(options)
    graphs = [saved for saved in sources if recognises_search_graph(saved)]
    findings = [
        _at(saved.name, finding)
        for saved in graphs
        for finding in check_search_graphs(read_search_graphs(saved))
    ]
    machines = [saved for saved in sources if saved not in graphs]
    if graphs and not machines and options.root is None:
        names = ", ".join(sorted({saved.name for saved in graphs}))
        subject = f"{names}, as NCCL {LATEST} reads it"
        return _Checked(subject, tuple(findings), ())
    loaded = load_topology(options, machines)
    hosts = loaded.topology.hosts
    for host in hosts:
        own = lint_host(host)
        findings += own if len(hosts) == 1 else [_at(host.name, f) for f in own]
    findings += lint_fleet(hosts)
    names = ", ".join(saved.name for saved in loaded.saved)
    return _Checked(_subject(hosts, names), tuple(findings), loaded.notices)


def _at(place: str, finding: Diagnostic) -> Diagnostic:
    return finding._replace(element=f"{place} {finding.element}".strip())


def _subject(hosts: Sequence[HostTopology], names: str) -> str:
    if len(hosts) != 1:
        return f"{len(hosts)} hosts"
    host = hosts[0]
    counts = [
        f"{num} {what}{'' if num == 1 else 's'}"
        for num, what in (
            (len(host.gpus), "GPU"),
            (len(host.ports), "network port"),
            (len(host.numa_nodes), "NUMA node"),
        )
    ]
    return f"{host.name or names} ({', '.join(counts)})"


def _tell_rules() -> str:
    text, subject = "", ""
    for entry in CATALOGUE:
        if entry.subject != subject:
            subject = entry.subject
            text += f"{subject}:\n"
        text += wrap(f"  {entry.name:<24}", entry.meaning, indent=26)
    return text


def _to_json(findings: Sequence[Diagnostic]) -> str:
    plain = [to_plain(finding) for finding in findings]
    return json.dumps({"form": FORM, "version": VERSION, "findings": plain}, indent=1)
