"""``ronde topo``: show, check and compare the topology of hosts."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from ronde.arguments import CommandParser, read_number, read_one_of, require_alone
from ronde.errors import UsageError
from ronde.plain_values import to_plain
from ronde.topology.graph import Diagnostic, HostTopology, Level, Topology
from ronde.topology.probes.base import Saved
from ronde.topology.sources import (
    find_probe,
    is_log,
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
_HELP = """\
usage: ronde topo [SOURCE ...]            show the links of a machine
       ronde topo lint [SOURCE ...]       find faults, and how to fix them
       ronde topo diff A B                compare two hosts
       ronde topo place -n RANKS          place ranks on a machine
       ronde topo limit [SOURCE ...]      show the limits of collectives
       ronde topo log FILE ...            find faults in NCCL's debug log

ronde topo VERB --help shows more about a verb, ronde topo show --help about the first
form.
"""
_ROOT_OPTION = """\
  --root DIR      read a saved tree that holds sys and proc, in place of this
                  machine
  -h, --help      show this help and exit
"""
_SOURCES_HELP = """\
SOURCE is a file in one of these forms: NCCL's topology (NCCL_TOPO_DUMP_FILE writes it,
clouds ship it), AMD's, hwloc's XML, the text of nvidia-smi topo -m, lspci -vvv,
amd-smi topology or rocm-smi --showtopo, Slurm's topology.conf, or the output of ronde
topo --json; - is standard input. Each file is one host. Without a SOURCE, this machine
is read.
"""
_SHOW_HELP = f"""\
usage: ronde topo [SOURCE ...] [--json | --matrix | --paths] [options]

Show the parts of a machine, and the links between them.

options:
  --json          the graph as JSON
  --matrix        a table like that of nvidia-smi topo -m
  --paths         kind and bandwidth of the paths of GPUs
{_ROOT_OPTION}
{_SOURCES_HELP}
example:
  ronde topo --json > node1.json      a file to send to others
  ronde topo node1.json --matrix      like nvidia-smi topo -m, from any source
"""
_EXIT_FOUND = 1
"""Exit code of a finding worse than a note, a difference, or too little bandwidth."""

_VERSION = 1
"""Version of all JSON here; changes when a field changes its meaning or goes."""

_MEASURED = "all_reduce"
_MOST = 1 << 20

_LINT_HELP = f"""\
usage: ronde topo lint [SOURCE ...] [options]

Find faults in a machine or a topology file, with their cost and the fix.

options:
  --json          print one object of JSON
  --rule NAME[,NAME] ...
                  check these rules only
  --ignore NAME[,NAME] ...
                  skip these rules
  --rules         list the rules and exit
{_ROOT_OPTION}
{_SOURCES_HELP}
Several hosts are also compared with each other, and Slurm's switches are checked. Facts
that the sources do not show are listed as not checked.

exit code: 0 only notes, 1 a warning or an error, 64 a source that cannot be read

example:
  NCCL_TOPO_DUMP_FILE=topo.xml ronde run -n 8 train.py && ronde topo lint topo.xml
"""
_DIFF_HELP = """\
usage: ronde topo diff A B [--json]

Show the differences between two hosts, and their cost.

options:
  --json      print one object of JSON
  -h, --help  show this help and exit

A and B are files that ronde topo reads, or directories that contain sys and proc; / is
this machine. Compare two nodes of a job, or a virtual machine and its host. Elements
are matched by bus address, the others by number and name. PCI links count at their
current speed and width.

exit code: 0 the hosts are equal, 1 they differ, 64 a source cannot be read

example:
  ronde topo diff node1.xml node2.xml
"""
_PLACE_HELP = f"""\
usage: ronde topo place -n RANKS [SOURCE ...] [options]

Show which GPU, cores, memory and adapter each rank should have.

options:
  -n RANKS        ranks of a host
  --policy POLICY
                  treatment of ranks that cannot be aligned: none,
                  best-effort, restricted, single-numa-node (default:
                  best-effort)
  --scope SCOPE   align each rank by itself (rank, the default), or all (job)
  --json          the plan as JSON
{_ROOT_OPTION}
{_SOURCES_HELP}
On this machine and in a saved tree, ranks get only cores that this process may use.
Rank i gets GPU i if there are enough GPUs, and an equal part of the cores.
Policies are those of Kubernetes' TopologyManager.

example:
  ronde topo place -n 8 --policy restricted
"""
_LIMIT_HELP = f"""\
usage: ronde topo limit [SOURCE ...] [options]

Show the most that each collective can reach, and the link that limits it.

