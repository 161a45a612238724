"""``ronde topo``'s verbs: lint, diff, place, limit and log, each words -> exit code."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ronde.cli.options import CommandParser, read_number, read_one_of
from ronde.cli.topo import (
    ROOT_OPTION,
    SOURCES_HELP,
    SourceParser,
    load_topology,
    read_sources,
    show_notices,
)
from ronde.errors import UsageError
from ronde.plain_values import to_plain
from ronde.topology.graph import Diagnostic, HostTopology, Level

EXIT_FOUND = 1
"""Found something worse than a note, a difference, or too little bandwidth."""

_VERSION = 1
"""Of every JSON form here; changes when a field changes its meaning or goes."""

_MEASURED = "all_reduce"
_MOST = 1 << 20

_LINT_HELP = f"""\
usage: ronde topo lint [SOURCE ...] [options]

Show what is wrong with a machine or with the file of one, what it costs and how to fix
it.

options:
  --json          print one object of JSON
  --rule NAME[,NAME] ...
                  look for these alone
  --ignore NAME[,NAME] ...
                  leave these out
  --rules         list the rules and exit
{ROOT_OPTION}
{SOURCES_HELP}
A graph that NCCL wrote (NCCL_GRAPH_DUMP_FILE) is checked, too. Several hosts are also
compared with each other.

exit code: 0 nothing but notes, 1 a warning or an error, 64 a source that cannot be read

example:
  NCCL_TOPO_DUMP_FILE=topo.xml ronde run -n 8 train.py && ronde topo lint topo.xml
"""
_DIFF_HELP = """\
usage: ronde topo diff A B [--json]

Show what differs from one host to another, and what that costs.

options:
  --json      print one object of JSON
  -h, --help  show this help and exit

A and B are files of any form that ronde topo reads, or directories that hold sys and
proc: / is this machine. They are two nodes of a job, or a virtual machine and its host.
Elements are matched by bus address, those left over by number and name.

exit code: 0 they are alike, 1 they differ, 64 one cannot be read

example:
  ronde topo diff node1.xml node2.xml
"""
_PLACE_HELP = f"""\
usage: ronde topo place -n RANKS [SOURCE ...] [options]

Show which GPU, cores, memory and adapter each rank should have.

options:
  -n RANKS        ranks of a host
  --policy POLICY
                  what to do with ranks that cannot be aligned: none,
                  best-effort, restricted, single-numa-node (default:
                  best-effort)
  --scope SCOPE   what is aligned as one: each rank (the default), or the job
  --json          the plan as JSON
{ROOT_OPTION}
{SOURCES_HELP}
Of this machine and of a saved tree only the cores are used that this process may use.
Rank i gets GPU i, where there are as many GPUs as ranks, and an even part of the cores.
Policies are those of Kubernetes' TopologyManager.

example:
  ronde topo place -n 8 --policy restricted
"""
_LIMIT_HELP = f"""\
usage: ronde topo limit [SOURCE ...] [options]

Show what each collective can reach at most, and which link sets that.

options:
  --nodes N       nodes (default: as many as there are hosts)
  --ranks-per-node N
                  ranks of a node (default: its GPUs, or 1)
  --link-rate GB/S
                  all network links of a node together, one direction
  --gpu-rate GB/S
                  from a GPU to the others of its node, one direction
  --collective NAME ...
                  this one alone
  --measured GB/S
                  compare this busbw, of all_reduce unless --collective names
                  another
  --threshold PERCENT
                  exit with 1 where --measured is less than this of the bound
  --json          print one object of JSON
{ROOT_OPTION}
{SOURCES_HELP}
Bounds are busbw, as ronde bench and nccl-tests print it. Several hosts are nodes of one
job, and the slowest of them counts; one host with --nodes N stands for N like it.

exit code: 0, 1 --measured is below --threshold, 64 a source that cannot be read

