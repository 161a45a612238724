"""Time a training step with a timeline and without, interleaved in one run.

Run it as ``ronde run -n 2 python benchmarks/timeline_cost.py``. Both variants are the
same model in the same memory: a round with the timeline and one without differ in what
the coordinator tells alone. The timeline's thread writes twenty times a second here,
not twice, so that what a round costs falls into that round. ``named`` submits 160
tensors of 16 KiB by name and waits for all: the most that a timeline ever has to do.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from training_step import MODELS, make_step

import ronde.torch as hvd
from ronde.records import Record, append_record
from ronde.session import current_session
from ronde.timeline.events import Recorded
from ronde.timeline.part import PartFiles, PartHeader
from ronde.timeline.recording import ThreadedRecorder

NAMED = "named"
VARIANTS = ("plain", "recorded")
GATHER_S = 0.05
LIMIT_BYTES = 16 << 20


def named_step() -> Callable[[], None]:
    """Return a step that reduces 160 tensors by name."""
    tensors = [torch.ones(4096) for _ in range(160)]

    def step() -> None:
        handles = [
            hvd.allreduce_async(tensor, name=f"tensor{number}", op=hvd.Sum)
            for number, tensor in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def tell(recorder: ThreadedRecorder | None) -> None:
    """Switch the coordinator's timeline on or off."""
    for state in current_session().states.values():
        state.coordinator.execution.recorder = recorder


def steps_in(round_s: float, step: Callable[[], None]) -> int:
    """Return the number of steps in about ``seconds``, equal on all ranks."""
    start = time.perf_counter()
    for _ in range(5):
        step()
    each_s = torch.tensor([(time.perf_counter() - start) / 5])
    return max(1, round(round_s / float(hvd.allreduce(each_s))))


def time_rounds(
    step: Callable[[], None], recorder: ThreadedRecorder, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return seconds a step of both variants in every round, the slowest rank's."""
    for _ in range(5):
        step()
    num_steps = steps_in(options.round_s, step)
    order = random.Random(0)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in order.sample(VARIANTS, len(VARIANTS)):
            tell(recorder if variant == "recorded" else None)
            hvd.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                step()
            elapsed = torch.tensor([time.perf_counter() - start])
            tell(None)
            slowest = hvd.allreduce(elapsed, op=hvd.Max)
            times[variant].append(float(slowest) / num_steps)
    return times


def time_operation(recorder: ThreadedRecorder) -> float:
    """Return the seconds that taking one operation down takes, of 20,000."""
    now = time.monotonic_ns()
    record = Recorded(
        0, 0, "allreduce.x", "ALLREDUCE", now, now, now, now, "float32", (4,), 1
    )
    count = 20_000
    start = time.perf_counter()
    for _ in range(count):
        recorder.operation(record)
    return (time.perf_counter() - start) / count


def report(name: str, times: dict[str, list[float]], path: Path | None) -> None:
    """Print a line and write a record."""
    medians = {v: statistics.median(t) * 1e3 for v, t in times.items()}
    pairs = zip(times["recorded"], times["plain"], strict=True)
    low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
    print(
        f"{name:10}{medians['plain']:10.2f}{medians['recorded']:10.2f}"
        f"{middle:10.4f} [{low:.4f}-{high:.4f}]",
        flush=True,
    )
    if path is not None:
        values = {
            "model": name,
            "num_ranks": hvd.size(),
            "median_step_ms": medians,
            "ratio_quartiles": [low, middle, high],
            "step_s": times,
        }
        append_record(path, Record(kind="timeline_cost", values=values))


def main() -> None:
    """Measure and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of each variant")
    parser.add_argument("--round-s", type=float, default=0.5, help="their length")
    names = [*MODELS, NAMED]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path, help="append a record to this file")
    options = parser.parse_args()
    hvd.init()
    is_first = hvd.rank() == 0
    if is_first:
        print(f"{hvd.size()} ranks, {torch.get_num_threads()} thread(s) each")
        print("ms a step; the ratio is the median [quartiles] of the rounds'")
        print(f"{'model':10}{'plain':>10}{'recorded':>10}{'ratio':>10}")
    with tempfile.TemporaryDirectory() as folder:
        header = PartHeader(hvd.rank(), hvd.size(), "", "", 0)
        files = PartFiles(Path(folder), header, LIMIT_BYTES)
        recorder = ThreadedRecorder([files], gather_s=GATHER_S)
        for name in options.models:
            step = named_step() if name == NAMED else make_step(name, "ronde")
            times = time_rounds(step, recorder, options)
            if is_first:
                report(name, times, options.json)
        each_s = time_operation(recorder)
        recorder.close()
        if is_first:
            print(f"taking one operation down: {each_s * 1e6:.2f} us")
    hvd.shutdown()


if __name__ == "__main__":
    main()
