"""The options of ``ronde run``, and its help."""

import argparse

from ronde.arguments import Parser
from ronde.cli.binding_options import add_binding_options
from ronde.cli.horovod_options import add_horovod_options
from ronde.cli.join_options import add_join_options
from ronde.cli.output_options import add_output_options
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
Each rank finds its place in RANK, WORLD_SIZE, LOCAL_RANK and so on, as under torchrun.
The first rank to fail ends the job: the others get SIGTERM, and after --grace every
process of the job that is left is killed. Ctrl-\\ shows the stacks of all ranks.

exit code: 0 if all ranks ended with 0, else the code of the rank that failed first (128
plus the number of a signal); 130 after Ctrl-C, 143 after SIGTERM, 124 after --timeout;
64 if the job cannot start as asked; 69 if a host cannot take part or was lost; 70 if
the launcher itself failed.

Options of horovodrun, and common ones of torchrun and mpirun, work too: see
docs/launching.md. import horovod finds ronde unless Horovod is installed.

examples:
  ronde run train.py --epochs 3
  ronde run -n 4 --log-dir logs -m mypackage.train
  ronde run -H node1:8,node2:8 train.py
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
    add = parser.add_argument_group("start").add_argument
    add("--chdir", default="", metavar="DIR", help="working directory of the ranks")
    add(
        *("-x", "--env"),
        dest="env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set or forward a variable for all ranks: NAME=VALUE, NAME or 'PREFIX*'",
    )
    add(
        "--sync",
        default="",
        metavar="DIR",
        help="first copy DIR to the same path on every other host",
    )
    add(
        "--interface",
        default="",
        metavar="NAMES",
        help="network interfaces for the ranks, as ib0,eth0 (default: by routes)",
    )
    add(
        "--master-port",
        default="0",
        metavar="PORT",
        help="MASTER_PORT, where programs that call init_process_group() themselves "
        "meet (default: a free one)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="ask all hosts, show the whole plan, start nothing",
    )
    add(
        "--preflight",
        action="store_true",
        help="check every host first; start nothing if one is unfit",
    )
    add(
        "--nested",
        action="store_true",
        help="start a separate world inside a rank of another",
    )
    add(
        "--horovod-alias",
        action=argparse.BooleanOptionalAction,
        help="have import horovod find ronde even where Horovod is installed; with "
        "--no-, never (default: where Horovod is not installed)",
    )
    add(
        "--no-malloc-tuning",
        action="store_true",
        help="let CPU ranks return freed memory to the kernel at once, as C's "
        "allocator does by default",
    )


def _add_ending_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("end").add_argument
    add(
        "--timeout",
        default="",
        metavar="TIME",
        help="end the job after TIME, as 30m or 2h: shows the stacks of all "
        "ranks; exit code 124",
    )
    add(
        "--grace",
        default=DEFAULT_GRACE,
        metavar="TIME",
        help="time from SIGTERM to SIGKILL, as 500ms, 5s or 2m (default: 15s)",
    )
    add(
        "--max-restarts",
        default="0",
        metavar="R",
        help="start all ranks again up to R times when one fails or a host is lost",
    )
    add(
        "--no-restart-codes",
        default=_NO_RESTART_CODES,
        metavar="CODES",
        help="exit codes after which nothing is restarted (default: 93,64)",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tensors").add_argument
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
        help="schedule of the engines scheduled and hierarchical: "
        f"{', '.join(ALGORITHMS)}",
    )
    add(
        "--timeline",
        default="",
        metavar="FILE",
        help="write a trace of all ranks to FILE, for Perfetto and ronde trace; "
        "gzipped if it ends in .gz",
    )
    add(
        "--timeline-limit",
        default="",
        metavar="SIZE",
        help="largest size of that file; the oldest entries go first (default: 32MiB)",
    )
