"""Measure training steps of TensorFlow: ours against MultiWorkerMirroredStrategy.

Run it as ``python benchmarks/tensorflow_steps.py`` where TensorFlow is installed. Each
side has ranks of its own, which take turns in rounds of all models. A figure is the
best step without communication, divided by the best one with it, in the same ranks.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

SIDES = ("ronde", "MWMS")
Call = Tensor = Tensors = Module = Any  # TensorFlow's


def models() -> dict[str, tuple[Any, Any]]:
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


def measure(side: str, num_steps: int) -> None:
    """Time the steps of one rank; rank 0 writes the best ones as JSON."""
    import tensorflow as tf

    import ronde.tensorflow as hvd

    hvd.init()
    own = None, hvd.grouped_allreduce
    strategy, reduce = own if side == "ronde" else peer(hvd)
    found = {}
    for name, (loss_of, variables) in models().items():

        def step(
            wrap: Call, loss_of: Call = loss_of, variables: Tensors = variables
        ) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of()
            gradients = wrap(tape.gradient(loss, variables))
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(0.01 * gradient)

        best = []
        bodies = [lambda: step(list), lambda: step(reduce)]
        if strategy:
            bodies[1] = lambda: strategy.run(step, [reduce])
        for body in bodies:
            call = tf.function(body)
            call()
            hvd.barrier()
            times = []
            for _ in range(num_steps):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            best.append(min(times))
        found[name] = best
    if hvd.rank() == 0:
        sys.stdout.write(f"result {json.dumps(found)}\n")
    hvd.shutdown()


def peer(hvd: Module) -> tuple[Any, Any]:
    """Return the strategy of all ranks, and its reduction of a list of gradients."""
    import tensorflow as tf

    with socket.create_server(("127.0.0.1", 0)) as server:
        own = f"127.0.0.1:{server.getsockname()[1]}"
        workers = hvd.allgather_object(own)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}),
        task_type="worker",
        task_id=hvd.rank(),
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)

    def reduce(gradients: Tensors) -> Tensors:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("MEAN", gradients, options)

    return strategy, reduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("-n", type=int, default=2, help="number of ranks")
    parser.add_argument("--side", choices=SIDES, help="be a rank of this side")
    options = parser.parse_args()
    if options.side:
        measure(options.side, options.steps)
        return
    best: dict[Any, list[float]] = defaultdict(list)
    launch = [sys.executable, "-m", "ronde", "run", "-n", str(options.n)]
    for _ in range(options.rounds):
        for side in SIDES:
            words = [sys.executable, __file__, "--side", side]
            words += ["--steps", str(options.steps)]
            done = subprocess.run([*launch, *words], check=True, capture_output=True)
            text = done.stdout.decode().split("result ")[1].splitlines()[0]
            for model, (alone, joint) in json.loads(text).items():
                best[model, side].append(alone / joint)
    for (model, side), shares in best.items():
        print(f"{model:12} {side:6} " + " ".join(f"{each:.2f}" for each in shares))


if __name__ == "__main__":
    main()
