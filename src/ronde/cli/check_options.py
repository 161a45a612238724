"""The options of ``ronde check``, its help, and what they ask for."""

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ronde.arguments import Parser
from ronde.check.check import Check, Family
from ronde.check.cluster.hosts import TAKING_PART
from ronde.check.facts import ENVIRONMENT, Value
from ronde.cli.host_options import add_host_options, find_hosts
from ronde.cli.ssh_options import add_ssh_options
from ronde.errors import UsageError
from ronde.launch.environments import select_forwarded
from ronde.launch.hosts.host import Host
from ronde.launch.hosts.hostfile import MAX_SLOTS, parse_number
from ronde.launch.program import absolute_path
from ronde.units import parse_duration_s

WAYS = ("auto", "tcp", "gloo", "nccl")
_MAX_BURN_S = 24 * 3600.0

_EPILOG = """\
verbs:
  ronde check list          what is checked, a line each
  ronde check explain ID    all about one check

In the table: ok, ! warning, x not ready, ? could not be read, - nothing to check.
What could not be read is listed and is no fault.

exit code: 0 all hosts are ready, 1 warnings, with --strict, 2 a host is not ready, or
two are not together, 3 no host could be asked, 64 bad words, 130 after Ctrl-C.

examples:
  ronde check                                     this machine
  ronde check -H node[1-8] --path /data --write-hostfile good.txt
  ronde run --hostfile good.txt train.py
"""


class CheckRequest(NamedTuple):
    """What is to be checked.

    Attributes:
        options: As they were parsed.
        hosts: Those to be asked, at least one.
        settings: For probes and checks; see ``Reading``.
        checks: To be made, at least one.
    """

    options: argparse.Namespace
    hosts: tuple[Host, ...]
    settings: dict[str, Value]
    checks: tuple[Check, ...]


