"""What a benchmark is asked to do: nccl-tests' flags and ours, as values; no torch.

Every flag of nccl-tests is honoured, ignored with a line that says so, or refused.
"""

import argparse
from argparse import BooleanOptionalAction
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ronde.arguments import Parser
from ronde.bench.catalog import (
    Collective,
    DType,
    find_collective,
    parse_dtypes,
    parse_ops,
)
from ronde.errors import UsageError
from ronde.units import parse_duration_s, parse_size_bytes


class Exit(IntEnum):
    """The exit code of ``ronde bench``."""

    OK = 0
    INTERNAL = 1
    CUDA = 2
    ENGINE = 3
    TIMEOUT = 4
    UNSUPPORTED = 5
    USAGE = 6
    FAILED = 7
    """Wrong values, or less bandwidth than was asked for."""
    INTERRUPTED = 130


class UnsupportedError(UsageError):
    """What was asked for makes sense, but not here: exit code 5."""


ALL_ROOTS = -1


@dataclass(frozen=True, slots=True)
class Sweep:
    """Which rows there are."""

    min_bytes: int  # the first size
    max_bytes: int  # no size is above it
    step_bytes: int  # added from row to row, unless ``factor`` is above 1
    factor: int  # multiplies from row to row where it is above 1
    dtypes: tuple[DType, ...]
    ops: tuple[str, ...]  # operations; within each type
    root: int  # the root, or ``ALL_ROOTS``; innermost

    def sizes(self) -> Iterator[int]:
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size * self.factor if self.factor > 1 else size + self.step_bytes

    def roots(self, test: Collective, size: int) -> list[int]:
        """Return the roots to take in turn, -1 where there is none."""
        if not test.has_root:
            return [-1]
        return list(range(size)) if self.root == ALL_ROOTS else [self.root]


@dataclass(frozen=True, slots=True)
class Loop:
    """How one row is measured."""

    iterations: int = 20  # timed iterations
    aggregated: int = 1  # operations an iteration
    warmup: int = 1  # untimed operations before a sweep, for every size
    checks: int = 1  # verified operations for each size and place
    cycles: int = 1  # whole sweeps; 0 goes on until it is stopped
    blocking: int = 0
    average: int = 1
    is_cpu_time: bool = False  # show the time that the calls took to return
    is_each_timed: bool = False  # time each iteration too
    skipped: int = 0  # iterations that the summary of those leaves out
    unaligned_by: int = 0  # elements by which buffers are shifted
    duration_s: float = 0.0  # when to stop; 0 for never
    # how long one synchronisation may take; 0 for as long as it likes
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a run, and where."""

    has_timestamps: bool = False  # every row ends with the time of day
    has_memory: bool = False  # say at the end how much memory was used
    has_limit: bool = True  # find the physical bound and say how near to it each row is
    # what a link carries, where the system does not tell; 0 asks
    link_rate_gb_per_s: float = 0.0
    json_path: str = ""  # file for nccl-tests' JSON, or empty
    record_path: str = ""  # file that a record is appended to, or empty
    plot_path: str = ""  # file for a drawing, or empty


@dataclass(frozen=True, slots=True)
class Engines:
    """What moves the bytes."""

    names: tuple[str, ...] = ("auto",)
    algorithm: str = ""  # the schedule, or empty
    device: str = "auto"  # ``cpu``, ``cuda`` or ``auto``
    is_foreign: bool = False  # measure tensors that are not in the engine's own memory
    rounds: int = 5  # how often engines that are compared take turns


@dataclass(frozen=True, slots=True)
class Options:
    """All that was asked for."""

    test: Collective
    sweep: Sweep
    loop: Loop  # how each is measured
    shown: Shown  # what is shown
    engines: Engines  # what moves the bytes
    num_threads: int = 1  # nccl-tests' threads a process
    num_gpus: int = 1  # nccl-tests' GPUs a thread
    is_compared: bool = False  # set engines side by side
    is_gpu_shared: bool = False  # all ranks use one GPU
    is_tuned: bool = False  # write the table that ``auto`` chooses by
    is_explained: bool = False  # say what ``auto`` chooses, and why
    is_measured: bool = True  # a collective was named
    is_lenient: bool = False  # ignore what is not supported here
    ignored: tuple[str, ...] = ()  # flags that have no effect, as the user wrote them
    needing_cuda: tuple[str, ...] = ()
    cta_policy: str = ""  # for NCCL, or empty
    # where this process is one of several that ``ronde bench`` started: ``terminal`` or
    # ``pipe``, whatever the user looks at; else empty
    parent: str = ""
    words: tuple[str, ...] = ()  # the command line

    @property
    def has_terminal(self) -> bool:
        """Whether the user, as seen by whoever started this rank, is at a terminal."""
        return self.parent == "terminal"

    @property
    def num_self_launched(self) -> int:
        """Ranks that it starts itself where no launcher has done so."""
        return self.num_threads * self.num_gpus


USAGE = """\
ronde bench COLLECTIVE [options]
       ronde bench train --model NAME [options]
       ronde bench read LOG...
       ronde bench compare A B"""

EPILOG = """\
collectives: all_reduce all_gather reduce_scatter broadcast reduce alltoall alltoallv
gather scatter sendrecv hypercube, or nccl-tests' names, such as all_reduce_perf

