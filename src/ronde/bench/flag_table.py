"""The flags of ``ronde bench``, with what its help says of each."""

import argparse

USAGE = """\
ronde bench COLLECTIVE [options]
       ronde bench train --model NAME [options]
       ronde bench read LOG...
       ronde bench compare A B"""

EPILOG = """\
collectives: all_reduce all_gather reduce_scatter broadcast reduce alltoall alltoallv
gather scatter sendrecv hypercube; nccl-tests' names, as all_reduce_perf, do too.

Without a launcher it starts -t x -g ranks on this machine; inside ronde run, torchrun
or mpirun it joins the ranks that are there.

exit code: 0 when all went well, 1 for a fault of ronde's own, 2 of CUDA, 3 of the
engine, 4 when -T ran out, 5 for what cannot be had here, 6 for what cannot be, 7 for
wrong values or less bandwidth than NCCL_TESTS_MIN_BW asks for; 130 after Ctrl-C.

examples:
  ronde bench all_reduce -g 2 -b 4 -e 64M -f 4
  ronde bench all_reduce -g 2 -b 1K -e 16M -f 4 --compare gloo,shared_memory
  ronde run -n 4 -- ronde bench alltoall -b 1M -e 16M -f 2 -J alltoall.json
"""

_SWEEP = (
    ("b", "minbytes", "32M", "first size, as 8, 4K or 1G"),
    ("e", "maxbytes", "32M", "last size"),
    ("i", "stepbytes", "1M", "added from row to row, unless -f is above 1"),
    ("f", "stepfactor", "1", "multiplies from row to row where it is above 1"),
    ("r", "root", "0", "root; -1 or all takes each rank in turn"),
)
_LOOP = (
    ("n", "iters", "20", "timed iterations"),
    ("m", "agg_iters", "1", "operations an iteration"),
    ("w", "warmup_iters", "1", "untimed operations of every size, before the sweep"),
    ("N", "run_cycles", "1", "whole sweeps; 0 goes on until Ctrl-C or --duration"),
    ("c", "check", "1", "verified operations of each row; 0 for none"),
    ("z", "blocking", "0", "1: wait and barrier after each; 2: wait; 3: an iteration"),
    ("a", "average", "1", "times over ranks: 0 rank 0's, 1 mean, 2 least, 3 greatest"),
    ("T", "timeout", "0", "seconds for one synchronisation, then exit code 4"),
    ("u", "unalign", "0", "elements by which buffers are shifted"),
    ("I", "per_iter_timing", "0", "1 times each iteration too"),
    ("K", "per_iter_skip", "0", "iterations that -I leaves out of its summary"),
)
_OUTPUT = (
    ("C", "report_cputime", "0", "1 shows the time in which the calls returned"),
    ("S", "report_timestamps", "0", "1 ends each row with the time of day"),
    ("M", "memory", "0", "1 says at the end how much memory was used"),
    ("J", "output_file", "", "file for nccl-tests' JSON; must end in .json"),
)
_RANKS = (
    ("t", "nthreads", "1", "with -g, ranks to start: t x g"),
    ("g", "ngpus", "1", "see -t"),
)
_NCCL = (
    ("x", "cta_policy", "", "NCCL's CTA policy: 0, 1 or 2"),
    ("y", "stream_null", "0", "accepted: operations are on the current stream"),
    ("p", "parallel_init", "0", "ignored"),
    ("V", "device_cta_count", "16", "ignored"),
    ("G", "cudagraph", "0", "refused above 0"),
    ("R", "local_register", "0", "refused above 0"),
    ("D", "device_implementation", "0", "refused above 0"),
)
_GROUPS = (
    ("what is measured", _SWEEP),
    ("how", _LOOP),
    ("what is told", _OUTPUT),
    ("who takes part", _RANKS),
    ("for NCCL", _NCCL),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags; every value is text, so that what is wrong can be quoted."""
    for title, flags in _GROUPS:
        group = parser.add_argument_group(f"{title} (nccl-tests' flags)")
        for letter, name, default, told in flags:
            shown = f" (default: {default})" if default else ""
            group.add_argument(
                *(f"-{letter}", f"--{name}"),
                default=default,
                metavar=letter.upper(),
                help=told + shown,
            )
    _add_names(parser)
    _add_engines(parser)
    _add_output(parser)
    parser.add_argument("--parent", default="", help=argparse.SUPPRESS)


def _add_names(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("types and operations")
    group.add_argument(
        *("-d", "--datatype", "--dtype"),
        default="float",
        metavar="NAME",
        help="nccl-tests' name, torch's, or all (default: float)",
    )
    group.add_argument(
        *("-o", "--op"),
        default="sum",
        metavar="NAME",
        help="sum, prod, max, min, avg, mulsum or all (default: sum)",
    )


def _add_engines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    add = group.add_argument
    add("--engine", default="auto", metavar="NAME", help="what moves the bytes")
    add("--algorithm", default="", metavar="NAME", help="the schedule it follows")
    add("--compare", metavar="A,B", help="set engines side by side, taking turns")
    add("--rounds", default="5", metavar="N", help="turns of --compare (default: 5)")
    add("--device", default="auto", metavar="D", help="cpu or cuda")
    add(
        "--foreign",
        action="store_true",
        help="measure tensors that are not in the engine's own memory",
    )
    add(
        "--share-gpu",
        action="store_true",
        help="let all ranks use one GPU: each is shown to NCCL as a host of its own",
    )
    add("--tune", action="store_true", help="write the table that auto chooses by")
    add("--explain", action="store_true", help="say what auto chooses, and why")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("further output and control")
    add = group.add_argument
    add("--json", default="", metavar="FILE", help="append a record to FILE")
    add("--plot", default="", metavar="FILE", help="draw FILE.svg or FILE.png")
    add(
        "--limit",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="find the physical bound, and add a column %%limit (default: on)",
    )
    add(
        "--link-rate",
        default="0",
        metavar="GB/S",
        help="what the link between hosts carries, where the system does not tell",
    )
    add("--duration", default="0", metavar="TIME", help="end a soak, as 30s or 2h")
    add(
        "--lenient",
        action="store_true",
        help="ignore flags that cannot be honoured here instead of refusing them",
    )
