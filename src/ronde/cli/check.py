"""``ronde check``: collect facts of hosts, check them, and show the findings."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ronde.arguments import CommandParser, read_number, read_one_of
from ronde.check.catalogue import all_checks, plan_for
from ronde.check.check import Check, Family, Severity
from ronde.check.cluster import ABSENT, HOST_ANSWERS
from ronde.check.collect import Collected, collect, collect_from
from ronde.check.expected import EXPECTED, read_expected
from ronde.check.fleet import ENVIRONMENT, Fleet, Value
from ronde.check.history import Changes, SavedRun, compare, load_last, save
from ronde.check.judging import (
    GPU_COUNT,
    Judgement,
    Readiness,
    decide,
    fit_together,
    judge,
)
from ronde.check.reading import NOT_OF_FILES, read_saved_facts
from ronde.cli.help import HOST_OPTIONS, SSH_OPTIONS
from ronde.cli.hosts import HOST_DEFAULTS, HOST_TYPES, find_hosts, make_spawner
from ronde.errors import Failure, HostError, HostFailure, UsageError
from ronde.launch.bootstrap import start_local_agent
from ronde.launch.environments import own_environment, select_forwarded
from ronde.launch.host import MAX_SLOTS, Host
from ronde.launch.hosts.node import AgentNode, AgentStarter
from ronde.launch.job.controller import Controller, Preflight
from ronde.launch.limits import USUAL, Timeouts
from ronde.launch.program import absolute_path
from ronde.launch.signals import InterruptedStartError, caught_signals
from ronde.render import check as render
from ronde.render.hosts import write_hostfile
from ronde.render.text import WIDTH
from ronde.topology.sources import read_saved
from ronde.units import counted, parse_duration_s

EXIT_READY, EXIT_WARNED, EXIT_NOT_READY, EXIT_UNKNOWN = range(4)

_WAYS = ("auto", "tcp", "gloo", "nccl")
_MAX_BURN_S = 24 * 3600.0
_MIN_WIDTH = 60

_HELP = f"""\
usage: ronde check [-H HOSTS | --hostfile FILE] [options]
       ronde check read FILE ... judge output that was saved: nvidia-smi -q, a
                                 kernel's log (dmesg, journalctl -k), ibstat
       ronde check list          list all checks, a line each
       ronde check explain ID    describe one check

Show which hosts are ready for training, what is wrong on the others, and how to fix it.

checks:
  --ranks N             ranks on each host; the slots of -H by default
  --chdir DIR           folder in which ranks will start, as for ronde run; this
                        one by default
  --path DIR ...        folder that all hosts must share
  --file FILE ...       file that must be equal on all hosts; read whole up to
                        1GiB, of a larger one 64 pieces of 1MiB
  --expect WORDS        equipment of each host, as 8xH100,8x400G,2TiB,10GB/s
                        (GPUs, ports, memory, and the rate between hosts, which
                        is measured), or a file with such words
  --only NAME[,NAME] ...
                        make only these checks: families or ids of ronde check
                        list
  --skip NAME[,NAME] ...
                        leave these out

measurements:
  --burn TIME           also multiply matrices for this time, as 30s: results
                        must be equal, and speeds alike; GPUs copy as well
  --bandwidth [WAY]     also measure the bandwidth between GPUs of a host, and
                        between hosts, pair by pair: by tcp, or ronde bench
                        over gloo or nccl; auto takes nccl if all hosts have
                        it, else tcp

output:
  --strict              exit with 1 if there are warnings
  --json                print one object of JSON
  --save FILE           append all facts and findings to FILE, a line of JSON
                        a run
  --since FILE          show what has changed since the last run that FILE
                        holds
  --write-hostfile FILE
                        write the hosts that are ready to FILE, for ronde run
                        --hostfile
  -h, --help            show this help and exit

{HOST_OPTIONS}
{SSH_OPTIONS}
In the table: ok, ! warning, x not ready, ? something could not be read, - nothing was
read. Facts that could not be read are listed and are no fault, but a host whose GPUs
cannot be queried is not ready.