options:
  --nodes N       number of nodes (default: the number of hosts)
  --ranks-per-node N
                  ranks of a node (default: its GPUs, or 1)
  --link-rate GB/S
                  rate of all network links of a node together, one direction
  --gpu-rate GB/S
                  rate from a GPU to the others of its node, one direction
  --collective NAME ...
                  show this collective only
  --measured GB/S
                  compare with this busbw, of all_reduce or of --collective
  --threshold PERCENT
                  exit with 1 if --measured is below this part of the bound
  --json          print one object of JSON
{_ROOT_OPTION}
{_SOURCES_HELP}
Bounds are busbw, as ronde bench and nccl-tests print it. Several hosts are the nodes of
one job, and the slowest one counts. One host with --nodes N stands for N equal hosts.

exit code: 0, 1 --measured is below --threshold, 64 a source that cannot be read

example:
  ronde topo limit topo.xml --nodes 2 --measured 471.2 --threshold 80
"""
_LOG_HELP = """\
usage: ronde topo log FILE... [--json]

Show NCCL's choices and find faults, from NCCL's output with NCCL_DEBUG=INFO. Show also
the collectives that timed out and the ranks that failed, from the output of torch,
torchrun, srun and mpirun.

options:
  --json      print one object of JSON
  -h, --help  show this help and exit

Several files are read as one log. They may be gzipped. Lines that other ranks
interrupted are joined again. - is standard input.

To log all that NCCL can, into one file per rank:
  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p \\
  NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING ronde run -n 8 train.py

