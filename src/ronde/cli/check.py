"""``ronde check``: hosts -> facts -> what is wrong -> exit code."""

import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ronde.check.catalogue import all_checks, plan_for
from ronde.check.check import Severity
from ronde.check.cluster.hosts import ABSENT
from ronde.check.collect import Collected, collect, collect_from
from ronde.check.facts import ENVIRONMENT, Fleet
from ronde.check.history import Earlier, Kept, compare, load_last, save
from ronde.check.judging import Judgement, Readiness, decide, fit_together, judge
from ronde.cli.check_options import CheckRequest, find_check, make_parser, read_request
from ronde.cli.ssh_options import make_spawner
from ronde.errors import Failure, HostError, HostFailure, UsageError
from ronde.launch.agent_start.bootstrap import start_local_agent
from ronde.launch.agent_start.starter import AgentStarter
from ronde.launch.controller.controller import Controller
from ronde.launch.controller.launch import Preflight
from ronde.launch.environments import own_environment
from ronde.launch.node import AgentNode
from ronde.launch.signals import InterruptedStartError, caught_signals
from ronde.launch.spawners.base import Spawner
from ronde.render.check_changes import tell_changes
from ronde.render.check_findings import fix_of, tell_findings, tell_unread, tell_verdict
from ronde.render.check_hostfile import tell_hostfile
from ronde.render.check_json import checked_as_json
from ronde.render.check_pages import explain_check, list_checks
from ronde.render.check_table import tabulate_hosts
from ronde.render.wrapping import WIDTH
from ronde.world.environment import select_variables

EXIT_READY = 0
EXIT_WARNED = 1
EXIT_NOT_READY = 2
EXIT_UNKNOWN = 3

_MIN_WIDTH = 60


class _Checked(NamedTuple):
    """What was found, and what comes of it."""

    examined: Collected
    judgement: Judgement
    verdict: Readiness
    exit_code: int


def run(words: Sequence[str]) -> int:
    """Check hosts, or say what is checked; return the exit code.

    Args:
        words: What stands after ``check``.

    Raises:
        UsageError: The words make no sense; nothing was started.
        LaunchError: An agent does not keep to its protocol.
    """
    try:
        return _dispatch(list(words))
    except InterruptedStartError as error:
        return 128 + error.number


def _dispatch(words: list[str]) -> int:
    if any(word in ("-h", "--help") for word in words):
        print(make_parser().format_help(), end="")
        return EXIT_READY
    match words:
        case ["list"]:
            print(list_checks(all_checks()), end="")
            return EXIT_READY
        case ["explain", name] if not name.startswith("-"):
            print(explain_check(find_check(name, all_checks(), "explain")), end="")
            return EXIT_READY
        case [("list" | "explain") as verb, *_]:
            raise UsageError(
                f"{verb} must stand with {'an id' if verb == 'explain' else 'nothing'} "
                f"behind it, got {' '.join(words)!r}. Type: ronde check --help"
            )
        case _:
            return _check(words)


def _check(words: Sequence[str]) -> int:
    environ = own_environment()
    request = read_request(make_parser().parse_args(words), environ, all_checks())
    options = request.options
    plan = plan_for(request.checks, request.settings)
    since = load_last(Path(options.since)) if options.since else None

    def make() -> Spawner:
        return make_spawner(options, environ)

    with caught_signals() as signal_fd, start_local_agent() as agent:
        hiring = AgentStarter(agent, make, options.python)
        with _progress() as tell:
            examined = collect(
                request.hosts, hiring, signal_fd, request.settings, plan, tell
            )
    checked = _judge(request, examined)
    try:
        _tell(request, checked, since)
    finally:
        # Even where nobody reads what is told.
        _write(request, checked)
    return checked.exit_code