exit code: 0 all hosts are ready, 1 warnings, with --strict, 2 a host is not ready, or
two are not ready together, 3 no host answered, or the state of one is unknown, 64 a bad
command line, 130 after Ctrl-C.

examples:
  ronde check                                     this machine
  ronde check -H node[1-8] --path /data --write-hostfile good.txt
  ronde run --hostfile good.txt train.py
"""

_READ_HELP = """\
usage: ronde check read FILE ... [options]

Find faults in the saved output of other programs.

options:
  --strict    exit with 1 if there are warnings
  --json      print one object of JSON
  -h, --help  show this help and exit

FILE is one of these, recognised by its content; - is standard input:
  nvidia-smi -q, as text or XML (-x), whole or with -d
  a kernel's log: dmesg, dmesg -T, journalctl -k, kern.log, syslog
  ibstat, ibstatus or ibv_devinfo
Each file is a host, and the hosts are compared with each other.

exit code: 0, 1 warnings, with --strict, 2 a fault, 64 a file that cannot be read

example:
  nvidia-smi -q > gpus.txt; dmesg > kernel.txt; ronde check read gpus.txt kernel.txt
"""


class CheckRequest(NamedTuple):
    """The parsed command line of ``ronde check``."""

    options: argparse.Namespace
    hosts: tuple[Host, ...]  # at least one
    settings: dict[str, Value]  # for probes and checks
    checks: tuple[Check, ...]  # at least one


class _Checked(NamedTuple):
    collected: Collected
    judgement: Judgement
    verdict: Readiness
    exit_code: int


def _make_parser() -> CommandParser:
    parser = CommandParser("ronde check", _HELP, types=HOST_TYPES)
    parser.set_defaults(**HOST_DEFAULTS, burn="0")
    return parser


def run(words: Sequence[str], timeouts: Timeouts = USUAL) -> int:
    parser = _make_parser()
    if words[:1] != ["read"] and ("-h" in words or "--help" in words):
        parser.read(["--help"])
        return EXIT_READY
    match list(words):
        case ["list"]:
            print(render.list_checks(all_checks()), end="")
        case ["explain", name] if not name.startswith("-"):
            checks = {check.id: check for check in all_checks()}
            if name not in checks:
                raise _unknown(name, list(checks), "explain", "a check's id")
            print(render.explain_check(checks[name]), end="")
        case ["read", *rest]:
            return _read(rest)
        case [("list" | "explain") as verb, *_]:
            number = "one argument" if verb == "explain" else "no arguments"
            raise UsageError(
                f"ronde check {verb} takes {number}, got {' '.join(words[1:])!r}. "
                "Type: ronde check --help"
            )
        case _:
            try:
                return _check(words, timeouts)
            except InterruptedStartError as error:
                return 128 + error.number
    return EXIT_READY


def _read(words: Sequence[str]) -> int:
    """Run ``ronde check read``: check saved files, each as if it were a host."""
    parser = CommandParser("ronde check read", _READ_HELP, positionals={"files": "+"})
    options = parser.read(words)
    if options is None:
        return EXIT_READY
    files = [read_saved_facts(read_saved(n)) for n in dict.fromkeys(options.files)]
    facts = tuple(each for each, _ in files)
    checks = tuple(each for each in all_checks() if each.id not in NOT_OF_FILES)
    hosts = tuple(Host(each.host) for each in facts)
    request = CheckRequest(options, hosts, {}, checks)
    checked = judge_request(request, Collected(facts, ()))
    findings, code = checked.judgement.findings, checked.exit_code
    if options.json:
        _print_json(checked)
    else:
        for (host, *_), subject in files:
            num = sum(host in finding.hosts for finding in findings)
            found = counted(num, "finding") if num else "nothing found"
            print(f"{host}: {found} in {subject}")
        shown = render.draw_findings(findings, _width())
        print("\n" + shown if shown else "", end="")
    return code


def _print_json(checked: _Checked, changes: Changes | None = None) -> None:
    collected, judgement, verdict, code = checked
    text = render.checked_as_json(
        collected.hosts, judgement, verdict, exit_code=code, changes=changes
    )
    print(text, end="")


def _check(words: Sequence[str], timeouts: Timeouts) -> int:
    environ = own_environment()
    request = read_check_request(words, environ)
    options = request.options
    plan = plan_for(request.checks, request.settings)
    since = load_last(Path(options.since)) if options.since else None
    with caught_signals() as signal_fd, start_local_agent() as agent:
        starter = AgentStarter(
            agent, lambda: make_spawner(options, environ), options.python, timeouts
        )
        with _progress() as report:
            collected = collect(
                request.hosts, starter, signal_fd, request.settings, plan, report
            )
    checked = judge_request(request, collected)
    ids = tuple(check.id for check in request.checks)
    kept = SavedRun(collected.hosts, checked.judgement.findings, ids)
    try:
        _show(request, checked, since, kept)
    finally:
        # Also if standard output is closed.
        _write(request, checked, kept)
    return checked.exit_code


def read_check_request(
    words: Sequence[str], environ: Mapping[str, str]
) -> CheckRequest:
    options = _make_parser().parse_args(words)
    chosen = _choose(options, all_checks())
    hosts = find_hosts(options, environ)
    if "" in (*options.path, *options.file):
        raise UsageError("--path and --file must not be empty, got ''. Give a path.")
    burn_s = parse_duration_s(options.burn, "--burn")
    if burn_s > _MAX_BURN_S:
        raise UsageError(
            f"--burn must be at most a day, got {options.burn}. Give less."
        )
    settings: dict[str, Value] = {
        "directory": str(absolute_path(options.chdir or "")),
        "paths": [str(absolute_path(path)) for path in options.path],
        "files": [str(absolute_path(path)) for path in options.file],
        ENVIRONMENT: select_forwarded(environ),
        "burn_s": burn_s,
        "bandwidth": "",
    }
    if options.expect is not None:
        settings[EXPECTED] = read_expected(options.expect)
    way, has_rate = options.bandwidth, "gb_per_s" in settings.get(EXPECTED, {})
    if has_rate and len(hosts) < 2:
        raise UsageError(
            f"--expect {options.expect} has a rate between hosts, but there is only "
            "one host. Name hosts with -H, or leave the rate out."
        )
    if way is not None or has_rate:
        settings["bandwidth"] = read_one_of("--bandwidth", way or "auto", _WAYS)
    if options.ranks is not None:
        settings["num_ranks"] = read_number(
            "--ranks", options.ranks, "Correct it.", least=1, most=MAX_SLOTS
        )
    elif any(host.slots > 0 for host in hosts):
        settings["num_ranks"] = max(host.slots for host in hosts)
    written = {"--save": options.save, "--write-hostfile": options.write_hostfile}
    for option, file in written.items():
        path = Path(file or "")
        written_to = path if path.exists() else path.parent
        if file and (path.is_dir() or not os.access(written_to, os.W_OK)):
            raise _unwritable(option, file)
    return CheckRequest(options, hosts, settings, chosen)


def _choose(options: argparse.Namespace, checks: Sequence[Check]) -> tuple[Check, ...]:
    known = [*Family, *(check.id for check in checks)]

    def read_names(option: str, given: Sequence[str]) -> set[str]:
        words = {word.strip() for text in given for word in text.split(",")} - {""}
        for word in words - {*known}:
            raise _unknown(word, known, option, "a family or a check's id")
        return words

    only = read_names("--only", options.only)
    skipped = read_names("--skip", options.skip)
    # A host that does not answer fails, no matter the choice of checks.
    only |= {HOST_ANSWERS} if only else {*Family}
    chosen = tuple(
        check
        for check in checks
        if {check.id, check.family} & only and not {check.id, check.family} & skipped
    )
    if not chosen:
        raise UsageError("--skip leaves no check to run. Drop a name.")
    return chosen


def _unknown(name: str, known: Sequence[str], option: str, kind: str) -> UsageError:
    likely = get_close_matches(name, known, n=1)
    cure = f"Type: {likely[0]}" if likely else "Type: ronde check list"
    return UsageError(f"{option} must be {kind}, got {name!r}. {cure}")


def _unwritable(option: str, got: str) -> UsageError:
    return UsageError(f"cannot write the file of {option}: {got}. Name another file.")


def make_preflight(directory: str, env: dict[str, str]) -> Preflight:
    """Return the preflight of ``ronde run``: all checks except ``torch-installed``.

    The preflight imports no torch, as the ranks that need torch soon import it anyway.
    """
    checks = [each for each in all_checks() if each.id != "torch-installed"]

    def check(controller: Controller, nodes: Sequence[AgentNode]) -> tuple[str, ...]:
        settings = {"directory": directory, ENVIRONMENT: env}
        plan = plan_for(checks, settings)
        found = collect_from(controller, nodes, settings, plan, lambda _: None)
        judgement = judge(Fleet(found.hosts, settings), checks)
        findings = judgement.findings
        bad = [each for each in findings if each.severity is Severity.FAIL]
        failures = [HostFailure(e.host, Failure(e.message, e.fix)) for e in bad]
        if found.failures or bad:
            unfit = {host for each in bad for host in each.hosts}
            unfit |= {each.host for each in found.failures}
            raise HostError(
                f"{len(unfit)} of {len(nodes)} hosts are not ready.",
                [*found.failures, *failures],
                [node.name for node in nodes if node.name not in unfit],
            )
        warned = [each for each in findings if each.severity is Severity.WARN]
        unread = [each for each in judgement.unread if each.check == GPU_COUNT]
        return (
            *(f"{each.host}: {each.message}. {each.fix}" for each in warned),
            *(f"{each.host}: its GPUs are unknown: {each.reason}" for each in unread),
        )

    return check


def judge_request(request: CheckRequest, collected: Collected) -> _Checked:
    absent = {
        each.host: {"reason": each.failure.reason, "cure": each.failure.cure}
        for each in collected.failures
    }
    fleet = Fleet(collected.hosts, {**request.settings, ABSENT: absent})
    judgement = judge(fleet, request.checks)
    names = [host.name for host in request.hosts]
    # With --only, perhaps none of the chosen facts was read.
    is_part = bool(getattr(request.options, "only", ()))
    families = {e.family for e in request.checks if is_part and e.id != HOST_ANSWERS}
    verdict = decide(names, judgement, len(collected.hosts), families)
    code = EXIT_READY
    if not verdict.num_asked:
        code = EXIT_UNKNOWN
    elif verdict.is_faulty:
        code = EXIT_NOT_READY
    elif verdict.unknown:
        code = EXIT_UNKNOWN
    elif verdict.is_warned and request.options.strict:
        code = EXIT_WARNED
    return _Checked(collected, judgement, verdict, code)


def _show(
    request: CheckRequest,
    checked: _Checked,
    since: tuple[str, SavedRun] | None,
    kept: SavedRun,
) -> None:
    changes = compare(since[1], kept) if since else None
    judgement, verdict = checked.judgement, checked.verdict
    if request.options.json:
        _print_json(checked, changes)
        return
    names, width = [host.name for host in request.hosts], _width()
    parts = [
        render.tabulate_hosts(names, judgement, request.checks, width),
        render.draw_findings(judgement.findings, width),
        render.draw_unread(judgement.unread, width),
        since and changes and render.draw_changes(changes, since[0], width),
        render.draw_verdict(verdict, judgement.findings, width),
    ]
    print("\n".join(part for part in parts if part), end="")


def _write(request: CheckRequest, checked: _Checked, kept: SavedRun) -> None:
    options = request.options
    if options.save:
        with _writing("--save", options.save):
            save(Path(options.save), kept)
    if options.write_hostfile:
        names = [host.name for host in request.hosts]
        good = fit_together(names, checked.verdict, is_strict=options.strict)
        fit = [host for host in request.hosts if host.name in good]
        text = write_hostfile(fit)
        with _writing("--write-hostfile", options.write_hostfile):
            Path(options.write_hostfile).write_text(text, encoding="utf-8")


@contextmanager
def _writing(option: str, file: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(option, f"{file}: {error.strerror}") from None


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """Show the current step on a terminal, and clear it at the end."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    try:
        yield lambda step: show(f"ronde: {step} ...")
    finally:
        show("")


def _width() -> int:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    return max(columns, _MIN_WIDTH)
