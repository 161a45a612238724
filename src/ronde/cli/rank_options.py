"""How many ranks ``ronde run`` starts: in all, or on each host."""

import argparse

from ronde.errors import UsageError


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add ``-n`` and ``--nproc-per-node``."""
    add = parser.add_argument
    add(
        *("-n", "-np", "--num-proc"),
        dest="num_proc",
        metavar="N",
        default="auto",
        help="ranks to start, in all; auto (the default) is one a slot: a GPU, else a "
        "core",
    )
    add(
        "--nproc-per-node",
        metavar="N",
        default="auto",
        help="ranks to start on each host, instead of -n",
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
    """Return how many ranks each host is to have; None where nobody says.

    Raises:
        UsageError: It is no number, or ``-n`` says how many there are in all.
    """
    text = options.nproc_per_node
    if text == "auto":
        return None
    if options.num_proc != "auto":
        raise UsageError(
            f"--nproc-per-node must stand without -n, got {text} on each host and "
            f"{options.num_proc} in all. Drop one."
        )
    from ronde.launch.hosts.names import MAX_SLOTS, parse_number

    option = "--nproc-per-node"
    return parse_number(text, "ranks", option, lowest=1, highest=MAX_SLOTS)