exit code: 0 only notes, 1 a warning or an error, 64 a file that cannot be read
"""
_FORMS = ("--json", "--matrix", "--paths")


def run(words: Sequence[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    name, rest = "show", words
    if words and words[0] in _VERBS:
        name, rest = words[0], words[1:]
    run_verb, help_text, positionals = _VERBS[name]
    command = "ronde topo" if name == "show" else f"ronde topo {name}"
    types = {"N": _count, "GB/S": _rate, "PERCENT": _rate}
    parser = CommandParser(command, help_text, types=types, positionals=positionals)
    options = parser.read(rest)
    return 0 if options is None else run_verb(options)


def _read_sources(options: argparse.Namespace) -> tuple[Saved, ...]:
    return tuple(read_saved(name) for name in options.sources)


def _load(sources: Sequence[Saved], root: str | None) -> Topology:
    parts = [read_file(each) for each in sources]
    if root is not None or not sources:
        environ = {} if root else select_variables(_VISIBILITY)
        tree, notices = read_tree(Path(root or "/"), environ)
        parts.append(Topology((tree,)))
        for notice in notices:
            print(f"ronde: {notice}", file=sys.stderr)
    topology = join_topologies(parts)
    if not topology.hosts and not topology.switches:
        raise UsageError(
            "the sources contain no host and no switch. A file may be truncated."
        )
    return topology


def load_hosts(options: argparse.Namespace) -> tuple[HostTopology, ...]:
    """Return the hosts of ``sources`` and ``root``; if both are unset, this machine."""
    hosts = _load(_read_sources(options), options.root).hosts
    if not hosts:
        raise UsageError(
            "the sources contain no host. Add a file that has one, or leave out all "
            "files to read this machine."
        )
    return hosts


def _show(options: argparse.Namespace) -> int:
    require_alone(options, *_FORMS)
    sources = _read_sources(options)
    if sources and all(map(is_log, sources)):
        require_alone(options, "--json", "--matrix", "--paths", "--root")
        files = (BytesIO(each.data) for each in sources)
        return _lint_log(files, sources[0].name, is_json=options.json)
    topology = _load(sources, options.root)
    _print(topology, options)
    return 0


def _print(topology: Topology, options: argparse.Namespace) -> None:
    if options.json:
        from ronde.topology.graph import write_topology

        print(write_topology(topology), end="")
    elif options.matrix or options.paths:
        for host in topology.hosts:
            print(_table(host, is_matrix=options.matrix), end="")
    else:
        from ronde.render.topo_tree import draw_tree

        print(draw_tree(topology), end="")
        for host in topology.hosts:
            # The tree does not show relations of pairs.
            if host.relations and not host.devices:
                print("\n" + _table(host, is_matrix=True), end="")


def _table(host: HostTopology, *, is_matrix: bool) -> str:
    from ronde.render.topo_tables import tabulate_classes, tabulate_speeds
    from ronde.topology.paths.classes import classify
    from ronde.topology.paths.network import find_paths

    table = classify(host)
    if is_matrix:
        return tabulate_classes(table)
    return tabulate_speeds(find_paths(host), table)


def _lint(options: argparse.Namespace) -> int:
    from ronde.render.text import wrap
    from ronde.render.topo_log import count_findings, draw_log_findings
    from ronde.topology.lint import lint_fleet, lint_host, lint_switches, unseen_facts
    from ronde.topology.lint_rules import CATALOGUE
    from ronde.units import counted

    if options.rules:
        for subject, rules in CATALOGUE.items():
            print(f"{subject}:")
            for name, meaning in rules.items():
                print(wrap(f"  {name:<24}", meaning, indent=26), end="")
        return 0
    known = {name for rules in CATALOGUE.values() for name in rules}
    wanted = _names("--rule", options.rule, known) or known
    wanted = wanted - _names("--ignore", options.ignore, known)
    sources, errors = _read_good(options.sources)
    hosts, switches = _load(sources, options.root)
    found = list(lint_switches(switches))
    for host in hosts:
        name = f"{host.name} " if len(hosts) > 1 else ""
        found += [
            each._replace(element=name + each.element) for each in lint_host(host)
        ]
    found += lint_fleet(hosts)
    subject = counted(len(hosts), "host") if hosts else ""
    if switches:
        names = {name for switch in switches for name in switch.hosts}
        below = f"{counted(len(switches), 'switch')} with {counted(len(names), 'host')}"
        subject = f"{subject}, {below}" if hosts else below
    if len(hosts) == 1 and not switches:
        gpus, ports, nodes = hosts[0].gpus, hosts[0].ports, hosts[0].numa_nodes
        parts = {"GPU": gpus, "network port": ports, "NUMA node": nodes}
        counts = (counted(len(some), noun) for noun, some in parts.items())
        name = hosts[0].name or ", ".join(saved.name for saved in sources)
        subject = f"{name} ({', '.join(counts)})"
    unseen = unseen_facts(hosts)
    findings = [finding for finding in found if finding.rule in wanted]
    if options.json:
        content = {"findings": to_plain(tuple(findings)), "not_shown": list(unseen)}
        print_json("ronde-findings", content)
    else:
        print(f"{subject}: {count_findings(findings)}.")
        if unseen:
            print(wrap("", f"Not checked: {', '.join(unseen)}."), end="")
        print("\n" + draw_log_findings(findings) if findings else "", end="")
    if errors:
        raise UsageError("\n".join(map(str, errors)))
    return _exit_code(findings)


def _read_good(names: Sequence[str]) -> tuple[list[Saved], list[UsageError]]:
    good: list[Saved] = []
    errors: list[UsageError] = []
    for name in names:
        try:
            saved = read_saved(name)
            read_file(saved)
        except UsageError as error:
            errors.append(error)
        else:
            good.append(saved)
    if errors and not good:
        raise errors[0]
    return good, errors


def _names(option: str, given: Sequence[str], known: set[str]) -> set[str]:
    names = {name.strip() for text in given for name in text.split(",")}
    unknown = sorted(names - known)
    if unknown:
        raise UsageError(
            f"{option} must name rules, got {unknown[0]!r}. List the rules with: ronde "
            "topo lint --rules"
        )
    return names


def _exit_code(findings: Sequence[Diagnostic]) -> int:
    is_clean = all(finding.severity is Level.NOTE for finding in findings)
    return 0 if is_clean else _EXIT_FOUND


def print_json(form: str, content: Mapping[str, Any]) -> None:
    """Print a JSON object that begins with the name of its form and its version."""
    print(json.dumps({"form": form, "version": _VERSION, **content}, indent=1))


def _diff(options: argparse.Namespace) -> int:
    from ronde.render.topo_tables import draw_comparison
    from ronde.topology.comparison import compare_hosts

    hosts: list[HostTopology] = []
    for name in (options.a, options.b):
        is_tree = name != "-" and Path(name).is_dir()
        sources = [] if is_tree else [read_saved(name)]
        found = _load(sources, name if is_tree else None).hosts
        if len(found) != 1:
            names = ", ".join(host.name for host in found) or "none"
            raise UsageError(
                f"{name} has {len(found)} hosts ({names}). Give a file with one host."
            )
        hosts += found
    comparison = compare_hosts(*hosts)
    if options.json:
        print_json("ronde-topology-diff", {"comparison": to_plain(comparison)})
    else:
        print(draw_comparison(options.a, options.b, comparison), end="")
    return 0 if comparison.is_equal else _EXIT_FOUND


def _plan(options: argparse.Namespace) -> int:
    from ronde.render.topo_tables import tabulate_plan
    from ronde.topology.machine import read_cores
    from ronde.topology.placement.placing import AlignmentRequest, Policy, Scope
    from ronde.topology.placement.plan import plan_host

    if options.n is None:
        raise UsageError("-n is required. See: ronde topo place --help")
    policy, scope = options.policy or Policy.BEST_EFFORT, options.scope or Scope.RANK
    request = AlignmentRequest(
        read_number("-n", options.n, "Type: -n 1", least=1),
        Policy(read_one_of("--policy", policy, list(Policy))),
        Scope(read_one_of("--scope", scope, list(Scope))),
    )
    hosts = load_hosts(options)
    allowed = None
    if options.root is not None or not options.sources:
        allowed = read_cores(str(Path(options.root or "/")).rstrip("/"))
    plans = [plan_host(host, request, allowed) for host in hosts]
    if options.json:
        print(json.dumps(to_plain(tuple(plans)), indent=2))
    else:
        print("\n".join(tabulate_plan(plan) for plan in plans), end="")
    return 0


def _limit(options: argparse.Namespace) -> int:
    from ronde.render.topo_tables import compare_with_limit, tabulate_limits
    from ronde.topology.limits import (
        COLLECTIVES,
        KnownRates,
        bound_of,
        slowest,
        world_of,
    )

    names = _collectives(options, COLLECTIVES)
    hosts = load_hosts(options)
    ranks_per_node = options.ranks_per_node or min(len(host.gpus) for host in hosts)
    given = KnownRates(options.link_rate, options.gpu_rate)
    size = (options.nodes or len(hosts), ranks_per_node or 1)
    world = slowest([world_of(host, *size, given) for host in hosts])
    bounds = [bound_of(world, name) for name in names]
    measured: float | None = options.measured
    limit = None if measured is None else bounds[0].limit
    if limit is None and measured is not None:
        raise UsageError(
            f"there is no bound to compare --measured with: {bounds[0].reason}. Give "
            "--link-rate and --gpu-rate, or a source that shows these rates."
        )
    if options.json:
        content = {
            "num_nodes": size[0],
            "ranks_per_node": size[1],
            "unknown": list(world.unknown),
            "limits": [_limit_entry(each, measured) for each in bounds],
        }
        print_json("ronde-limits", content)
    else:
        print(tabulate_limits(world, bounds), end="")
        if limit is not None and measured is not None:
            print("\n" + compare_with_limit(limit, measured), end="")
    if limit is None or measured is None or options.threshold is None:
        return 0
    return 0 if limit.percent(measured) >= options.threshold else _EXIT_FOUND


def _collectives(options: argparse.Namespace, known: Sequence[str]) -> Sequence[str]:
    names = [read_one_of("--collective", n, known) for n in options.collective]
    names = list(dict.fromkeys(names))
    if options.measured is None:
        if options.threshold is not None:
            raise UsageError(
                "--threshold requires --measured. Give the measured busbw, too."
            )
        return names or known
    if len(names) > 1:
        raise UsageError(
            f"--measured is the busbw of one collective, but --collective names "
            f"{len(names)}. Name one."
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


def _log(options: argparse.Namespace) -> int:
    files = _open(options.files)
    return _lint_log(files, options.files[0], is_json=options.json)


def _lint_log(files: Iterable[BinaryIO], name: str, *, is_json: bool) -> int:
    from ronde.render.topo_log import draw_log
    from ronde.topology.nccl_log import lint_nccl_log, read_nccl_log

    try:
        log = read_nccl_log(files)
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename or name}: {error.strerror}."
        ) from None
    if not log.num_messages and not log.watchdog.num_lines and not log.failures:
        raise _no_log(name, log.num_lines)
    findings = lint_nccl_log(log)
    if is_json:
        content = {"log": to_plain(log), "findings": to_plain(tuple(findings))}
        print_json("ronde-nccl-log", content)
    else:
        print(draw_log(log, findings), end="")
    return _exit_code(findings)


def _no_log(name: str, num_lines: int) -> UsageError:
    from ronde.topology.probes.others import LOG, recognise_other

    saved = read_saved(name) if num_lines and name != "-" else Saved(name, b"")
    kind, cure = recognise_other(saved)
    if find_probe(saved):
        kind, cure = "a topology", f"Type: ronde topo {name}"
    if not kind or kind == LOG:
        return UsageError(
            f"{name} has no lines from NCCL or torch, and {num_lines} others. Set "
            "NCCL_DEBUG=INFO for the job, and give its output."
        )
    return UsageError(f"{name} is {kind}, not a log of NCCL or torch. {cure}")


def _open(names: Sequence[str]) -> Iterator[BinaryIO]:
    for name in names:
        if name == "-":
            yield sys.stdin.buffer
        else:
            with Path(name).open("rb") as file:
                yield file


_VERBS: Mapping[str, tuple[Callable[..., int], str, Mapping[str, str | None]]] = {
    "show": (_show, _SHOW_HELP, {"sources": "*"}),
    "lint": (_lint, _LINT_HELP, {"sources": "*"}),
    "diff": (_diff, _DIFF_HELP, {"a": None, "b": None}),
    "place": (_plan, _PLACE_HELP, {"sources": "*"}),
    "limit": (_limit, _LIMIT_HELP, {"sources": "*"}),
    "log": (_log, _LOG_HELP, {"files": "+"}),
}
