"""What a benchmark is asked to do: nccl-tests' flags and ours, as values; no torch.

Every flag of nccl-tests is honoured, ignored with a line that says so, or refused.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
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
    """What is told of a run, and where."""

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
    shown: Shown  # what is told
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
    def num_own_ranks(self) -> int:
        """Ranks that it starts itself where no launcher has done so."""
        return self.num_threads * self.num_gpus


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


def help_text() -> str:
    return _parser().format_help()


def parse(words: Sequence[str]) -> Options:
    """Read a command line, the collective's name first."""
    flags = _parser().parse_args(words)
    has_none = not flags.collective and (flags.tune or flags.explain)
    test = find_collective("all_reduce" if has_none else flags.collective)
    ignored = [*_refused(flags), *_ignored(flags)]
    return Options(
        test=test,
        sweep=_sweep(flags, test),
        loop=_loop(flags),
        shown=_shown(flags),
        engines=_engines(flags),
        num_threads=_at_least(1, "-t", flags.nthreads),
        num_gpus=_at_least(1, "-g", flags.ngpus),
        is_compared=flags.compare is not None,
        is_gpu_shared=flags.share_gpu,
        is_tuned=flags.tune,
        is_explained=flags.explain,
        is_measured=not has_none,
        is_lenient=flags.lenient,
        ignored=tuple(ignored),
        needing_cuda=_needing_cuda(flags),
        cta_policy=_choice("-x", flags.cta_policy, ("", "0", "1", "2")),
        parent=flags.parent,
        words=_without_parent(words),
    )


def _without_parent(words: Sequence[str]) -> tuple[str, ...]:
    """Return what the user wrote: the ranks' own option comes last."""
    is_told = "--parent" in words
    return tuple(words[: words.index("--parent")] if is_told else words)


def _parser() -> Parser:
    parser = Parser(
        "ronde bench",
        usage=USAGE,
        description="Measure a collective as nccl-tests does, on any engine.",
        epilog=EPILOG,
    )
    parser.add_argument("collective", nargs="?", default="", help=argparse.SUPPRESS)
    add_flags(parser)
    return parser


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
    root = flags.root if flags.root != "all" else str(ALL_ROOTS)
    return Sweep(
        min_bytes=low,
        max_bytes=high,
        step_bytes=step,
        factor=_at_least(0, "-f", flags.stepfactor),
        dtypes=parse_dtypes(flags.datatype),
        ops=parse_ops(flags.op) if test.has_op else (test.redop,),
        root=_root(root),
    )


def _root(text: str) -> int:
    if text == str(ALL_ROOTS):
        return ALL_ROOTS
    if not text.isdecimal():
        raise UsageError(f"-r must be a rank, or -1 or all for each, got {text!r}.")
    return int(text)


def _loop(flags: argparse.Namespace) -> Loop:
    iterations = _at_least(1, "-n", flags.iters)
    skipped = _at_least(0, "-K", flags.per_iter_skip)
    if skipped >= iterations:
        raise UsageError(f"-K must be below -n {iterations}, got {skipped}.")
    return Loop(
        iterations=iterations,
        aggregated=_at_least(1, "-m", flags.agg_iters),
        warmup=_at_least(0, "-w", flags.warmup_iters),
        checks=_at_least(0, "-c", flags.check),
        cycles=_at_least(0, "-N", flags.run_cycles),
        blocking=_one_of("-z", flags.blocking, 3),
        average=_one_of("-a", flags.average, 3),
        is_cpu_time=_is_on("-C", flags.report_cputime),
        is_each_timed=_is_on("-I", flags.per_iter_timing),
        skipped=skipped,
        unaligned_by=_at_least(0, "-u", flags.unalign),
        duration_s=_duration_s("--duration", flags.duration),
        timeout_s=_duration_s("-T", flags.timeout),
    )


def _shown(flags: argparse.Namespace) -> Shown:
    path = flags.output_file
    if path and not path.endswith(".json"):
        raise UsageError(f"-J must be a file whose name ends in .json, got {path!r}.")
    return Shown(
        has_timestamps=_is_on("-S", flags.report_timestamps),
        has_memory=_is_on("-M", flags.memory),
        has_limit=flags.limit,
        link_rate_gb_per_s=_positive("--link-rate", flags.link_rate),
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
        rounds=_at_least(1, "--rounds", flags.rounds),
    )


def _refused(flags: argparse.Namespace) -> list[str]:
    """Refuse what cannot be had; return it where that is to be ignored."""
    asked = (
        (flags.cudagraph != "0", f"-G {flags.cudagraph}", "replay of CUDA graphs"),
        (
            flags.local_register != "0",
            f"-R {flags.local_register}",
            "registration of buffers",
        ),
        (
            flags.device_implementation != "0",
            f"-D {flags.device_implementation}",
            "device kernels",
        ),
    )
    unsupported = [(words, what) for is_asked, words, what in asked if is_asked]
    if unsupported and not flags.lenient:
        words, what = unsupported[0]
        raise UnsupportedError(
            f"{words} asks for {what}, which no engine here has. Leave it out, or give "
            "--lenient to ignore it."
        )
    return [words for words, _ in unsupported]


def _ignored(flags: argparse.Namespace) -> list[str]:
    asked = (
        (flags.parallel_init != "0", f"-p {flags.parallel_init}"),
        (flags.device_cta_count != "16", f"-V {flags.device_cta_count}"),
    )
    return [words for is_asked, words in asked if is_asked]


def _needing_cuda(flags: argparse.Namespace) -> tuple[str, ...]:
    asked = (
        (flags.stream_null != "0", f"-y {flags.stream_null}"),
        (flags.cta_policy != "", f"-x {flags.cta_policy}"),
    )
    return tuple(words for is_asked, words in asked if is_asked)


def _at_least(low: int, name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or int(text) < low:
        raise UsageError(
            f"{name} must be a whole number of at least {low}, got {text!r}."
        )
    return int(text)


def _one_of(name: str, text: str, high: int) -> int:
    number = _at_least(0, name, text)
    if number > high:
        raise UsageError(f"{name} must be in 0..{high}, got {number}.")
    return number


def _is_on(name: str, text: str) -> bool:
    return _at_least(0, name, text) != 0


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise UsageError(f"{name} must be one of {known}, got {text!r}.")
    return text


def _named(name: str, text: str, read: Callable[[str], float]) -> float:
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _size(name: str, text: str) -> int:
    return int(_named(name, text, parse_size_bytes))


def _duration_s(name: str, text: str) -> float:
    return _named(name, text, parse_duration_s)


def _positive(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{name} must be a rate in GB/s, got {text!r}.")
    return number
