"""The command ``horovodrun``, for scripts and fingers that know it: ``ronde run``."""

import shlex
import sys
from collections.abc import Sequence

import ronde
from ronde.cli.entry import main as ronde_main

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


def main(argv: Sequence[str] | None = None) -> int:
    """Do what horovodrun does; return the exit code.

    Args:
        argv: Words after the command's name; None takes this process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
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
            return ronde_main(["run", *words])
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
