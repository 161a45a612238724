"""The command ``ronde``: choose the verb, and turn errors into exit codes."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import ronde
from ronde.cli import exits
from ronde.errors import HostError, RondeError
from ronde.launch.limits import USUAL, Timeouts

_TOOLS = (
    *("ps", "top", "why", "profile"),
    *(
        "bench",
        "trace",
        "check",
        "topo",
        "plan",
        "serve",
        "kubernetes",
        "alias",
        "completion",
    ),
)
VERBS = ("run", *_TOOLS, "horovodrun")


def main(argv: Sequence[str] | None = None, timeouts: Timeouts = USUAL) -> int:
    """Run one command and return its exit code.

    Without ``argv``, run this process's own command line and then end the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_fds()
    code = _code_of(words, timeouts)
    if argv is None and words[:1] != ["bench"]:
        # Skip the interpreter's shutdown, which takes 30 ms: all that was started has
        # ended. Not for bench: torch may have threads, and files to remove.
        for stream in (sys.stdout, sys.stderr):
            # None if the descriptor was closed.
            with suppress(OSError, ValueError):
                print(end="", file=stream, flush=True)
        os._exit(code)
    return code


def _code_of(words: list[str], timeouts: Timeouts) -> int:
    code = 0
    try:
        code = _dispatch(words, timeouts)
        # Here a failure to write can still be reported.
        if sys.stdout:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return exits.EXIT_INTERRUPTED
    except RondeError as error:
        # The terminal may have been closed.
        with suppress(OSError):
            print(f"ronde: {error}", file=sys.stderr)
            if isinstance(error, HostError) and error.failures:
                from ronde.render.job import tabulate_failures

                table = tabulate_failures(error.failures, error.ready)
                print(table, end="", file=sys.stderr)
        return exits.exit_code_of(error)
    except OSError as error:
        from ronde.launch.bootstrap import explain_shortage

        if shortage := explain_shortage(error):
            print(f"ronde: {shortage}", file=sys.stderr)
            return exits.EXIT_INTERNAL
        if not exits.is_unwritten(error):
            raise
        unwritten = exits.give_up_output(error)
        return code or unwritten
    return code


def _dispatch(words: list[str], timeouts: Timeouts) -> int:
    match words:
        case ["--version" | "-V", *_]:
            print(f"ronde {ronde.__version__}")
        case [] | ["--help" | "-h" | "help", *_]:
            from ronde.cli.help import HELP

            print(HELP, end="")
        case ["run", "--help" | "-h", *_]:
            from ronde.cli.help import RUN_HELP

            print(RUN_HELP, end="")
        case ["run", *rest]:
            return _run(rest, timeouts)
        case ["horovodrun", *rest]:
            from ronde.cli.horovodrun import run_horovodrun

            return run_horovodrun(rest, partial(_run, timeouts=timeouts))
        case [verb, *rest] if verb in _TOOLS:
            from importlib import import_module

            run_verb: Callable[..., int] = import_module(f"ronde.cli.{verb}").run
            takes_timeouts = verb in ("check", "profile")
            return run_verb(rest, timeouts) if takes_timeouts else run_verb(rest)
        case _:
            from ronde.arguments import refuse_verb

            refuse_verb(words[0], VERBS, "ronde")
    return 0


def _run(words: list[str], timeouts: Timeouts) -> int:
    from ronde.launch.bootstrap import start_local_agent
    from ronde.launch.signals import caught_signals

    # Start the agent first: this and the imports here take about equally long. A
    # signal that arrives meanwhile waits in its pipe, so the agent is never left alone:
    # leaving the block closes the agent's input, which ends it, and waits.
    with caught_signals() as signal_fd, start_local_agent(has_input=True) as agent:
        from ronde.cli.run import run

        return run(words, agent, signal_fd, timeouts)


def _open_standard_fds() -> None:
    """Open closed standard descriptors, so that no pipe gets their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
