"""Options of ``ronde bench``: nccl-tests' flags and ronde's; no import of torch.

Every flag of nccl-tests is supported, ignored with a note, or rejected.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ronde.arguments import CommandParser, one_of, whole_number
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
    """Exit codes of ``ronde bench``."""

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
_NUMBERS = ("N", "RANK", "TIME", "GB/S")  # values in the help whose default is 0


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
       ronde bench serve URL|MODEL [options]
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
  --algorithm NAME      schedule of the scheduled engine
  --compare A,B         compare engines, which take turns on each row
  --rounds N            turns of --compare (default: 5)
  --device {cpu,cuda,auto}
                        device of the tensors (default: auto)
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
_NOT_HERE = {
    "-G": "replay of CUDA graphs",
    "-R": "registration of buffers",
    "-D": "device kernels",
}


def _root(text: str) -> int:
    if text in ("all", str(ALL_ROOTS)):
        return ALL_ROOTS
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"must be a rank, -1 or all, got {text!r}")
    return int(text)


def _json_file(text: str) -> str:
    if not text.endswith(".json"):
        raise UsageError(f"must be a file name that ends in .json, got {text!r}")
    return text


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        raise UsageError(f"must be a number of GB/s, got {text!r}")
    return rate


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if len(set(names)) < max(2, len(names)):
        raise UsageError(f"must be two or more different engines, got {text}")
    return names


_TYPES = {
    "SIZE": parse_size_bytes,
    "TIME": parse_duration_s,
    "GB/S": _rate,
    "N": whole_number(),
    **dict.fromkeys(("-n", "-m", "-t", "-g", "--rounds"), whole_number(1)),
    **dict.fromkeys(("-z", "-a"), whole_number(0, 3)),
    "-r": _root,
    "-J": _json_file,
    "-x": one_of("0", "1", "2"),
    "-d": parse_dtypes,
    "-o": parse_ops,
    "--compare": _engines,
}
# Defaults by attribute; options with other numbers have 0.
_DEFAULTS: Mapping[str, Any] = {
    "minbytes": 32 << 20,
    "maxbytes": 32 << 20,
    "stepbytes": 1 << 20,
    "iters": 20,
    "device_cta_count": 16,
    "rounds": 5,
    "datatype": parse_dtypes("float"),
    "op": parse_ops("sum"),
    "engine": "auto",
    "device": "auto",
    **dict.fromkeys(("stepfactor", "agg_iters", "warmup_iters"), 1),
    **dict.fromkeys(("run_cycles", "check", "average", "nthreads", "ngpus"), 1),
}


def parse(words: Sequence[str]) -> Options:
    """Parse a command line, the collective's name first.

    Raises:
        UnsupportedError: A flag is not supported here, and ``--lenient`` is not given.
        UsageError: The command line is wrong.
    """
    parser = CommandParser(
        "ronde bench", HELP, types=_TYPES, positionals={"collective": "?"}
    )
    parser.declare("  --parent WHERE")
    numbers = (each for each in parser.options.values() if each.metavar in _NUMBERS)
    parser.set_defaults(**dict.fromkeys((each.dest for each in numbers), 0))
    parser.set_defaults(**_DEFAULTS)
    given = parser.parse_args(words)
    changed = {name: getattr(given, at) for at, name in parser.given(given).items()}
    test = find_collective(given.collective or "")
    not_here = [f"{name} {changed[name]}" for name in _NOT_HERE if name in changed]
    if not_here and not given.lenient:
        raise UnsupportedError(
            f"{not_here[0]} needs {_NOT_HERE[not_here[0][:2]]}, which ronde does not "
            "support. Leave it out, or give --lenient to ignore it."
        )
    ignored = [f"{name} {changed[name]}" for name in ("-p", "-V") if name in changed]
    cuda = [f"{name} {changed[name]}" for name in ("-y", "-x") if name in changed]
    return Options(
        test=test,
        sweep=_sweep(given, test),
        loop=_loop(given),
        shown=_shown(given),
        engines=_chosen_engines(given),
        num_threads=given.nthreads,
        num_gpus=given.ngpus,
        is_compared=given.compare is not None,
        is_gpu_shared=given.share_gpu,
        is_lenient=given.lenient,
        ignored=(*not_here, *ignored),
        needing_cuda=tuple(cuda),
        cta_policy=given.cta_policy or "",
        parent=given.parent or "",
        words=tuple(words[: words.index("--parent")] if "--parent" in words else words),
    )


def _sweep(given: argparse.Namespace, test: Collective) -> Sweep:
    low, high, step = given.minbytes, given.maxbytes, given.stepbytes
    for name, size_bytes in (("-b", low), ("-i", step)):
        if size_bytes < 1:
            raise UsageError(f"{name} must be at least 1 byte, got {size_bytes}.")
    if low > high:
        raise UsageError(
            f"-b must be at most -e, got {low} and {high} bytes. Give -e {low} or more."
        )
    return Sweep(
        min_bytes=low,
        max_bytes=high,
        step_bytes=step,
        factor=given.stepfactor,
        dtypes=given.datatype,
        ops=given.op if test.has_op else (test.redop,),
        root=given.root,
    )


def _loop(given: argparse.Namespace) -> TimingLoop:
    if given.per_iter_skip >= given.iters:
        raise UsageError(
            f"-K must be less than -n, which is {given.iters}, got "
            f"{given.per_iter_skip}."
        )
    return TimingLoop(
        iterations=given.iters,
        aggregated=given.agg_iters,
        warmup=given.warmup_iters,
        checks=given.check,
        cycles=given.run_cycles,
        blocking=given.blocking,
        average=given.average,
        is_cpu_time=given.report_cputime != 0,
        is_each_timed=given.per_iter_timing != 0,
        skipped=given.per_iter_skip,
        unaligned_by=given.unalign,
        duration_s=given.duration,
        timeout_s=given.timeout,
    )


def _shown(given: argparse.Namespace) -> Shown:
    return Shown(
        has_timestamps=given.report_timestamps != 0,
        has_memory=given.memory != 0,
        has_limit=given.limit is not False,
        link_rate_gb_per_s=given.link_rate,
        json_path=given.output_file or "",
        record_path=given.json or "",
    )


def _chosen_engines(given: argparse.Namespace) -> Engines:
    return Engines(
        names=given.compare or (given.engine,),
        algorithm=given.algorithm or "",
        device=given.device,
        is_foreign=given.foreign,
        rounds=given.rounds,
    )