example:
  ronde topo limit topo.xml --nodes 2 --measured 471.2 --threshold 80
"""
_LOG_HELP = """\
usage: ronde topo log FILE... [--json]

Show what NCCL chose and what looks wrong, from what it wrote with NCCL_DEBUG=INFO.

options:
  --json      print one object of JSON
  -h, --help  show this help and exit

Several files are one log. Lines of ranks that broke inside each other are put together
again. What gzip packed is unpacked. - is standard input.

For all that NCCL can log, in a file a rank:
  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p \\
  NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING ronde run -n 8 train.py

exit code: 0 nothing but notes, 1 a warning or an error, 64 a file that cannot be read
"""


def run(verb: str, words: Sequence[str]) -> int:
    verbs = {
        "lint": _lint,
        "diff": _diff,
        "place": _place,
        "limit": _limit,
        "log": _log,
    }
    return verbs[verb](words)


def _lint(words: Sequence[str]) -> int:
    from ronde.render.text import wrap
    from ronde.render.topo_log import count_findings, draw_findings
    from ronde.topology.lint.host import CATALOGUE, lint_fleet, lint_host
    from ronde.topology.paths.speeds import LATEST
    from ronde.topology.search_graph import (
        check_search_graphs,
        read_search_graphs,
        recognises_search_graph,
    )

    options = SourceParser("lint", _LINT_HELP).read(words)
    if options is None:
        return 0
    if options.rules:
        last = ""
        for entry in CATALOGUE:
            title = "" if entry.subject == last else f"{entry.subject}:\n"
            line = wrap(f"  {entry.name:<24}", entry.meaning, indent=26)
            print(title + line, end="")
            last = entry.subject
        return 0
    known = {entry.name for entry in CATALOGUE}
    wanted = _names("--rule", options.rule, known) or known
    wanted = wanted - _names("--ignore", options.ignore, known)
    sources = read_sources(options)
    graphs = [saved for saved in sources if recognises_search_graph(saved)]
    found = [
        _at(saved.name, finding)
        for saved in graphs
        for finding in check_search_graphs(read_search_graphs(saved))
    ]
    machines = [saved for saved in sources if saved not in graphs]
    if graphs and not machines and options.root is None:
        names = ", ".join(sorted({saved.name for saved in graphs}))
        subject, notices = f"{names}, as NCCL {LATEST} reads it", ()
    else:
        loaded = load_topology(options, machines)
        hosts, notices = loaded.topology.hosts, loaded.notices
        for host in hosts:
            own = lint_host(host)
            found += own if len(hosts) == 1 else [_at(host.name, f) for f in own]
        found += lint_fleet(hosts)
        subject = _subject(hosts, ", ".join(saved.name for saved in loaded.saved))
    findings = [finding for finding in found if finding.rule in wanted]
    if options.json:
        _print_json("ronde-findings", {"findings": to_plain(tuple(findings))})
    else:
        print(f"{subject}: {count_findings(findings)}.")
        print("\n" + draw_findings(findings) if findings else "", end="")
    show_notices(notices)
    return _exit_code(findings)


def _names(option: str, given: Sequence[str], known: set[str]) -> set[str]:
    names = {name.strip() for text in given for name in text.split(",")}
    unknown = sorted(names - known)
    if unknown:
        raise UsageError(
            f"{option} must name rules, got {unknown[0]!r}. Type: ronde topo lint "
            "--rules"
        )
    return names


def _at(place: str, finding: Diagnostic) -> Diagnostic:
    return finding._replace(element=f"{place} {finding.element}".strip())


def _subject(hosts: Sequence[HostTopology], names: str) -> str:
    if len(hosts) != 1:
        return f"{len(hosts)} hosts"
    from ronde.render.text import counted

    host = hosts[0]
    counts = (
        counted(len(host.gpus), "GPU"),
        counted(len(host.ports), "network port"),
        counted(len(host.numa_nodes), "NUMA node"),
    )
    return f"{host.name or names} ({', '.join(counts)})"


def _exit_code(findings: Sequence[Diagnostic]) -> int:
    is_clean = all(finding.severity is Level.NOTE for finding in findings)
    return 0 if is_clean else EXIT_FOUND


def _print_json(form: str, content: Mapping[str, Any]) -> None:
    print(json.dumps({"form": form, "version": _VERSION, **content}, indent=1))


def _diff(words: Sequence[str]) -> int:
    from ronde.render.topo_tables import draw_comparison
    from ronde.topology.comparison import compare_hosts

    parser = CommandParser(
        "ronde topo diff", _DIFF_HELP, positionals={"a": None, "b": None}
    )
    options = parser.read(words)
    if options is None:
        return 0
    hosts: list[HostTopology] = []
    for name in (options.a, options.b):
        is_tree = name != "-" and Path(name).is_dir()
        given = {
            "sources": [] if is_tree else [name],
            "root": name if is_tree else None,
        }
        loaded = load_topology(argparse.Namespace(**given))
        found = loaded.topology.hosts
        if len(found) != 1:
            names = ", ".join(host.name for host in found) or "none"
            raise UsageError(
                f"sources must have one host, got {len(found)} ({names}). Give one "
                "host's."
            )
        show_notices(loaded.notices)
        hosts += found
    comparison = compare_hosts(*hosts)
    if options.json:
        _print_json("ronde-topology-diff", {"comparison": to_plain(comparison)})
    else:
        print(draw_comparison(options.a, options.b, comparison), end="")
    return 0 if comparison.is_equal else EXIT_FOUND


def _place(words: Sequence[str]) -> int:
    from ronde.render.topo_tables import tabulate_plan
    from ronde.topology.machine import read_cores
    from ronde.topology.placement.placing import AlignmentRequest, Scope
    from ronde.topology.placement.plan import plan_host
    from ronde.topology.placement.policies import Policy

    parser = SourceParser("place", _PLACE_HELP)
    parser.set_defaults(policy=Policy.BEST_EFFORT, scope=Scope.RANK)
    options = parser.read(words)
    if options is None:
        return 0
    if options.n is None:
        parser.error("-n must be given, got none")
    request = AlignmentRequest(
        read_number("-n", options.n, "Type: -n 1", least=1),
        Policy(read_one_of("--policy", options.policy, list(Policy))),
        Scope(read_one_of("--scope", options.scope, list(Scope))),
    )
    loaded = load_topology(options)
    show_notices(loaded.notices)
    if not loaded.topology.hosts:
        raise UsageError(
            "sources must have a host, got none. Add a file that does, or give none "
            "for this machine."
        )
    allowed = None
    if options.root is not None or not options.sources:
        allowed = read_cores(str(Path(options.root or "/")).rstrip("/"))
    plans = [plan_host(host, request, allowed) for host in loaded.topology.hosts]
    if options.json:
        print(json.dumps(to_plain(tuple(plans)), indent=2))
    else:
        print("\n".join(tabulate_plan(plan) for plan in plans), end="")
    return 0


def _limit(words: Sequence[str]) -> int:
    from ronde.render.topo_tables import judge, tabulate_limits
    from ronde.topology.limits.bounds import COLLECTIVES, Bound, LimitWorld, bounds_of
    from ronde.topology.limits.host import KnownRates, slowest, world_of

    types = {"N": _count, "GB/S": _rate, "PERCENT": _rate}
    options = SourceParser("limit", _LIMIT_HELP, types).read(words)
    if options is None:
        return 0
    names = _collectives(options, COLLECTIVES)
    loaded = load_topology(options)
    hosts = loaded.topology.hosts
    if not hosts:
        raise UsageError("sources must have a host, got none. Was a file cut?")
    num_gpus = min(len(host.gpus) for host in hosts)
    num_nodes = options.nodes or len(hosts)
    ranks_per_node = options.ranks_per_node or num_gpus or 1
    given = KnownRates(options.link_rate, options.gpu_rate)
    world: LimitWorld = slowest(
        [world_of(host, num_nodes, ranks_per_node, given) for host in hosts]
    )
    bounds: Sequence[Bound] = bounds_of(world, names)
    measured: float | None = options.measured
    judged = bounds[0]
    limit = None if measured is None else judged.limit
    if limit is None and measured is not None:
        raise UsageError(
            "--measured must have a bound to compare with, got none: "
            f"{judged.reason}. Give --link-rate and --gpu-rate, or a source that has "
            "them."
        )
    if options.json:
        content = {
            "num_nodes": world.layout.num_nodes,
            "ranks_per_node": world.layout.ranks_per_node,
            "unknown": list(world.unknown),
            "limits": [_limit_entry(each, measured) for each in bounds],
        }
        _print_json("ronde-limits", content)
    else:
        print(tabulate_limits(world, bounds), end="")
        if limit is not None and measured is not None:
            print("\n" + judge(limit, measured), end="")
    show_notices(loaded.notices)
    if limit is None or measured is None or options.threshold is None:
        return 0
    return 0 if limit.percent(measured) >= options.threshold else EXIT_FOUND


def _collectives(options: argparse.Namespace, known: Sequence[str]) -> Sequence[str]:
    """Return the collectives to look at; one where there is a measurement."""
    names = [read_one_of("--collective", n, known) for n in options.collective]
    names = list(dict.fromkeys(names))
    if options.measured is None:
        if options.threshold is not None:
            raise UsageError(
                "--threshold must come with --measured, got it alone. Give the busbw "
                "that was measured, too."
            )
        return names or known
    if len(names) > 1:
        raise UsageError(
            f"--measured must be of one collective, got {len(names)}. Give one "
            "--collective."
        )
    return names or [_MEASURED]


def _limit_entry(bound: Any, measured: float | None) -> dict[str, object]:  # noqa: ANN401  imported where it is needed
    limit = bound.limit
    entry: dict[str, object] = {
        "collective": bound.collective,
        "bound_gb_per_s": limit.bus_bandwidth_gb_per_s if limit else None,
        "link": limit.link if limit else "",
        "practical_gb_per_s": limit.practical_gb_per_s if limit else None,
        "practical_link": limit.practical_link if limit else "",
        "note": limit.note if limit else bound.reason,
    }
    if limit and measured is not None:
        entry["measured_gb_per_s"] = measured
        entry["percent"] = limit.percent(measured)
    return entry


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


def _log(words: Sequence[str]) -> int:
    from ronde.render.topo_log import draw_log
    from ronde.topology.nccl_log import judge_nccl_log, read_nccl_log

    parser = CommandParser("ronde topo log", _LOG_HELP, positionals={"files": "+"})
    options = parser.read(words)
    if options is None:
        return 0
    name = options.files[0]
    try:
        log = read_nccl_log(_open(options.files))
    except OSError as error:
        raise UsageError(
            f"{error.filename or name} must be a file that can be read, got: "
            f"{error.strerror}. Check the name."
        ) from None
    if not log.num_messages:
        raise UsageError(
            f"{name} must be what NCCL wrote, got {log.num_lines} lines without a "
            "message from it. Set NCCL_DEBUG=INFO for the job, and give its output."
        )
    findings = judge_nccl_log(log)
    if options.json:
        content = {"log": to_plain(log), "findings": to_plain(tuple(findings))}
        _print_json("ronde-nccl-log", content)
    else:
        print(draw_log(log, findings), end="")
    return _exit_code(findings)


def _open(names: Sequence[str]) -> Iterator[BinaryIO]:
    for name in names:
        if name == "-":
            yield sys.stdin.buffer
        else:
            with Path(name).open("rb") as file:
                yield file
