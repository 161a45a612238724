"""What a benchmark is asked to do, as a value; torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass

from ronde.bench.catalog import Collective
from ronde.bench.dtypes import DType

ALL_ROOTS = -1


@dataclass(frozen=True, slots=True)
class Sweep:
    """Which rows there are.

    Attributes:
        min_bytes: The first size.
        max_bytes: No size is above it.
        step_bytes: Added from row to row, unless ``factor`` is above 1.
        factor: Multiplies from row to row where it is above 1.
        dtypes: Types, outermost.
        ops: Operations; within each type.
        root: The root, or ``ALL_ROOTS``; innermost.
    """

    min_bytes: int
    max_bytes: int
    step_bytes: int
    factor: int
    dtypes: tuple[DType, ...]
    ops: tuple[str, ...]
    root: int

    def sizes(self) -> Iterator[int]:
        """Yield the sizes of a sweep in bytes."""
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
    """How one row is measured.

    Attributes:
        iterations: Timed iterations.
        aggregated: Operations an iteration.
        warmup: Untimed operations before a sweep, for every size.
        checks: Verified operations for each size and place.
        cycles: Whole sweeps; 0 goes on until it is stopped.
        blocking: nccl-tests' ``-z``.
        average: nccl-tests' ``-a``.
        is_cpu_time: Show the time that the calls took to return.
        is_each_timed: Time each iteration too.
        skipped: Iterations that the summary of those leaves out.
        unaligned_by: Elements by which buffers are shifted.
        duration_s: When to stop; 0 for never.
        timeout_s: How long one synchronisation may take; 0 for as long as it likes.
    """

    iterations: int = 20
    aggregated: int = 1
    warmup: int = 1
    checks: int = 1
    cycles: int = 1
    blocking: int = 0
    average: int = 1
    is_cpu_time: bool = False
    is_each_timed: bool = False
    skipped: int = 0
    unaligned_by: int = 0
    duration_s: float = 0.0
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What is told of a run, and where.

    Attributes:
        has_timestamps: Every row ends with the time of day.
        has_memory: Say at the end how much memory was used.
        has_limit: Find the physical bound and say how near to it each row is.
        link_rate_gb_per_s: What a link carries, where the system does not tell; 0 asks.
        json_path: File for nccl-tests' JSON, or empty.
        record_path: File that a record is appended to, or empty.
        plot_path: File for a drawing, or empty.
    """

    has_timestamps: bool = False
    has_memory: bool = False
    has_limit: bool = True
    link_rate_gb_per_s: float = 0.0
    json_path: str = ""
    record_path: str = ""
    plot_path: str = ""


@dataclass(frozen=True, slots=True)
class Engines:
    """What moves the bytes.

    Attributes:
        names: The engines; the first is the one that others are compared with.
        algorithm: The schedule, or empty.
        device: ``cpu``, ``cuda`` or ``auto``.
        is_foreign: Measure tensors that are not in the engine's own memory.
        rounds: How often engines that are compared take turns.
    """

    names: tuple[str, ...] = ("auto",)
    algorithm: str = ""
    device: str = "auto"
    is_foreign: bool = False
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Options:
    """All that was asked for.

    Attributes:
        test: The collective.
        sweep: Which rows.
        loop: How each is measured.
        shown: What is told.
        engines: What moves the bytes.
        num_threads: nccl-tests' threads a process.
        num_gpus: nccl-tests' GPUs a thread.
        is_compared: Set engines side by side.
        is_gpu_shared: All ranks use one GPU.
        is_tuned: Write the table that ``auto`` chooses by.
        is_explained: Say what ``auto`` chooses, and why.
        is_measured: A collective was named.
        is_lenient: Ignore what is not supported here.
        ignored: Flags that have no effect, as the user wrote them.
        needing_cuda: Flags that have an effect on CUDA alone, as the user wrote them.
        cta_policy: For NCCL, or empty.
        parent: Where this process is one of several that ``ronde bench`` started:
            ``terminal`` or ``pipe``, whatever the user looks at; else empty.
        words: The command line.
    """

    test: Collective
    sweep: Sweep
    loop: Loop
    shown: Shown
    engines: Engines
    num_threads: int = 1
    num_gpus: int = 1
    is_compared: bool = False
    is_gpu_shared: bool = False
    is_tuned: bool = False
    is_explained: bool = False
    is_measured: bool = True
    is_lenient: bool = False
    ignored: tuple[str, ...] = ()
    needing_cuda: tuple[str, ...] = ()
    cta_policy: str = ""
    parent: str = ""
    words: tuple[str, ...] = ()

    @property
    def has_terminal(self) -> bool:
        """Whether the user, as seen by whoever started this rank, is at a terminal."""
        return self.parent == "terminal"

    @property
    def num_own_ranks(self) -> int:
        """Ranks that it starts itself where no launcher has done so."""
        return self.num_threads * self.num_gpus
