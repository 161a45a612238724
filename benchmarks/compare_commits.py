"""Time the measured paths of two commits, in turn, and print new by old.

Run it as ``python benchmarks/compare_commits.py OLD [NEW]``. Each is a commit of this
repository or a directory that has ``src/ronde``; NEW is this working tree unless it is
given. Every round runs both, so that a machine that slows down slows both:

* two ranks on shared memory, one thread each: ``all_reduce`` of 4 B, 256 KiB and 64 MiB
  in plain memory and in that of ``allocate()``, ``all_gather`` of 16 KiB a rank, one
  named all-reduce of 4 B, 160 of 16 KiB submitted together, a training step;
* the start and end of ``/bin/true`` on two ranks, ``ronde run --help``, and the import
  of ``ronde.torch``, each in a new process.

A figure is the median over the rounds of each round's median. ``--quick`` makes one
round of few calls, to see that everything runs.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RONDE = [sys.executable, "-m", "ronde"]
COMMANDS = {
    "start of two /bin/true": [*RONDE, "run", "-n", "2", "--", "/bin/true"],
    "ronde run --help": [*RONDE, "run", "--help"],
    "import ronde.torch": [sys.executable, "-c", "import ronde.torch"],
}
MANY = 160


def main() -> None:
    """Print the medians of both and their ratios, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="a commit, or a directory that has src/ronde")
    parser.add_argument("new", nargs="?", default=str(ROOT))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory(prefix="ronde-compare-") as folder:
        trees = {
            name: source_tree(given, Path(folder) / name)
            for name, given in (("old", options.old), ("new", options.new))
        }
        for number in range(1 if options.quick else options.rounds):
            for name in sorted(trees, reverse=bool(number % 2)):
                rounds[name].append(time_tree(trees[name], is_quick=options.quick))
    medians = {name: median_of(each) for name, each in rounds.items()}
    print(f"{'us':26} {'old':>12} {'new':>12} {'new/old':>8}")
    for path, old in medians["old"].items():
        new = medians["new"][path]
        print(f"{path:26} {old:12,.1f} {new:12,.1f} {new / old:8.3f}")
    print(json.dumps({"benchmark": "compare_commits", "median_us": medians}))


def source_tree(given: str, folder: Path) -> Path:
    """Return the directory that holds the package; a commit is unpacked to one."""
    if (Path(given) / "src" / "ronde").is_dir():
        return Path(given).resolve() / "src"
    command = ["git", "-C", str(ROOT), "archive", given, "src"]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {path: statistics.median(r[path] for r in rounds) for path in rounds[0]}


def time_tree(tree: Path, *, is_quick: bool) -> dict[str, float]:
    """Return the median of every path in one tree, in us."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}  # noqa: TID251  the ranks' own
    rank = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    rank += f"from benchmarks.compare_commits import measure; measure({is_quick})"
    command = [*RONDE, "run", "-n", "2", "--", sys.executable, "-c", rank]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        own = env | {"COMPARE_COMMITS": file.name}
        subprocess.run(command, check=True, env=own, stdout=subprocess.DEVNULL)
        medians: dict[str, float] = json.load(file)
    for path, words in COMMANDS.items():
        times: list[float] = []
        for _ in range(1 if is_quick else 5):
            begun = time.perf_counter()
            subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL)
            times.append((time.perf_counter() - begun) * 1e6)
        medians[path] = statistics.median(times)
    return medians


def measure(is_quick: bool) -> None:  # noqa: FBT001
    """Time all paths that need ranks; on every rank. Rank 0 writes the medians."""
    import torch

    import ronde.torch as hvd
    from ronde.collectives import connect
    from ronde.world import read_rank_info

    torch.set_num_threads(1)
    share = 50 if is_quick else 1
    communicator = connect(read_rank_info(), engine="shared_memory")
    calls: dict[str, tuple[int, Callable[[], object]]] = {}
    for size, num_bytes, count in (
        ("4 B", 4, 3000),
        ("256 KiB", 256 << 10, 300),
        ("64 MiB", 64 << 20, 7),
    ):
        plain = torch.ones(num_bytes // 4)
        own = communicator.allocate(num_bytes // 4, torch.float32)
        for kind, tensor in (("", plain), (", allocated", own.zero_())):
            calls[f"all_reduce {size}{kind}"] = (
                count,
                lambda t=tensor: communicator.all_reduce(t).wait(),
            )
    gathered = torch.ones(4096)
    calls["all_gather 16 KiB"] = 1000, lambda: communicator.all_gather(gathered).wait()
    medians = time_calls(calls, share, lambda: communicator.barrier().wait())
    communicator.close()
    hvd.init(engine="shared_memory")
    medians |= time_calls(named_calls(), share, hvd.barrier)
    if hvd.rank() == 0:
        Path(os.environ["COMPARE_COMMITS"]).write_text(json.dumps(medians))  # noqa: TID251
    hvd.shutdown()


def named_calls() -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the front end's calls and the number of repetitions of each."""
    import torch

    import ronde.torch as hvd

    one, many = torch.ones(1), [torch.ones(4096) for _ in range(MANY)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
    )
    inputs = torch.randn(32, 256)

    def reduce_many() -> None:
        handles = [hvd.allreduce_async(t, name=f"g{i}") for i, t in enumerate(many)]
        for handle in handles:
            hvd.synchronize(handle)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return {
        "named 4 B": (2000, lambda: hvd.allreduce(one, name="one")),
        f"named {MANY} x 16 KiB": (60, reduce_many),
        "training step": (200, step),
    }


def time_calls(
    calls: Mapping[str, tuple[int, Callable[[], object]]],
    share: int,
    barrier: Callable[[], object],
) -> dict[str, float]:
    """Return the median of each call in us; the first three are left out."""
    medians: dict[str, float] = {}
    for path, (count, call) in calls.items():
        times: list[float] = []
        for number in range(3 + max(count // share, 3)):
            if number % 50 == 0:
                barrier()
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e6)
        medians[path] = statistics.median(times[3:])
    return medians


if __name__ == "__main__":
    main()
