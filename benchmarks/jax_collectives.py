"""Measure collectives and training steps of JAX: ours against ``psum`` on Gloo.

Run it as ``python benchmarks/jax_collectives.py`` where JAX is installed. All sides are
in the same ranks and take turns. ``torch`` is the session's named all-reduce on tensors
outside of JAX, the floor of the others. Times are those of rank 0; those of steps are
``ronde bench train``'s.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ronde.records import read_records

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "4 B": (1, 4, 200),
    "1 MiB": (1, MIB, 40),
    "64 MiB": (1, 64 * MIB, 3),
    "160 x 16 KiB": (160, 16 * KIB, 20),
}
"""Number and bytes of the arrays, and calls in a round."""
BATCHES = {"mnist_cnn": "100", "mlp": "32"}  # 1.2 M and 12.1 M weights
NAMES = {"all_ranks": "ronde", "peer": "psum"}
Sides = dict[str, Callable[[], object]]


def make_sides(count: int, num_bytes: int, label: str) -> Sides:
    import jax
    import torch

    import ronde.jax as hvd
    from ronde.session import Allreduce, global_process_set

    names = [
        f"{label} {way}".replace(" ", ".")
        for way in ("plain", "given", "slow", "torch")
    ]
    reduce = partial(hvd.allreduce, op=hvd.Sum)
    plain = hvd.jit(partial(reduce, name=names[0]))
    donating = hvd.jit(partial(reduce, name=names[1]), donate_argnums=0)
    zeros = [np.zeros(num_bytes // 4, np.float32)] * count
    slow = jax.jit(partial(reduce, name=names[2]))
    arrays, given = [jax.tree.map(jax.numpy.array, zeros) for _ in range(2)]
    tensors = [torch.zeros(num_bytes // 4) for _ in range(count)]

    def donate() -> object:
        nonlocal given
        given = donating(given)
        return given

    outside = Allreduce(global_process_set, names[3], count > 1)
    sides: Sides = {
        "ronde": lambda: plain(arrays),
        "ronde, donated": donate,
        "ronde, jax.jit": lambda: slow(arrays),
        "torch": lambda: outside.run(tensors, in_place=True),
    }
    mesh, spec = jax.make_mesh((hvd.size(),), ("ranks",)), jax.P("ranks")
    place = partial(
        jax.make_array_from_process_local_data, jax.NamedSharding(mesh, spec)
    )
    spread = jax.tree.map(place, zeros)
    summed = jax.jit(
        jax.shard_map(
            lambda xs: jax.lax.psum(xs, "ranks"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.P(),
        )
    )
    return sides | {"psum": lambda: summed(spread)}


def measure(num_rounds: int, path: str) -> None:
    """Time the collectives in one rank; rank 0 writes the rows."""
    import jax

    import ronde.jax as hvd

    hvd.init(distributed=True)
    cases = {name: make_sides(*size[:2], name) for name, size in SIZES.items()}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(num_rounds + 1):
        for name, sides in cases.items():
            for side, call in sides.items():
                hvd.barrier()
                for _ in range(SIZES[name][2] if number else 2):  # the first to warm up
                    begin = time.perf_counter()
                    jax.block_until_ready(call())
                    elapsed_ms = 1e3 * (time.perf_counter() - begin)
                    if number:
                        found[name][side].append(elapsed_ms)
    if hvd.rank() == 0:
        with Path(path).open("w") as file:
            for name, sides in found.items():
                for side, times in sides.items():
                    write(file, name, side, min(times), statistics.median(times))
    hvd.barrier()
    hvd.shutdown()


def write(file: TextIO, case: str, side: str, least: float, median: float) -> None:
    row = {"case": case, "side": side, "min_ms": least, "median_ms": median}
    file.write(json.dumps(row) + "\n")


def measure_steps(model: str, num_rounds: int, path: Path) -> None:
    """Append the rows of training steps, by ``ronde bench train``."""
    records = path.with_suffix(".records")
    words = ["bench", "train", "-n", "2", "--device", "cpu", "--framework", "jax"]
    words += ["--model", model, "--batch", BATCHES[model], "--peer", "--json"]
    words += [str(records), "--rounds", str(num_rounds)]
    launch = [sys.executable, "-m", "ronde"]
    subprocess.run([*launch, *words], check=True, stdout=subprocess.PIPE)
    *_, record = read_records(records, "bench_train")
    with path.open("a") as file:
        for variant, figures in record.values["variants"].items():
            step_ms = figures["step_ms"]
            side = NAMES.get(variant, variant)
            write(file, f"step, {model}", side, step_ms, step_ms)


def show(rows: Sequence[dict[str, Any]]) -> None:
    peers = {row["case"]: row["min_ms"] for row in rows if row["side"] == "psum"}
    print(f"{'':16}{'':18}{'min ms':>10}{'median':>10}{'of psum':>10}")
    for row in rows:
        share = row["min_ms"] / peers[row["case"]]
        figures = f"{row['min_ms']:10.3f}{row['median_ms']:10.3f}{share:10.2f}"
        print(f"{row['case']:16}{row['side']:18}{figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-steps", action="store_true", help="collectives only")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.rounds, options.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.json or Path(folder) / "rows")
        words = [sys.executable, "-m", "ronde", "run", "-n", "2", sys.executable]
        words += [__file__, "--rounds", str(options.rounds), "--rank", str(path)]
        subprocess.run(words, check=True)
        for model in () if options.no_steps else BATCHES:
            measure_steps(model, options.rounds, path)
        show([json.loads(line) for line in path.read_text().splitlines()])


if __name__ == "__main__":
    main()
