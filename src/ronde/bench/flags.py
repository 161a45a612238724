"""From words to ``Options``: nccl-tests' flags, and ours. Imports no torch.

Every flag of nccl-tests is honoured, ignored with a line that says so, or refused.
"""

import argparse
from collections.abc import Callable, Sequence

from ronde.arguments import Parser
from ronde.bench.catalog import Collective, find_collective
from ronde.bench.dtypes import parse_dtypes, parse_ops
from ronde.bench.exits import UnsupportedError
from ronde.bench.flag_table import EPILOG, USAGE, add_flags
from ronde.bench.options import ALL_ROOTS, Engines, Loop, Options, Shown, Sweep
from ronde.errors import UsageError
from ronde.units import parse_duration_s, parse_size_bytes


def help_text() -> str:
    """Return what ``ronde bench --help`` says."""
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
