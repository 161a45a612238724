"""The command ``ronde``: picks the verb and turns errors into exit codes."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

import ronde
from ronde.cli.exit_codes import EXIT_INTERNAL, EXIT_INTERRUPTED, exit_code_of
from ronde.cli.standard_output import give_up_output, is_unwritten
from ronde.errors import HostError, RondeError
from ronde.launch.timeouts import USUAL, Timeouts

HELP = """\
usage: ronde VERB ...

ronde runs one training program on every GPU or CPU slot and keeps the copies in step.

verbs:
  run    start a program once for every slot of one host or of many
  bench  measure collectives and training steps; read others' results
  trace  say who waited for whom in a job, from its timeline
  check  say of every host whether it is ready, what is wrong, and what to type
  topo   show how a machine's GPUs, adapters and cores are connected, and how fast
  alias  let every Python of this environment import ronde as horovod
  horovodrun  run, with horovodrun's words

ronde VERB --help says more of a verb; ronde --version says which ronde this is.
"""

_VERBS = ("run", "bench", "trace", "check", "topo", "alias", "horovodrun")

Verb = Callable[[Sequence[str]], int]
"""Takes the words after the verb's name; returns the exit code."""


def main(argv: Sequence[str] | None = None, timeouts: Timeouts = USUAL) -> int:
    """Run one command; return the process's exit code.

    Args:
        argv: Words after the command's name; None takes this process's own.
        timeouts: How long ``run`` waits for hosts.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_fds()
    code = _code_of(words, timeouts)
    if argv is None and words[:1] in (["run"], ["horovodrun"]):
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End this process past the interpreter's own end, which takes 30 ms for nothing.

    All that ``run`` has started has ended, and nothing waits to be done at the end.
    """
    for stream in (sys.stdout, sys.stderr):
        # Who does not read any more has been noticed before.
        with suppress(OSError, ValueError):
            # There is none where a descriptor was closed.
            print(end="", file=stream, flush=True)
    os._exit(code)


def _code_of(words: list[str], timeouts: Timeouts) -> int:
    code = 0
    try:
        code = _dispatch(words, timeouts)
        # Here it can still be told that it cannot be written.
        print(end="", flush=True)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RondeError as error:
        # A terminal that was closed takes no complaint.
        with suppress(OSError):
            print(f"ronde: {error}", file=sys.stderr)
            if isinstance(error, HostError):
                print(_table_of(error), end="", file=sys.stderr)
        return exit_code_of(error)
    except OSError as error:
        from ronde.launch.limits import explain_shortage

        if said := explain_shortage(error):
            print(f"ronde: {said}", file=sys.stderr)
            return EXIT_INTERNAL
        if not is_unwritten(error):
            raise
        unwritten = give_up_output(error)
        return code or unwritten
    return code


def _dispatch(words: list[str], timeouts: Timeouts) -> int:
    match words:
        case ["--version" | "-V", *_]:
            print(f"ronde {ronde.__version__}")
        case [] | ["--help" | "-h" | "help", *_]:
            print(HELP, end="")
        case ["run", "--help" | "-h", *_]:
            from ronde.cli.run import help_text

            print(help_text(), end="")
        case ["run", *rest]:
            return _run(rest, timeouts)
        case ["horovodrun", *rest]:
            from ronde.cli.horovodrun import run_horovodrun

            return run_horovodrun(rest, partial(_run, timeouts=timeouts))
        case [("bench" | "trace" | "check" | "topo" | "alias") as verb, *rest]:
            from importlib import import_module

            run_verb: Verb = import_module(f"ronde.cli.{verb}").run
            return run_verb(rest)
        case _:
            from ronde.arguments import refuse_verb

            refuse_verb(words[0], _VERBS, "ronde")
    return 0


def _run(words: list[str], timeouts: Timeouts) -> int:
    from ronde.launch.agent_start.bootstrap import start_local_agent
    from ronde.launch.signals import caught_signals

    # First of all: the agent's start and the imports here take about equally long.
    # A signal that comes meanwhile waits in its pipe, so that nobody leaves the agent
    # alone; leaving the block closes the agent's input, which ends it, and waits.
    with caught_signals() as signal_fd, start_local_agent() as agent:
        from ronde.cli.run import run

        return run(words, agent, signal_fd, timeouts)


def _table_of(error: HostError) -> str:
    from ronde.render.hosts_table import tabulate_failures

    return tabulate_failures(error.failures, error.ready) if error.failures else ""


def _open_standard_fds() -> None:
    """Give a closed standard descriptor a place, so that no pipe takes its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
