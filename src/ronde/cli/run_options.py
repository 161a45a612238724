"""The options of ``ronde run``, and its help."""

import argparse

from ronde.cli.binding_options import add_binding_options
from ronde.cli.horovod_options import add_horovod_options
from ronde.cli.join_options import add_join_options
from ronde.cli.output_options import add_output_options
from ronde.cli.parser import Parser
from ronde.cli.rank_options import add_rank_options
from ronde.cli.ssh_options import add_ssh_options
from ronde.errors import UsageError
from ronde.world.engines import ALGORITHMS, ENGINES

DEFAULT_GRACE = "15s"
_NO_RESTART_CODES = "93,64"
_OTHER_NAMES = {
    "-n": ["--ntasks", "--num-processes"],
    "--nproc-per-node": ["-ppn", "-perhost", "--npernode", "--ntasks-per-node"],
    "--nodes": ["--num-nodes", "--num-machines"],
    "--hosts": ["--host", "-host", "-hosts"],
    "--hostfile": ["--machinefile", "-machinefile", "-f"],
    "--chdir": ["--wdir", "-wdir", "--wd", "-wd", "-D"],
    "--interface": ["-iface"],
}
"""What other launchers call an option that means the same here."""

_EPILOG = """\
A rank finds its place in RANK, WORLD_SIZE, LOCAL_RANK and so on (torchrun's names).
The first rank to fail ends the job: the others get SIGTERM, and after the grace all
that is left of the job is killed, whatever session it is in.

exit code: 0 when all ranks ended with 0, else the code of the rank that failed first
(128 plus the number of a signal); 130 after Ctrl-C, 143 after SIGTERM; 124 after
--timeout; 64 when the job could not start as asked; 69 when a host could not take part
or was lost; 70 when the launcher itself failed.

horovodrun's options are understood too; a script that imports horovod finds ronde,
unless Horovod itself is installed: see docs/how-to/horovod-scripts.md.

examples:
  ronde run train.py --epochs 3
  ronde run -n 4 --log-dir logs -- python -m mypackage.train
"""


class RunParser(Parser):
    """Reads the words after ``ronde run``, also as other launchers spell them."""

    def given(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the options that say something else than they do by default.

        Args:
            options: What this parser has made of the words.

        Returns:
            How each is typed, by its attribute of ``options``.
        """
        given: dict[str, str] = {}
        for action in self._actions:
            value = getattr(options, action.dest, action.default)
            is_this = action.const in (None, value)
            if action.option_strings and value != action.default and is_this:
                given[action.dest] = action.option_strings[0]
        return given

    def _refuse_foreign(self, word: str) -> None:
        # Imported where it is needed: most words are right.
        from ronde.cli.other_launchers import advise

        if advice := advise(word):
            raise UsageError(advice)


def make_parser() -> RunParser:
    """Return what reads the words after ``ronde run``."""
    parser = RunParser(
        "ronde run",
        usage="ronde run [-n N] [options] [--] program [arguments]",
        description="Start a program once for every slot of one host or of many.",
        epilog=_EPILOG,
    )
    add_rank_options(parser)
    add_horovod_options(parser)
    _add_place_options(parser)
    add_ssh_options(parser)
    _add_ending_options(parser)
    add_output_options(parser)
    add_binding_options(parser)
    _add_engine_options(parser)
    add_join_options(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    for option, names in _OTHER_NAMES.items():
        parser.alias(option, *names)
    parser.add_underscore_twins()
    return parser


def _add_place_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where and how they start").add_argument
    add("--chdir", default="", metavar="DIR", help="directory the ranks start in")
    add(
        *("-x", "--env"),
        dest="env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for all ranks, or pass it on, as NAME or 'PREFIX*'",
    )
    add(
        "--sync",
        default="",
        metavar="DIR",
        help="copy DIR to the same path on every other host first",
    )
    add(
        "--interface",
        default="",
        metavar="NAMES",
        help="network interfaces the ranks may use, as ib0,eth0 (default: by routes)",
    )
    add(
        "--master-port",
        default="0",
        metavar="PORT",
        help="port the ranks meet at (default: a free one)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="ask all hosts, print the whole plan, and start nothing",
    )
    add(
        "--preflight",
        action="store_true",
        help="check each host first, and start nothing where one is not fit",
    )
    add(
        "--nested",
        action="store_true",
        help="start a world of its own inside a rank of another",
    )
    add(
        "--no-horovod-alias",
        action="store_true",
        help="do not let ronde stand in for Horovod where that is not installed",
    )


def _add_ending_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how the job ends").add_argument
    add(
        "--timeout",
        default="",
        metavar="TIME",
        help="end the job after TIME with exit code 124 and the stacks of all ranks",
    )
    add(
        "--grace",
        default=DEFAULT_GRACE,
        metavar="TIME",
        help="between SIGTERM and SIGKILL, as 500ms, 5s or 2m (default: 15s)",
    )
    add(
        "--max-restarts",
        default="0",
        metavar="R",
        help="start all ranks again, up to R times, when one fails or a host is lost",
    )
    add(
        "--no-restart-codes",
        default=_NO_RESTART_CODES,
        metavar="CODES",
        help="exit codes after which they are not (default: 93,64)",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how tensors move").add_argument
    add(
        "--engine",
        default="",
        metavar="NAME",
        help=f"what moves the tensors: {', '.join(ENGINES)} (default: auto)",
    )
    add(
        "--algorithm",
        default="",
        metavar="NAME",
        help=f"schedule of --engine scheduled, and of hierarchical between hosts: "
        f"{', '.join(ALGORITHMS)}; the others have none",
    )
    add(
        "--timeline",
        default="",
        metavar="FILE",
        help="write what all ranks did and who waited for whom to FILE, a trace for "
        "Perfetto and ronde trace; packed where it ends in .gz",
    )
    add(
        "--timeline-limit",
        default="",
        metavar="SIZE",
        help="of that file; what is oldest is left out (default: 32MiB)",
    )
