"""Measure a tiny training in each framework of this backend, and check the figures.

``ronde run -n 2 python bench_train_program.py FRAMEWORK[+peer] ...``
"""

import sys
from math import prod

import ronde.torch as hvd
from ronde import bench
from ronde.bench import MODELS, PORTABLE, Phase, TrainOptions, Variant, build_keras
from ronde.session import import_framework

TINY = {"batch": 4, "rounds": 1, "steps": 2, "warmup": 1, "device": "cpu"}
COMMUNICATING = {Variant.ALL_RANKS, Variant.BARE, Variant.PEER}


def measure(framework: str, *, is_peered: bool) -> None:
    # XLA takes many seconds to compile convolutions.
    model = MODELS["mlp" if framework == "jax" else "mnist_cnn"]
    options = TrainOptions(model, framework=framework, is_peered=is_peered, **TINY)
    outcome = bench.measure(options)
    assert outcome.is_in_step, framework
    expected = set(Variant) - {Variant.PARAMETER_SERVER, Variant.DATA_PARALLEL}
    expected -= set() if is_peered else {Variant.PEER}
    expected -= set() if is_peered and framework == "keras" else {Variant.BARE}
    (times,) = outcome.rounds
    # JAX returns before a step is over.
    num_timed = len(times[Variant.ALL_RANKS].steps_s)
    assert num_timed == (0 if framework == "jax" else hvd.size()), framework
    assert (outcome.gradients, outcome.buckets) == ((), None)
    assert set(times) == expected, times
    for variant, block in times.items():
        phases = dict(block.phases_s)
        assert phases[Phase.FORWARD] > 0, (framework, variant, phases)
        without = times[Variant.NO_COMMUNICATION]
        if variant in COMMUNICATING:
            longer = phases[Phase.BACKWARD] - without.phases_s[Phase.BACKWARD]
            assert abs(longer - (block.step_s - without.step_s)) < 1e-9
    backend = outcome.setting.backend
    assert backend == (framework if framework != "keras" else keras_backend())


def keras_backend() -> str:
    return import_framework("keras").backend.backend()


def count_parameters() -> None:
    keras = import_framework("keras")
    for name in PORTABLE:
        model = build_keras(keras, MODELS[name])
        sizes = [prod(each.shape) for each in model.trainable_variables]
        assert sum(sizes) == MODELS[name].num_parameters, name
        assert model.output_shape == (None, MODELS[name].num_classes), name


def main() -> None:
    hvd.init()
    for word in sys.argv[1:]:
        framework, _, peer = word.partition("+")
        measure(framework, is_peered=bool(peer))
    if keras_backend() == "tensorflow" and hvd.rank() == 0:
        count_parameters()
    hvd.shutdown()


if __name__ == "__main__":
    main()