def make_parser() -> Parser:
    """Return what reads the words after ``ronde check``."""
    parser = Parser(
        "ronde check",
        usage="ronde check [-H HOSTS | --hostfile FILE] [options]",
        description="Say of every host whether it is ready for training, what is "
        "wrong, and what to type.",
        epilog=_EPILOG,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this and exit")
    add_host_options(parser)
    add_ssh_options(parser)
    _add_subject(parser)
    _add_measurements(parser)
    _add_output(parser)
    return parser


def _add_subject(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", metavar="N", help="ranks that are to run on each host")
    add(
        "--chdir",
        default="",
        metavar="DIR",
        help="folder that ranks are to start in, as for ronde run; else this one",
    )
    add(
        "--path",
        action="append",
        default=[],
        metavar="DIR",
        help="folder that all hosts must share; may stand several times",
    )
    add(
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="file that must be equal on all hosts; may stand several times",
    )
    add(
        "--port",
        action="append",
        default=[],
        metavar="PORT",
        help="port that must be free on all hosts and reached from all, such as "
        "--master-port's; may stand several times",
    )
    add(
        "--only",
        action="append",
        metavar="NAME[,NAME]",
        help="make these checks alone: families or ids of ronde check list",
    )
    add(
        "--skip",
        action="append",
        metavar="NAME[,NAME]",
        help="leave these out",
    )


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    """Add what takes time, or leaves traces for a moment."""
    add = parser.add_argument
    add(
        "--burn",
        default="0",
        metavar="TIME",
        help="also multiply matrices that long, as 30s: results must be equal, and "
        "speeds alike; GPUs copy as well",
    )
    add(
        "--bandwidth",
        nargs="?",
        const="auto",
        default="",
        choices=WAYS,
        metavar="WAY",
        help="also measure what goes through between hosts, pair by pair: tcp, or what "
        "ronde bench reaches by gloo or nccl; auto takes nccl where all hosts have it, "
        "else tcp",
    )
    add(
        "--storage-speed",
        action="store_true",
        help="also write 64 MiB and 1000 small files into each --path, and remove them",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--strict", action="store_true", help="end with 1 where there are warnings")
    add("--json", action="store_true", help="print one object of JSON")
    add(
        "--save",
        default="",
        metavar="FILE",
        help="append all facts and findings to FILE, a line of JSON a run",
    )
    add(
        "--since",
        default="",
        metavar="FILE",
        help="say what has changed since the last run that was saved there",
    )
    add(
        "--write-hostfile",
        default="",
        metavar="FILE",
        help="write the hosts that are ready to FILE, for ronde run --hostfile",
    )


def read_request(
    options: argparse.Namespace, environ: Mapping[str, str], checks: Sequence[Check]
) -> CheckRequest:
    """Return what the options ask for.

    Args:
        options: From ``make_parser``.
        environ: This process's environment.
        checks: All that there are.

    Raises:
        UsageError: It cannot be.
    """
    chosen = _choose(options, checks)
    hosts = find_hosts(options, environ)
    settings: dict[str, Value] = {
        "directory": str(absolute_path(options.chdir)),
        "paths": [_absolute(path) for path in options.path],
        "files": [_absolute(path) for path in options.file],
        "ports": [
            parse_number(port, "port", "--port", lowest=1, highest=65535)
            for port in options.port
        ],
        ENVIRONMENT: select_forwarded(environ),
        "burn_s": _burn_s(options.burn),
        "bandwidth": options.bandwidth,
        "storage_speed": options.storage_speed,
    }
    if options.ranks is not None:
        settings["num_ranks"] = parse_number(
            options.ranks, "ranks", "--ranks", lowest=1, highest=MAX_SLOTS
        )
    elif any(host.slots > 0 for host in hosts):
        settings["num_ranks"] = max(host.slots for host in hosts)
    if options.storage_speed and not options.path:
        raise UsageError(
            "--storage-speed must have a --path to write to, got none. Name a folder."
        )
    for option in ("save", "write_hostfile"):
        _require_writable(getattr(options, option), f"--{option.replace('_', '-')}")
    return CheckRequest(options, hosts, settings, chosen)


def find_check(name: str, checks: Sequence[Check], said_by: str) -> Check:
    """Return the check of an id.

    Raises:
        UsageError: There is none.
    """
    found = [check for check in checks if check.id == name]
    if found:
        return found[0]
    raise _unknown(name, [check.id for check in checks], said_by, "a check's id")


def _choose(options: argparse.Namespace, checks: Sequence[Check]) -> tuple[Check, ...]:
    only = _names("--only", options.only, checks)
    skipped = _names("--skip", options.skip, checks)
    chosen = tuple(
        check
        for check in checks
        # A host that does not answer is no answer to any question.
        if not only or check.id == TAKING_PART or {check.id, check.family} & only
        if not {check.id, check.family} & skipped
    )
    if not chosen:
        raise UsageError(
            "--skip must leave a check to be made, got all of them. Drop a name."
        )
    return chosen


def _names(
    option: str, given: Sequence[str] | None, checks: Sequence[Check]
) -> frozenset[str]:
    known = [*Family, *(check.id for check in checks)]
    names = [n.strip() for text in given or () for n in text.split(",") if n.strip()]
    for name in names:
        if name not in known:
            raise _unknown(name, known, option, "a family or a check's id")
    return frozenset(names)


def _unknown(name: str, known: Sequence[str], said_by: str, kind: str) -> UsageError:
    likely = get_close_matches(name, known, n=1)
    cure = f"Type: {likely[0]}" if likely else "Type: ronde check list"
    return UsageError(f"{said_by} must name {kind}, got {name!r}. {cure}")


def _burn_s(text: str) -> float:
    try:
        burn_s = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--burn: {error}") from None
    if burn_s > _MAX_BURN_S:
        raise UsageError(f"--burn must be at most a day, got {text}. Give less.")
    return burn_s


def _absolute(path: str) -> str:
    if not path:
        raise UsageError("--path and --file must name something, got ''. Name it.")
    return str(absolute_path(path))


def _require_writable(text: str, option: str) -> None:
    """Refuse what cannot be written before anything starts."""
    path = Path(text)
    place = path if path.exists() else path.parent
    if text and (path.is_dir() or not os.access(place, os.W_OK)):
        raise UsageError(
            f"{option} must be a file that can be written, got {text}. Name another."
        )
