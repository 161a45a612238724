"""What ``ronde run`` starts, and how many ranks of it: in all, or on each host."""

import argparse

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_CORES, SLOTS_GPUS

_UNITS = {"gpu": SLOTS_GPUS, "cpu": SLOTS_CORES}


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
    """Return how many ranks there are to be in all; None where ``-n`` does not say.

    Raises:
        UsageError: It is no number.
    """
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

    Raises:
        UsageError: It is no number.
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
    from ronde.launch.hosts.names import MAX_SLOTS, parse_number

    option = "--nproc-per-node"
    return parse_number(text, "ranks", option, lowest=1, highest=MAX_SLOTS)
