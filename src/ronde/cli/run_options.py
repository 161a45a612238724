"""The options of ``ronde run``, its help, and what their words mean.

Every run loads this; what listens, connects or places ranks is loaded by those that do.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ronde.arguments import Parser
from ronde.cli.horovod_options import add_horovod_options
from ronde.cli.host_options import read_slots
from ronde.cli.output_options import add_output_options
from ronde.cli.ssh_options import add_ssh_options
from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_CORES, SLOTS_GPUS, Host, take_each
from ronde.world.environment import ALGORITHMS, ENGINES

if TYPE_CHECKING:
    from ronde.launch.placement.placement import PlacementRequest

_UNITS = {"gpu": SLOTS_GPUS, "cpu": SLOTS_CORES}
_RELAXED = "best-effort"
_TOKEN_VARIABLE = "RONDE_TOKEN_FILE"  # noqa: S105 - a name, and of a file at that
# Options of ronde run, by their attributes.
_OF_JOINING = ("token_file", "join_timeout")
_OF_A_NODE = ("agent", "token_file", "join_timeout", "slots", "nproc_per_node")
_JOINED = "the nodes are those that join"
_NOT_REACHED = "the nodes join by themselves, and nothing is started there from here"
_OF_OTHER_HOSTS = {
    "hosts": _JOINED,
    "hostfile": _JOINED,
    "host_discovery_script": _JOINED,
    "standalone": "nodes that join make several hosts",
    "launcher": _NOT_REACHED,
    "ssh_args": _NOT_REACHED,
    "ssh-port": _NOT_REACHED,
    "ssh-identity-file": _NOT_REACHED,
    "python": "each node runs the Python that its own ronde run is started with",
    "sync": "a node that joins must have the directory already",
}
"""What names or reaches other hosts, and why that is for nothing where nodes join."""
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


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add ``-n``, ``--nproc-per-node`` and ``-m``."""
    add = parser.add_argument_group("ranks").add_argument
    add(
        *("-n", "-np", "--num-proc"),
        dest="num_proc",
        metavar="N",
        default="auto",
        help="ranks in all (default: auto, one per slot: a GPU, else a core)",
    )
    add(
        "--nproc-per-node",
        metavar="N",
        default="auto",
        help="ranks per host: a number, gpu or cpu; with -n, the most that a host gets",
    )
    add(
        *("-m", "--module"),
        action="store_true",
        help="program is a Python module, run as python -m does",
    )


def read_num_ranks(options: argparse.Namespace) -> int | None:
    """Return how many ranks there are to be in all; None where ``-n`` does not say."""
    text = options.num_proc
    if text == "auto":
        return None
    if not text.isdecimal() or not text.isascii() or int(text) < 1:
        raise UsageError(
            f"-n must be auto or a whole number of at least 1, got {text!r}. "
            "Type: ronde run -n 2 ..."
        )
    return int(text)


def read_num_each(options: argparse.Namespace) -> int | None:
    """Return how many ranks each host may have; None where nobody says.

    It may be ``SLOTS_GPUS`` or ``SLOTS_CORES``.
    """
    text = options.nproc_per_node
    if text == "auto":
        return None
    if text in _UNITS:
        return _UNITS[text]
    if not text.isdecimal() or not text.isascii():
        raise UsageError(
            "--nproc-per-node must be auto, gpu, cpu or a whole number of at least 1, "
            f"got {text!r}. Type: ronde run --nproc-per-node 2 ..."
        )
    from ronde.launch.hosts.hostfile import MAX_SLOTS, parse_number

    option = "--nproc-per-node"
    return parse_number(text, "ranks", option, lowest=1, highest=MAX_SLOTS)