def make_preflight(directory: str, env: dict[str, str]) -> Preflight:
    """Return what ``ronde run --preflight`` does: all checks that cost no option.

    Args:
        directory: In which ranks start.
        env: What all ranks are given.
    """
    checks = all_checks()

    def check(controller: Controller, nodes: Sequence[AgentNode]) -> tuple[str, ...]:
        settings = {"directory": directory, ENVIRONMENT: env}
        plan = plan_for(checks, settings)
        found = collect_from(controller, nodes, settings, plan, lambda _: None)
        findings = judge(Fleet(found.hosts, settings), checks).findings
        by_id = {each.id: each for each in checks}
        bad = [each for each in findings if each.severity is Severity.FAIL]
        failures = [
            *found.failures,
            *(HostFailure(e.host, Failure(e.what, fix_of(e, by_id))) for e in bad),
        ]
        if failures:
            unfit = {host for each in bad for host in each.hosts}
            unfit |= {each.host for each in found.failures}
            raise HostError(
                f"{len(unfit)} of {len(nodes)} hosts are not ready.",
                failures,
                [node.name for node in nodes if node.name not in unfit],
            )
        return tuple(
            f"{e.host}: {e.what}. {fix_of(e, by_id)}"
            for e in findings
            if e.severity is Severity.WARN
        )

    return check


def _judge(request: CheckRequest, examined: Collected) -> _Checked:
    absent = {
        each.host: {"reason": each.failure.reason, "cure": each.failure.cure}
        for each in examined.failures
    }
    fleet = Fleet(examined.hosts, {**request.settings, ABSENT: absent})
    judgement = judge(fleet, request.checks)
    names = [host.name for host in request.hosts]
    verdict = decide(names, judgement.findings, len(examined.hosts))
    code = EXIT_READY
    if not verdict.num_asked:
        code = EXIT_UNKNOWN
    elif verdict.is_faulty:
        code = EXIT_NOT_READY
    elif verdict.is_warned and request.options.strict:
        code = EXIT_WARNED
    return _Checked(examined, judgement, verdict, code)


def _tell(request: CheckRequest, checked: _Checked, since: Earlier | None) -> None:
    changes = compare(since.kept, _kept(request, checked)) if since else None
    checks = {check.id: check for check in request.checks}
    if request.options.json:
        text = checked_as_json(
            checked.examined.hosts,
            checked.judgement,
            checked.verdict,
            checks,
            exit_code=checked.exit_code,
            changes=changes,
        )
        print(text, end="")
        return
    is_coloured, width = _is_coloured(), _width()
    findings = checked.judgement.findings
    parts = [
        tabulate_hosts(
            [host.name for host in request.hosts],
            checked.judgement,
            request.checks,
            is_coloured=is_coloured,
            width=width,
        ),
        tell_findings(findings, checks, is_coloured=is_coloured, width=width),
        tell_unread(checked.judgement.unread, width),
        tell_changes(changes, since.created_at, width) if changes and since else "",
        tell_verdict(checked.verdict, findings, width),
    ]
    print("\n".join(part for part in parts if part), end="")


def _kept(request: CheckRequest, checked: _Checked) -> Kept:
    ids = tuple(check.id for check in request.checks)
    return Kept(checked.examined.hosts, checked.judgement.findings, ids)


def _write(request: CheckRequest, checked: _Checked) -> None:
    options = request.options
    if options.save:
        save(Path(options.save), _kept(request, checked))
    if options.write_hostfile:
        names = [host.name for host in request.hosts]
        good = fit_together(names, checked.verdict, is_strict=options.strict)
        text = tell_hostfile([host for host in request.hosts if host.name in good])
        try:
            Path(options.write_hostfile).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                "--write-hostfile must be a file that can be written, got "
                f"{options.write_hostfile}: {error.strerror}. Name another."
            ) from None


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """Give what tells on a terminal what is being done; at the end it is wiped."""
    is_shown = sys.stderr.isatty()

    def tell(what: str) -> None:
        if is_shown:
            sys.stderr.write(f"\r\x1b[Kronde: {what} ...")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _is_coloured() -> bool:
    """Say whether marks may have colours. Source: no-color.org."""
    variables = select_variables(("NO_COLOR", "TERM"))
    is_wanted = not variables.get("NO_COLOR") and variables.get("TERM") != "dumb"
    return is_wanted and sys.stdout.isatty()


def _width() -> int:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    return max(columns, _MIN_WIDTH)
