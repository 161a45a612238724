"""Options of ``ronde bench``: nccl-tests' flags and ronde's; no import of torch.

Every flag of nccl-tests is supported, ignored with a note, or rejected.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ronde.arguments import CommandParser
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
    FAILED = 7  # wrong values, too little bandwidth, or a run that failed
    INTERRUPTED = 130


class UnsupportedError(UsageError):
    """A valid option that is not supported here: exit code 5."""


ALL_ROOTS = -1


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sizes, types, operations and roots of a benchmark's rows."""

    min_bytes: int
    max_bytes: int
    step_bytes: int  # added to each next row unless ``factor`` is above 1
    factor: int  # multiplies each next row if above 1
    dtypes: tuple[DType, ...]
    ops: tuple[str, ...]  # repeated for each type
    root: int  # or ``ALL_ROOTS``; varies fastest

    def sizes(self) -> Iterator[int]:
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size * self.factor if self.factor > 1 else size + self.step_bytes

    def roots(self, test: Collective, size: int) -> list[int]:
        """Return the roots to measure, -1 for a collective without a root."""
        if not test.has_root:
            return [-1]
        return list(range(size)) if self.root == ALL_ROOTS else [self.root]


@dataclass(frozen=True, slots=True)
class TimingLoop:
    """Iteration counts and time limits for measuring a row."""

    iterations: int = 20  # timed iterations
    aggregated: int = 1  # operations in an iteration
    warmup: int = 1  # untimed operations before a sweep, for every size
    checks: int = 1  # verified operations for each size and half
    cycles: int = 1  # number of sweeps; 0 for no end
    blocking: int = 0
    average: int = 1
    is_cpu_time: bool = False  # show the time until the calls returned
    is_each_timed: bool = False  # also time each iteration
    skipped: int = 0  # first iterations that their summary leaves out
    unaligned_by: int = 0  # shift of the buffers in elements
    duration_s: float = 0.0  # time until the end; 0 for none
    timeout_s: float = 0.0  # for one synchronisation; 0 for no limit


@dataclass(frozen=True, slots=True)
class Shown:
    """Output options."""

    has_timestamps: bool = False  # rows end with the time of day
    has_memory: bool = False  # show the used memory at the end
    has_limit: bool = True  # find the physical bound and add a column %limit
    link_rate_gb_per_s: float = 0.0  # rate of a host's link; 0 to read it
    json_path: str = ""  # file for nccl-tests' JSON, or empty
    record_path: str = ""  # file to append a record to, or empty


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines to measure, and their device."""

    names: tuple[str, ...] = ("auto",)
    algorithm: str = ""  # the schedule, or empty
    device: str = "auto"  # ``cpu``, ``cuda`` or ``auto``
    is_foreign: bool = False  # measure tensors outside the engine's memory
    rounds: int = 5  # rounds of compared engines


@dataclass(frozen=True, slots=True)
class Options:
    """All options of the command line."""

    test: Collective
    sweep: Sweep
    loop: TimingLoop
    shown: Shown
    engines: Engines
    num_threads: int = 1  # nccl-tests' threads per process
    num_gpus: int = 1  # nccl-tests' GPUs per thread
    is_compared: bool = False  # compare engines
    is_gpu_shared: bool = False  # all ranks use one GPU
    is_lenient: bool = False  # ignore unsupported flags
    ignored: tuple[str, ...] = ()  # flags that have no effect, as the user wrote them
    needing_cuda: tuple[str, ...] = ()
    cta_policy: str = ""  # for NCCL, or empty
    # The kind of the user's standard error, ``terminal`` or ``pipe``, in a rank that
    # ``ronde bench`` started; else empty.
    parent: str = ""
    words: tuple[str, ...] = ()  # the command line

    @property
    def num_self_launched(self) -> int:
        return self.num_threads * self.num_gpus


HELP = """\
usage: ronde bench COLLECTIVE [options]
       ronde bench train --model NAME [options]
       ronde bench read LOG...
       ronde bench compare A B

Measure a collective as nccl-tests does, on any engine.

options:
  -h, --help            show this help and exit