Without a launcher it starts -t x -g ranks on this machine. Under ronde run, torchrun
or mpirun it joins their ranks.

exit code: 0 success; 1 a fault of ronde; 2 CUDA; 3 the engine; 4 -T expired;
5 not supported here; 6 a bad command line; 7 wrong values, or less bandwidth than
NCCL_TESTS_MIN_BW; 130 Ctrl-C.

examples:
  ronde bench all_reduce -g 2 -b 4 -e 64M -f 4
  ronde bench all_reduce -g 2 -b 1K -e 16M -f 4 --compare gloo,shared_memory
  ronde run -n 4 -- ronde bench alltoall -b 1M -e 16M -f 2 -J alltoall.json
"""

# Letter, long name, default, help.
_NCCL_TESTS_FLAGS = {
    "rows": (
        ("b", "minbytes", "32M", "first size, as 8, 4K or 1G"),
        ("e", "maxbytes", "32M", "last size"),
        ("i", "stepbytes", "1M", "added from row to row, unless -f is above 1"),
        ("f", "stepfactor", "1", "multiplies from row to row where it is above 1"),
        ("r", "root", "0", "root; -1 or all takes each rank in turn"),
    ),
    "measurement": (
        ("n", "iters", "20", "timed iterations"),
        ("m", "agg_iters", "1", "operations an iteration"),
        (
            "w",
            "warmup_iters",
            "1",
            "untimed operations of every size, before the sweep",
        ),
        ("N", "run_cycles", "1", "whole sweeps; 0 goes on until Ctrl-C or --duration"),
        ("c", "check", "1", "verified operations of each row; 0 for none"),
        (
            "z",
            "blocking",
            "0",
            "1: wait and barrier after each; 2: wait; 3: an iteration",
        ),
        (
            "a",
            "average",
            "1",
            "times over ranks: 0 rank 0's, 1 mean, 2 least, 3 greatest",
        ),
        ("T", "timeout", "0", "seconds for one synchronisation, then exit code 4"),
        ("u", "unalign", "0", "elements by which buffers are shifted"),
        ("I", "per_iter_timing", "0", "1 times each iteration too"),
        ("K", "per_iter_skip", "0", "iterations that -I leaves out of its summary"),
    ),
    "output": (
        ("C", "report_cputime", "0", "1 shows how long the calls took to return"),
        ("S", "report_timestamps", "0", "1 ends each row with the time of day"),
        ("M", "memory", "0", "1 shows at the end how much memory was used"),
        ("J", "output_file", "", "file for nccl-tests' JSON; must end in .json"),
    ),
    "ranks": (
        ("t", "nthreads", "1", "with -g, ranks to start: t x g"),
        ("g", "ngpus", "1", "see -t"),
    ),
    "for NCCL": (
        ("x", "cta_policy", "", "NCCL's CTA policy: 0, 1 or 2"),
        ("y", "stream_null", "0", "accepted: operations are on the current stream"),
        ("p", "parallel_init", "0", "ignored"),
        ("V", "device_cta_count", "16", "ignored"),
        ("G", "cudagraph", "0", "not supported: an error above 0"),
        ("R", "local_register", "0", "not supported: an error above 0"),
        ("D", "device_implementation", "0", "not supported: an error above 0"),
    ),
}
# Names, default (a switch's is a bool), metavar, help.
_TYPES = (
    ("-d --datatype --dtype", "float", "NAME", "nccl-tests' name, torch's, or all"),
    ("-o --op", "sum", "NAME", "sum, prod, max, min, avg, mulsum or all"),
)
_ENGINES = (
    ("--engine", "auto", "NAME", "what moves the bytes"),
    ("--algorithm", "", "NAME", "the schedule it follows"),
    ("--compare", None, "A,B", "set engines side by side, taking turns"),
    ("--rounds", "5", "N", "turns of --compare"),
    ("--device", "auto", "D", "cpu or cuda"),
    ("--foreign", False, "", "measure tensors outside the engine's own memory"),
    ("--share-gpu", False, "", "all ranks use one GPU; to NCCL each is a host"),
    ("--tune", False, "", "write the table that auto chooses by"),
    ("--explain", False, "", "show what auto chooses, and why"),
)
_CONTROL = (
    ("--json", "", "FILE", "append a record to FILE"),
    ("--plot", "", "FILE", "draw FILE.svg or FILE.png"),
    (
        "--limit",
        True,
        "",
        "find the physical bound; add a column %%limit (default: on)",
    ),
    ("--link-rate", "0", "GB/S", "rate of a host's link, where it is unknown"),
    ("--duration", "0", "TIME", "end a soak, as 30s or 2h"),
    ("--lenient", False, "", "ignore flags that are not supported here"),
)
_OPTIONS: Sequence[tuple[str, Sequence[tuple[str, str | bool | None, str, str]]]] = (
    ("types and operations", _TYPES),
    ("engines", _ENGINES),
    ("further output and control", _CONTROL),
)
_NOT_HERE = {
    "cudagraph": "replay of CUDA graphs",
    "local_register": "registration of buffers",
    "device_implementation": "device kernels",
}
_FLAGS = {
    name: (f"-{letter}", default)
    for flags in _NCCL_TESTS_FLAGS.values()
    for letter, name, default, _ in flags
}


def _parser() -> Parser:
    parser = Parser(
        "ronde bench",
        usage=USAGE,
        description="Measure a collective as nccl-tests does, on any engine.",
        epilog=EPILOG,
    )
    parser.add_argument("collective", nargs="?", default="", help=argparse.SUPPRESS)
    # Every value is text, so that what is wrong can be quoted.
    for title, flags in _NCCL_TESTS_FLAGS.items():
        group = parser.add_argument_group(f"{title} (nccl-tests' flags)")
        for letter, name, default, text in flags:
            shown = f" (default: {default})" if default else ""
            names = f"-{letter}", f"--{name}"
            metavar = letter.upper()
            group.add_argument(
                *names, default=default, metavar=metavar, help=text + shown
            )
    for title, options in _OPTIONS:
        add = parser.add_argument_group(title).add_argument
        for names, default, metavar, what in options:
            text = what
            if metavar:
                text += (
                    f" (default: {default})" if default not in (None, "", "0") else ""
                )
                add(*names.split(), default=default, metavar=metavar, help=text)
            elif default:
                add(names, action=BooleanOptionalAction, default=True, help=text)
            else:
                add(names, action="store_true", help=text)
    parser.add_argument("--parent", default="", help=argparse.SUPPRESS)
    return parser


def help_text() -> str:
    return _parser().format_help()


def parse(words: Sequence[str]) -> Options:
    """Read a command line, the collective's name first.

    Raises:
        UnsupportedError: It asks for what cannot be had here; ``--lenient`` ignores it.
        UsageError: It asks for what cannot be.
    """
    flags = _parser().parse_args(words)
    has_none = not flags.collective and (flags.tune or flags.explain)
    test = find_collective("all_reduce" if has_none else flags.collective)
    ignored = _given(flags, _NOT_HERE)
    if ignored and not flags.lenient:
        name = next(each for each in _NOT_HERE if getattr(flags, each) != "0")
        raise UnsupportedError(
            f"{ignored[0]} asks for {_NOT_HERE[name]}, which no engine here has. Leave "
            "it out, or give --lenient to ignore it."
        )
    own_words = words[: words.index("--parent")] if "--parent" in words else words
    return Options(
        test=test,
        sweep=_sweep(flags, test),
        loop=_loop(flags),
        shown=_shown(flags),
        engines=_engines(flags),
        num_threads=_count(flags, "nthreads", 1),
        num_gpus=_count(flags, "ngpus", 1),
        is_compared=flags.compare is not None,
        is_gpu_shared=flags.share_gpu,
        is_tuned=flags.tune,
        is_explained=flags.explain,
        is_measured=not has_none,
        is_lenient=flags.lenient,
        ignored=(*ignored, *_given(flags, ("parallel_init", "device_cta_count"))),
        needing_cuda=tuple(_given(flags, ("stream_null", "cta_policy"))),
        cta_policy=_choice("-x", flags.cta_policy, ("", "0", "1", "2")),
        parent=flags.parent,
        words=tuple(own_words),
    )


def _sweep(flags: argparse.Namespace, test: Collective) -> Sweep:
    low, high = _size("-b", flags.minbytes), _size("-e", flags.maxbytes)
    if low < 1:
        raise UsageError(f"-b must be at least 1 byte, got {flags.minbytes}.")
    if low > high:
        raise UsageError(
            f"-b must be at most -e, got {flags.minbytes} and {flags.maxbytes} = "
            f"{low} and {high} bytes. Give -e {flags.minbytes} or more."
        )
    step = _size("-i", flags.stepbytes)
    if step < 1:
        raise UsageError(f"-i must be at least 1 byte, got {flags.stepbytes}.")
    root = str(ALL_ROOTS) if flags.root == "all" else flags.root
    if root != str(ALL_ROOTS) and not root.isdecimal():
        raise UsageError(f"-r must be a rank, or -1 or all for each, got {root!r}.")
    return Sweep(
        min_bytes=low,
        max_bytes=high,
        step_bytes=step,
        factor=_count(flags, "stepfactor"),
        dtypes=parse_dtypes(flags.datatype),
        ops=parse_ops(flags.op) if test.has_op else (test.redop,),
        root=int(root),
    )


def _loop(flags: argparse.Namespace) -> Loop:
    iterations = _count(flags, "iters", 1)
    skipped = _count(flags, "per_iter_skip")
    if skipped >= iterations:
        raise UsageError(f"-K must be below -n {iterations}, got {skipped}.")
    return Loop(
        iterations=iterations,
        aggregated=_count(flags, "agg_iters", 1),
        warmup=_count(flags, "warmup_iters"),
        checks=_count(flags, "check"),
        cycles=_count(flags, "run_cycles"),
        blocking=_count(flags, "blocking", 0, 3),
        average=_count(flags, "average", 0, 3),
        is_cpu_time=_count(flags, "report_cputime") != 0,
        is_each_timed=_count(flags, "per_iter_timing") != 0,
        skipped=skipped,
        unaligned_by=_count(flags, "unalign"),
        duration_s=_duration_s("--duration", flags.duration),
        timeout_s=_duration_s("-T", flags.timeout),
    )


def _shown(flags: argparse.Namespace) -> Shown:
    path = flags.output_file
    if path and not path.endswith(".json"):
        raise UsageError(f"-J must be a file whose name ends in .json, got {path!r}.")
    try:
        rate = float(flags.link_rate)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        raise UsageError(
            f"--link-rate must be a rate in GB/s, got {flags.link_rate!r}."
        )
    return Shown(
        has_timestamps=_count(flags, "report_timestamps") != 0,
        has_memory=_count(flags, "memory") != 0,
        has_limit=flags.limit,
        link_rate_gb_per_s=rate,
        json_path=path,
        record_path=flags.json,
        plot_path=flags.plot,
    )


def _engines(flags: argparse.Namespace) -> Engines:
    names = tuple((flags.compare or flags.engine).split(","))
    if flags.compare is not None and len(set(names)) < max(2, len(names)):
        raise UsageError(
            f"--compare must name at least two engines, each once, got {flags.compare}."
        )
    return Engines(
        names=names,
        algorithm=flags.algorithm,
        device=_choice("--device", flags.device, ("auto", "cpu", "cuda")),
        is_foreign=flags.foreign,
        rounds=_count(flags, "rounds", 1),
    )


def _given(flags: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return those of nccl-tests' flags that were given, as the user wrote them."""
    values = [(*_FLAGS[name], getattr(flags, name)) for name in names]
    return [f"{flag} {value}" for flag, default, value in values if value != default]


def _count(
    flags: argparse.Namespace, name: str, low: int = 0, high: int | None = None
) -> int:
    flag, _ = _FLAGS.get(name, (f"--{name}", ""))
    text: str = getattr(flags, name)
    if not text.isdecimal() or not text.isascii() or int(text) < low:
        raise UsageError(
            f"{flag} must be a whole number of at least {low}, got {text!r}."
        )
    if high is not None and int(text) > high:
        raise UsageError(f"{flag} must be in 0..{high}, got {int(text)}.")
    return int(text)


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise UsageError(f"{name} must be one of {known}, got {text!r}.")
    return text


def _size(name: str, text: str) -> int:
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _duration_s(name: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