def add_binding_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--bind``, ``--bind-policy`` and ``--gpu-view``."""
    add = parser.add_argument_group("binding").add_argument
    add(
        "--bind",
        metavar="HOW",
        default="none",
        help="bind each rank to: core (own cores near its GPU, else an even part "
        "of all), numa (the memory node near its GPU), auto (what helps "
        "there) or none (default: none)",
    )
    add(
        "--bind-policy",
        metavar="POLICY",
        default=_RELAXED,
        help="when a rank's cores and GPU are not near the same memory: "
        "best-effort starts it anyway, restricted starts nothing unless its "
        "cores need several memory nodes, single-numa-node starts nothing "
        "(default: best-effort)",
    )
    add(
        "--gpu-view",
        metavar="WHICH",
        default="all",
        help="GPUs that a rank sees: all, its own being number LOCAL_RANK, or "
        "one, its own (default: all)",
    )


def read_placement(options: argparse.Namespace) -> "PlacementRequest | None":
    """Return what the options ask for; None where that is nothing."""
    asked = (options.bind, options.gpu_view, options.bind_policy, options.dry_run)
    if asked == ("none", "all", _RELAXED, False):
        return None
    # Imported where they are needed: a job that is not bound must start at once.
    from ronde.launch.placement.placement import BindMode, GpuView, PlacementRequest
    from ronde.topology.placement.policies import Policy

    policies = [policy for policy in Policy if policy is not Policy.NONE]
    policy = _one_of("--bind-policy", options.bind_policy, policies)
    if options.bind == "none" and policy != _RELAXED:
        raise UsageError(
            f"--bind-policy {policy} must come with --bind core, numa or auto, got "
            f"--bind none. Type: --bind numa --bind-policy {policy}"
        )
    mode = _one_of("--bind", options.bind, list(BindMode))
    view = _one_of("--gpu-view", options.gpu_view, list(GpuView))
    return PlacementRequest(BindMode(mode), GpuView(view), Policy(policy))


def _one_of(option: str, word: str, words: Sequence[str]) -> str:
    if word not in words:
        raise UsageError(
            f"{option} must be {', '.join(words[:-1])} or {words[-1]}, got {word!r}. "
            f"Type: {option} {words[0]}"
        )
    return word


def add_join_options(parser: argparse.ArgumentParser) -> None:
    """Add what makes a run the head of others, or one of the others."""
    add = parser.add_argument_group("nodes that join by themselves").add_argument
    add(
        "--listen",
        metavar="[ADDR:]PORT",
        default="",
        help="wait there until as many nodes as --nodes says have joined",
    )
    add(
        "--agent",
        metavar="HEAD:PORT",
        default="",
        help="join the run that listens there, with --slots of this node's own",
    )
    add(
        "--token-file",
        metavar="FILE",
        default="",
        help="file with the secret of all nodes; - is standard input "
        f"(default: ${_TOKEN_VARIABLE})",
    )
    add(
        "--join-timeout",
        metavar="TIME",
        default="5m",
        help="how long head and nodes wait for each other (default: 5m)",
    )


def require_listen_or_agent(
    options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    """Refuse options that would change nothing where nodes join, or where none do."""
    how = "--listen" if options.listen else "--agent" if options.agent else ""
    if options.listen and options.agent:
        raise UsageError("--agent must stand without --listen, got both. Drop one.")
    for option, name in given.items():
        if not how and option in _OF_JOINING:
            raise UsageError(
                f"{name} must come with --listen or --agent, got neither. Type: ronde "
                "run --nodes 3 --listen 29400 ..."
            )
        if how and option in _OF_OTHER_HOSTS:
            raise UsageError(
                f"{name} must stand without {how}, got both: "
                f"{_OF_OTHER_HOSTS[option]}. Drop one."
            )
        if options.agent and option not in _OF_A_NODE:
            raise UsageError(
                f"{name} must be given to the head alone, got it with --agent. Drop it "
                "here, and give it to ronde run --listen."
            )


def own_slots(options: argparse.Namespace) -> int:
    """Return how many ranks this node takes."""
    node = Host("this node", read_slots(options), said_at="--slots")
    return take_each([node], read_num_each(options))[0].slots


def token_file(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return where the user says that the token is."""
    path = options.token_file or environ.get(_TOKEN_VARIABLE, "")
    if not path:
        raise UsageError(
            "--token-file must name a file with the secret that all nodes share, got "
            "none. Make one: (umask 077; openssl rand -hex 32 > token)"
        )
    return path


def join_timeout_s(options: argparse.Namespace) -> float:
    """Read ``--join-timeout``."""
    from ronde.units import parse_duration_s

    try:
        return parse_duration_s(options.join_timeout)
    except ValueError as error:
        raise UsageError(f"--join-timeout: {error}") from None


def say(text: str) -> None:
    """Tell the user something that ends nothing."""
    print(f"ronde: {text}", file=sys.stderr, flush=True)


class RunParser(Parser):
    """Reads the words after ``ronde run``, also as other launchers spell them."""

    def given(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the options that say something else than they do by default.

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
