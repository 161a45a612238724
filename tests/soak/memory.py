"""Call everything for long, with shapes and names that never come again; watch memory.

Each rank makes the same random steps: named collectives under way at once, fused and
not, in float32, bfloat16 and int64; rows that differ from rank to rank; steps of a
DistributedOptimizer; errors that are caught. Every tenth of ``--every`` steps there is
another model and another process set; every ``--every`` steps the ranks join, and each
counts what it holds. At the end they shut down and meet anew again and again, and count
after each time.

What must hold on every rank, by steps and by cycles: the most memory that is held in
the last quarter is at most ``--allow`` MiB more than the most in the third quarter, and
the fewest threads and descriptors are no more than the most there. (Caches fill up in
the first half; some are emptied when they are full, about every 5,000 steps.)
Memory is what C's allocator has handed out and not got back, and the pages that the
process maps and that are no file's (RssAnon and RssShmem). The last line is JSON. Exits
with 1 where anything grew.

    python -m tests.soak.memory --ranks 2 3
"""

import argparse
import ctypes
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """The descriptors, threads and memory of a process."""

    number: int  # of steps, or cycles
    allocated_mib: float  # by C's allocator
    memory_mib: float  # RssAnon and RssShmem
    rss_mib: float
    num_objects: int  # of Python, known to the collector
    num_threads: int
    num_descriptors: int


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def held(number: int) -> Held:
    """Count this process's resources, after a garbage collection."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    status = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: line.split()[1] for line in status if " kB" in line}
    anonymous, of_files, shared = (
        int(kib[f"Rss{kind}"]) for kind in ("Anon", "File", "Shmem")
    )
    return Held(
        number,
        round((info.uordblks + info.hblkhd) / _MIB, 2),
        round((anonymous + shared) / 1024, 2),
        round((anonymous + of_files + shared) / 1024, 2),
        len(gc.get_objects()),
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
    )


class Soak:
    """One rank's steps."""

    def __init__(self, every: int) -> None:
        import torch

        import ronde.torch as hvd

        self.torch, self.hvd = torch, hvd
        self.every = every
        self.dice = random.Random(20261123)  # the same on all ranks
        self.sets: list[Any] = []
        hvd.init(process_sets="dynamic")
        self._renew()

    def step(self, number: int) -> None:
        """Take one step, and the work that is due after it."""
        self._call(number)
        self._train()
        if number % 20 == 0:
            self._err(number)
        if number % max(10, self.every // 10) == 0:
            self._renew()
        if number % self.every == 0:
            self.hvd.join()
            self._forget()

    def meet_anew(self) -> None:
        """Shut down, begin again, and take a step."""
        self.hvd.shutdown()
        self.hvd.init(process_sets="dynamic")
        self._renew()
        self._train()
        self._forget()

    def _call(self, number: int) -> None:
        """Have several collectives under way at once."""
        torch, hvd, dice = self.torch, self.hvd, self.dice
        rank, size = hvd.rank(), hvd.size()
        numel = dice.choice([dice.randrange(1, 300), dice.randrange(1, 60_000)])
        dtype = dice.choice([torch.float32, torch.bfloat16, torch.int64])
        ones = torch.ones(numel, dtype=dtype)
        same = torch.ones(dice.randrange(1, 50), 3)
        small = [torch.ones(9 + index) for index in range(2)]
        handles = [
            hvd.allreduce_async(ones, op=hvd.Sum, name=f"once.{number}"),
            hvd.allreduce_async_(same, op=hvd.Sum, name="again"),
            hvd.allreduce_async(torch.ones(5), name=f"twice.{number // 2}"),
            *(hvd.allreduce_async(each, name=f"fused.{len(each)}") for each in small),
        ]
        rows = torch.full((dice.randrange(5) + rank, 4), float(rank))
        kind = dice.randrange(6)
        if kind == 0:
            handles.append(hvd.allgather_async(rows, name=f"rows.{number}"))
        elif kind == 1:
            splits = torch.tensor([dice.randrange(4) for _ in range(size)]).int()
            values = torch.ones(int(splits.sum()), 2)
            handles.append(hvd.alltoall_async(values, splits, name=f"to.{number}"))
        elif kind == 2:
            handles.append(hvd.broadcast_async(ones, 0, name=f"from.{number}"))
        elif kind == 3:
            both = [torch.ones(dice.randrange(1, 40)) for _ in range(4)]
            handles.append(hvd.grouped_allreduce_async(both, name=f"group.{number}"))
        elif kind == 4:
            parts = torch.ones(dice.randrange(1, 30), 2)
            handles.append(hvd.reducescatter_async(parts, op=hvd.Sum))
        elif self.sets and self.sets[0].included():
            handles.append(hvd.allreduce_async(ones, process_set=self.sets[0]))
        first, *_ = [hvd.synchronize(handle) for handle in handles]
        if not bool((first == size).all()):
            raise AssertionError(f"the sum of ones must be {size}, got {first}")

    def _train(self) -> None:
        self.optimizer.zero_grad()
        count = self.dice.randrange(1, 9)
        self.model(self.torch.ones(count, self.model[0].in_features)).sum().backward()
        self.optimizer.step()

    def _err(self, number: int) -> None:
        """Have calls fail in several ways, and go on."""
        torch, hvd = self.torch, self.hvd
        odd = torch.ones(2 + hvd.rank())
        values = torch.ones(3)
        calls: list[Callable[[], Any]] = [
            lambda: hvd.allreduce(odd, name=f"odd.{number}"),
            lambda: hvd.allgather(values.view(1, -1)[:, : 1 + hvd.rank()]),
            lambda: hvd.alltoall(values, torch.tensor([9] * hvd.size()).int()),
            lambda: hvd.broadcast(values, hvd.size()),
        ]
        for call in calls:
            try:
                call()
            except (hvd.HorovodInternalError, ValueError):
                continue
            raise AssertionError("a call must fail that succeeded")

    def _renew(self) -> None:
        """Take another model, another optimizer and another process set."""
        torch, hvd = self.torch, self.hvd
        self._forget()
        width = self.dice.randrange(4, 64)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
        )
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            named_parameters=self.model.named_parameters(),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        ranks = range(hvd.size())
        self.sets = [hvd.add_process_set(self.dice.sample(ranks, len(ranks) - 1))]

    def _forget(self) -> None:
        for each in self.sets:
            self.hvd.remove_process_set(each)
        self.sets = []


