"""Measure TensorFlow's collectives and training steps, and Keras on its backends.

Run it as ``python benchmarks/tensorflow_steps.py`` where TensorFlow, Keras and JAX are
installed. ``ronde.tensorflow``, MultiWorkerMirroredStrategy (MWMS) and ``ronde.torch``
take turns in rounds, in the same two ranks. A share is the best step without
communication by the best one with it. Keras' training step is compared with a bare
loop of the same model on ronde's front end for the backend, in ``ronde bench train``.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ronde.launch import own_environment
from ronde.records import read_records

Tensor = Module = Any  # of TensorFlow
Call = Callable[[], object]
Reduce = Callable[[list[Tensor]], list[Tensor]]
# Numbers of elements, and calls a round.
SIZES = {
    "4 B": ([1], 100),
    "64 MiB": ([1 << 24], 3),
    "160 x 16 KiB": ([4096] * 160, 10),
}
KERAS_ROWS = {
    "no_communication": "no communication",
    "all_ranks": "ronde.keras",
    "bare": "bare loop",
    "peer": "own strategy",
}
RONDE = [sys.executable, "-m", "ronde"]


def models() -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Return a function of the loss and its variables, by model."""
    import tensorflow as tf

    tf.random.set_seed(1)
    random = tf.random.normal

    def weights(*shapes: tuple[int, ...]) -> list[Any]:
        return [tf.Variable(random(shape, stddev=0.02)) for shape in shapes]

    cnn = weights((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,))
    cnn += weights((9216, 128), (128,), (128, 10), (10,))
    mlp = weights((784, 2900), (2900,), (2900, 3350), (3350,), (3350, 10), (10,))
    many = weights(*[(45, 45)] * 160)
    images, rows, short = random((8, 28, 28, 1)), random((32, 784)), random((4, 45))

    def cnn_loss() -> Tensor:
        x = tf.nn.relu(tf.nn.conv2d(images, cnn[0], 1, "VALID") + cnn[1])
        x = tf.nn.relu(tf.nn.conv2d(x, cnn[2], 1, "VALID") + cnn[3])
        x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), (8, -1))
        x = tf.nn.relu(x @ cnn[4] + cnn[5])
        return tf.reduce_mean((x @ cnn[6] + cnn[7]) ** 2)

    def mlp_loss() -> Tensor:
        x = tf.nn.relu(rows @ mlp[0] + mlp[1])
        x = tf.nn.relu(x @ mlp[2] + mlp[3])
        return tf.reduce_mean((x @ mlp[4] + mlp[5]) ** 2)

    def many_loss() -> Tensor:
        x = short
        for each in many:
            x = tf.tanh(x @ each)
        return tf.reduce_mean(x**2)

    return {
        "CNN 1.2 M": (cnn_loss, cnn),
        "MLP 12.1 M": (mlp_loss, mlp),
        "160 tensors": (many_loss, many),
    }


def make_step(
    loss_of: Callable[[], Tensor], variables: list[Tensor], reduce: Reduce
) -> Callable[[], None]:
    import tensorflow as tf

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of()
        gradients = reduce(tape.gradient(loss, variables))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)

    return step


def make_peer(hvd: Module) -> tuple[Tensor, Reduce]:
    """Return the strategy of all ranks, and its reduction of a list of gradients."""
    import tensorflow as tf

    with socket.create_server(("127.0.0.1", 0)) as server:
        own = f"127.0.0.1:{server.getsockname()[1]}"
    workers = tf.train.ClusterSpec({"worker": hvd.allgather_object(own)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        workers, task_type="worker", task_id=hvd.rank()
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)

    def reduce(gradients: list[Tensor]) -> list[Tensor]:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("MEAN", gradients, options)

    return strategy, reduce


def time_rounds(
    hvd: Module, sides: Mapping[str, Call], num_rounds: int, num_calls: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each call, by side; the sides take turns."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(-1, num_rounds):  # the first round compiles
        for side, call in sides.items():
            hvd.barrier()
            for _ in range(num_calls if number >= 0 else 1):
                begin = time.perf_counter()
                call()
                if number >= 0:
                    times[side].append((time.perf_counter() - begin) * 1e3)
    return times


def show(hvd: Module, row: str, times: Mapping[str, Sequence[float]]) -> None:
    for side, own in times.items() if hvd.rank() == 0 else ():
        best, line = min(own), f"{row:14}{side:22}"
        if "none" in times:
            line += f"share {min(times['none']) / best:5.2f}  "
        print(f"{line}best {best:8.3f}  median {statistics.median(own):8.3f} ms")


def be_rank(num_rounds: int, *, is_alone: bool) -> None:
    import tensorflow as tf
    import torch

    import ronde.tensorflow as hvd
    import ronde.torch

    hvd.init()
    # Before any other operation.
    strategy, reduce_by_peer = (None, None) if is_alone else make_peer(hvd)

    def by_peer(
        wrap: Callable[[Reduce], Call], *arguments: object
    ) -> Mapping[str, Call]:
        if strategy is None or reduce_by_peer is None:
            return {}
        function = wrap(reduce_by_peer)
        return {"MWMS": tf.function(lambda: strategy.run(function, arguments))}

    for row, (sizes, num_calls) in SIZES.items():
        tensors = [tf.ones(size) for size in sizes]
        reduce = hvd.grouped_allreduce if len(sizes) > 1 else hvd.allreduce
        own = tf.function(reduce)
        argument = tensors if len(sizes) > 1 else tensors[0]
        sides = {
            "ronde": partial(own, argument),
            "ronde, eager": partial(reduce, argument, name=row.replace(" ", ".")),
            **by_peer(lambda reduce: reduce, tensors),
        }
        if row == "64 MiB":
            tensor = torch.ones(sizes)
            sides["ronde.torch in place"] = partial(ronde.torch.allreduce_, tensor)
        show(hvd, row, time_rounds(hvd, sides, num_rounds, num_calls))
    for row, (loss_of, variables) in models().items():
        make = partial(make_step, loss_of, variables)
        sides = {
            "none": tf.function(make(list)),
            "ronde": tf.function(make(hvd.grouped_allreduce)),
            **by_peer(make),
        }
        show(hvd, row, time_rounds(hvd, sides, num_rounds, 10))
    hvd.shutdown()


def compare_keras(backend: str, num_rounds: int, path: Path) -> None:
    words = [*RONDE, "bench", "train", "--framework", "keras", "--model", "mlp"]
    words += ["--peer"]
    words += ["-n", "2", "--rounds", str(num_rounds), "--json", str(path)]
    environment = own_environment() | {"KERAS_BACKEND": backend}
    subprocess.run(words, check=True, capture_output=True, env=environment)
    *_, record = read_records(path)
    variants = record.values["variants"]
    own_ms = variants["all_ranks"]["step_ms"]
    for variant, name in KERAS_ROWS.items():
        step_ms = variants[variant]["step_ms"]
        row = f"Keras, {backend}"
        print(f"{row:18}{name:18}{step_ms:8.2f} ms  {step_ms / own_ms:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--alone", action="store_true", help="without MWMS in the process, and Keras"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.rounds, is_alone=options.alone)
        return
    words = [*RONDE, "run", "-n", "2", "--no-prefix", sys.executable, __file__]
    words += ["--rank", "--rounds", str(options.rounds)]
    subprocess.run([*words, *["--alone"][: options.alone]], check=True)
    if options.alone:
        return
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("tensorflow", "jax", "torch"):
            compare_keras(backend, options.rounds, Path(folder, "records"))


if __name__ == "__main__":
    main()