rows (nccl-tests' flags):
  -b, --minbytes SIZE   first size, as 8, 4K or 1G (default: 32M)
  -e, --maxbytes SIZE   last size (default: 32M)
  -i, --stepbytes SIZE  added from row to row, unless -f is above 1 (default: 1M)
  -f, --stepfactor N    multiplies the size from row to row if above 1 (default: 1)
  -r, --root RANK       root; -1 or all for each rank in turn (default: 0)

measurement (nccl-tests' flags):
  -n, --iters N         timed iterations (default: 20)
  -m, --agg_iters N     operations per iteration (default: 1)
  -w, --warmup_iters N  untimed operations of each size, before the sweep (default: 1)
  -N, --run_cycles N    whole sweeps; 0 goes on until Ctrl-C or --duration (default: 1)
  -c, --check N         verified operations of each row; 0 for none (default: 1)
  -z, --blocking N      1: wait and barrier after each operation; 2: wait after each;
                        3: wait and barrier after each iteration (default: 0, neither)
  -a, --average N       time of a row: 0 rank 0's, 1 the ranks' mean, 2 least, 3
                        greatest (default: 1)
  -T, --timeout TIME    exit with code 4 if a synchronisation takes longer (default: 0,
                        no limit)
  -u, --unalign N       elements by which buffers are shifted (default: 0)
  -I, --per_iter_timing N
                        1: also time each iteration (default: 0)
  -K, --per_iter_skip N
                        iterations that -I leaves out of its summary (default: 0)

output (nccl-tests' flags):
  -C, --report_cputime N      1: show the time until the calls return (default: 0)
  -S, --report_timestamps N   1: end each row with the time of day (default: 0)
  -M, --memory N              1: show the memory used at the end (default: 0)
  -J, --output_file FILE      write nccl-tests' JSON to FILE, which must end in .json

ranks (nccl-tests' flags):
  -t, --nthreads N      start t x g ranks (default: 1)
  -g, --ngpus N         see -t (default: 1)

for NCCL (nccl-tests' flags):
  -x, --cta_policy N             NCCL's CTA policy: 0, 1 or 2
  -y, --stream_null N            accepted: operations run on the current stream
  -p, --parallel_init N          ignored
  -V, --device_cta_count N       ignored
  -G, --cudagraph N              not supported: an error if above 0
  -R, --local_register N         not supported: an error if above 0
  -D, --device_implementation N  not supported: an error if above 0

types and operations:
  -d, --datatype, --dtype NAME
                        nccl-tests' name, torch's name, or all (default: float)
  -o, --op NAME         sum, prod, max, min, avg, mulsum or all (default: sum)

engines:
  --engine NAME         engine (default: auto)
  --algorithm NAME      schedule of the engine scheduled
  --compare A,B         compare engines, which take turns on each row
  --rounds N            turns of --compare (default: 5)
  --device NAME         cpu, cuda or auto (default: auto)
  --foreign             measure tensors outside the engine's own memory
  --share-gpu           let all ranks use one GPU; NCCL sees each as a host

further output and control:
  --json FILE           append a record to FILE
  --[no-]limit          find the physical bound and add a column %limit (default: on)
  --link-rate GB/S      rate of a host's link, where it is unknown
  --duration TIME       end a soak after TIME, as 30s or 2h
  --lenient             ignore flags that are not supported here

collectives: all_reduce all_gather reduce_scatter broadcast reduce alltoall alltoallv
gather scatter sendrecv hypercube, or nccl-tests' names, such as all_reduce_perf

Without a launcher it starts t x g ranks on this machine. Under ronde run, torchrun
or mpirun it joins their ranks.

exit code: 0 success; 1 a fault of ronde; 2 CUDA; 3 the engine; 4 -T expired;
5 not supported here; 6 a bad command line; 7 wrong values, or less bandwidth than
NCCL_TESTS_MIN_BW; 130 Ctrl-C.

examples:
  ronde bench all_reduce -g 2 -b 4 -e 64M -f 4
  ronde bench all_reduce -g 2 -b 1K -e 16M -f 4 --compare gloo,shared_memory
  ronde run -n 4 -- ronde bench alltoall -b 1M -e 16M -f 2 -J alltoall.json
"""
# Defaults of options with a value; other options have 0.
_DEFAULTS = {
    "-b": "32M",
    "-e": "32M",
    "-i": "1M",
    "-n": "20",
    "-V": "16",
    "--rounds": "5",
    **dict.fromkeys(("-f", "-m", "-w", "-N", "-c", "-a", "-t", "-g"), "1"),
    "-d": "float",
    "-o": "sum",
    "--engine": "auto",
    "--device": "auto",
    **dict.fromkeys(("-J", "-x", "--algorithm", "--json", "--parent"), ""),
}
_NOT_HERE = {
    "-G": "replay of CUDA graphs",
    "-R": "registration of buffers",
    "-D": "device kernels",
}
# Values as text, with defaults, by the first name of the option.
_Flags = Mapping[str, str]


def parse(words: Sequence[str]) -> Options:
    """Parse a command line, the collective's name first.

    Raises:
        UnsupportedError: A flag is not supported here, and ``--lenient`` is not given.
        UsageError: The command line is wrong.
    """
    parser = CommandParser("ronde bench", HELP, positionals={"collective": "?"})
    parser.declare("  --parent WHERE")
    options = parser.parse_args(words)
    given = {name: getattr(options, at) for at, name in parser.given(options).items()}
    flags: defaultdict[str, Any] = defaultdict(lambda: "0", _DEFAULTS | given)

    def changed(*names: str) -> tuple[str, ...]:
        pairs = [(name, flags[name], _DEFAULTS.get(name, "0")) for name in names]
        return tuple(f"{name} {text}" for name, text, usual in pairs if text != usual)

    test = find_collective(options.collective or "")
    ignored = changed(*_NOT_HERE)
    if ignored and not options.lenient:
        raise UnsupportedError(
            f"{ignored[0]} needs {_NOT_HERE[ignored[0][:2]]}, which ronde does not "
            "support. Leave it out, or give --lenient to ignore it."
        )
    return Options(
        test=test,
        sweep=_sweep(flags, test),
        loop=_loop(flags),
        shown=_shown(flags, has_limit=options.limit is not False),
        engines=_engines(flags, is_foreign=options.foreign),
        num_threads=_count(flags, "-t", 1),
        num_gpus=_count(flags, "-g", 1),
        is_compared="--compare" in given,
        is_gpu_shared=options.share_gpu,
        is_lenient=options.lenient,
        ignored=(*ignored, *changed("-p", "-V")),
        needing_cuda=changed("-y", "-x"),
        cta_policy=_choice(flags, "-x", ("", "0", "1", "2")),
        parent=flags["--parent"],
        words=tuple(words[: words.index("--parent")] if "--parent" in words else words),
    )


def _sweep(flags: _Flags, test: Collective) -> Sweep:
    low, high, step = (parse_size_bytes(flags[n], n) for n in ("-b", "-e", "-i"))
    for name, size_bytes in (("-b", low), ("-i", step)):
        if size_bytes < 1:
            raise UsageError(f"{name} must be at least 1 byte, got {flags[name]}.")
    if low > high:
        raise UsageError(
            f"-b must be at most -e, got -b {flags['-b']} ({low} bytes) and -e "
            f"{flags['-e']} ({high} bytes). Give -e {flags['-b']} or more."
        )
    root = str(ALL_ROOTS) if flags["-r"] == "all" else flags["-r"]
    if root != str(ALL_ROOTS) and not root.isdecimal():
        raise UsageError(f"-r must be a rank, -1 or all, got {root!r}.")
    return Sweep(
        min_bytes=low,
        max_bytes=high,
        step_bytes=step,
        factor=_count(flags, "-f"),
        dtypes=parse_dtypes(flags["-d"]),
        ops=parse_ops(flags["-o"]) if test.has_op else (test.redop,),
        root=int(root),
    )


def _loop(flags: _Flags) -> TimingLoop:
    iterations, skipped = _count(flags, "-n", 1), _count(flags, "-K")
    if skipped >= iterations:
        raise UsageError(
            f"-K must be less than -n, which is {iterations}, got {skipped}."
        )
    return TimingLoop(
        iterations=iterations,
        aggregated=_count(flags, "-m", 1),
        warmup=_count(flags, "-w"),
        checks=_count(flags, "-c"),
        cycles=_count(flags, "-N"),
        blocking=_count(flags, "-z", 0, 3),
        average=_count(flags, "-a", 0, 3),
        is_cpu_time=_count(flags, "-C") != 0,
        is_each_timed=_count(flags, "-I") != 0,
        skipped=skipped,
        unaligned_by=_count(flags, "-u"),
        duration_s=parse_duration_s(flags["--duration"], "--duration"),
        timeout_s=parse_duration_s(flags["-T"], "-T"),
    )


def _shown(flags: _Flags, *, has_limit: bool) -> Shown:
    path, rate_text = flags["-J"], flags["--link-rate"]
    if path and not path.endswith(".json"):
        raise UsageError(f"-J must be a file name that ends in .json, got {path!r}.")
    try:
        rate = float(rate_text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        raise UsageError(f"--link-rate must be a number of GB/s, got {rate_text!r}.")
    return Shown(
        has_timestamps=_count(flags, "-S") != 0,
        has_memory=_count(flags, "-M") != 0,
        has_limit=has_limit,
        link_rate_gb_per_s=rate,
        json_path=path,
        record_path=flags["--json"],
    )


def _engines(flags: _Flags, *, is_foreign: bool) -> Engines:
    compared = flags.get("--compare")
    names = tuple((compared or flags["--engine"]).split(","))
    if compared is not None and len(set(names)) < max(2, len(names)):
        raise UsageError(
            f"--compare must be two or more different engines, got {compared}."
        )
    return Engines(
        names=names,
        algorithm=flags["--algorithm"],
        device=_choice(flags, "--device", ("auto", "cpu", "cuda")),
        is_foreign=is_foreign,
        rounds=_count(flags, "--rounds", 1),
    )


def _count(flags: _Flags, name: str, low: int = 0, high: int | None = None) -> int:
    text = flags[name]
    if not text.isdecimal() or not text.isascii() or int(text) < low:
        raise UsageError(
            f"{name} must be a whole number of at least {low}, got {text!r}."
        )
    if high is not None and int(text) > high:
        raise UsageError(f"{name} must be in 0..{high}, got {int(text)}.")
    return int(text)


def _choice(flags: _Flags, name: str, choices: Sequence[str]) -> str:
    if flags[name] not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise UsageError(f"{name} must be one of {known}, got {flags[name]!r}.")
    return flags[name]