def be_rank(directory: Path, num_steps: int, every: int) -> None:
    """Make all steps as one rank, and write the samples."""
    import torch

    torch.set_num_threads(1)
    soak = Soak(every)
    marks: list[Held] = []
    for number in range(1, num_steps + 1):
        soak.step(number)
        if number % every == 0:
            marks.append(held(number))
    cycles: list[Held] = []
    for number in range(1, num_steps // every + 1):
        soak.meet_anew()
        cycles.append(held(number))
    samples = {"step": list(map(asdict, marks)), "cycle": list(map(asdict, cycles))}
    (directory / f"rank{soak.hvd.rank()}").write_text(json.dumps(samples))
    soak.hvd.shutdown()


def run(
    size: int, num_steps: int, every: int, engine: str
) -> list[dict[str, list[Held]]]:
    """Run ``size`` ranks; return the samples of each, by steps and by cycles."""
    with tempfile.TemporaryDirectory(prefix="ronde-soak-") as folder:
        words = [sys.executable, "-m", "ronde", "run", "-n", str(size)]
        words += ["--engine", engine, "--"]
        own = [sys.executable, __file__, "--steps", str(num_steps)]
        own += ["--every", str(every), "--as-rank-in", folder]
        subprocess.run([*words, *own], check=True)
        files = [Path(folder) / f"rank{rank}" for rank in range(size)]
        samples = [json.loads(file.read_text()) for file in files]
    return [
        {name: [Held(**mark) for mark in marks] for name, marks in each.items()}
        for each in samples
    ]


def find_growth(marks: Sequence[Held], allow_mib: float) -> list[str]:
    """Return the samples that grow; see the rule above."""
    half, quarter = len(marks) // 2, len(marks) // 4
    third, last = marks[half : half + quarter], marks[half + quarter :]
    grown: list[str] = []
    for name, least_or_most, allowed in (
        ("allocated_mib", max, allow_mib),
        ("memory_mib", max, allow_mib),
        ("num_threads", min, 0),
        ("num_descriptors", min, 0),
    ):
        before = max(getattr(mark, name) for mark in third)
        after = least_or_most(getattr(mark, name) for mark in last)
        if after - before > allowed:
            grown.append(f"{name} {before} -> {after}")
    return grown


def main() -> None:
    """Run all sizes, print a table, and exit with 1 where anything grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--allow", type=float, default=2.0, metavar="MIB")
    parser.add_argument("--as-rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 4 * options.every:
        parser.error("--steps must be at least four times --every")
    if options.as_rank_in:
        be_rank(options.as_rank_in, options.steps, options.every)
        return
    wrong: list[str] = []
    for size in options.ranks:
        begun = time.monotonic()
        samples = run(size, options.steps, options.every, options.engine)
        took_s = time.monotonic() - begun
        told_of = f"{size} ranks, {options.engine}, {options.steps} steps"
        print(f"\n{told_of}, {took_s:.0f} s\n")
        print("| rank | | allocated | memory | RSS, MiB | objects | threads | fds |")
        print("|---|---|---|---|---|---|---|---|")
        for rank, each in enumerate(samples):
            for name, marks in each.items():
                for mark in marks:
                    values = " | ".join(map(str, asdict(mark).values()))
                    print(f"| {rank} | {name} {values} |")
                grown = find_growth(marks, options.allow)
                wrong += [f"rank {rank} of {size}, by {name}: {it}" for it in grown]
    print(json.dumps({"wrong": wrong}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
