"""``ronde horovodrun``: Horovod's command, taken for ``ronde run``.

``ronde alias --install`` writes a command ``horovodrun`` that calls it.
"""

import shlex
import sys
from collections.abc import Callable

import ronde

_HELP = """\
usage: horovodrun [-np N] [options] program [arguments]

This is ronde's horovodrun: it takes Horovod's options and starts ronde run.

  -np N                ranks to start
  -cb, --check-build   say what there is to compute with
  -v, --version        say which ronde this is

ronde run --help lists the options that do something here beyond Horovod's own.
"""

_CHECK = """\
ronde {version}, with the interface of Horovod {horovod}:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [{mpi}] MPI
    [{gloo}] Gloo

Available Tensor Operations:
    [{nccl}] NCCL
    [ ] DDL
    [ ] CCL
    [{mpi}] MPI
    [{gloo}] Gloo
    [X] shared memory"""


def run_horovodrun(words: list[str], run: Callable[[list[str]], int]) -> int:
    """Do what horovodrun does with these words; return the exit code."""
    match words:
        case [] | ["-h" | "--help", *_]:
            print(_HELP, end="")
        case ["-v" | "--version", *_]:
            print(f"ronde {ronde.__version__}, as horovodrun")
        case ["-cb" | "--check-build", *_]:
            return _check_build()
        case _:
            taken_for = shlex.join(["ronde", "run", *words]).replace("\n", "\\n")
            print(f"horovodrun: taken for {taken_for}", file=sys.stderr)
            return run(words)
    return 0


def _check_build() -> int:
    from ronde.horovod import __version__ as horovod
    from ronde.torch import features

    built = {
        "mpi": features.mpi_built(),
        "gloo": features.gloo_built(),
        "nccl": features.nccl_built(),
    }
    marks = {name: "X" if is_built else " " for name, is_built in built.items()}
    print(_CHECK.format(version=ronde.__version__, horovod=horovod, **marks))
    return 0
