"""Compressed gradients train as well as plain ones: Fashion-MNIST, two hundred steps.

``benchmarks/convergence.py`` does the same at length, with its own training loop.
"""

import argparse
import dataclasses
import math

import pytest
from benchmarks.convergence import COMPRESSIONS, DATA, Course, read_fashion, train
from tests.ranks import run_ranks

NUM_TRAINED = 6_400
OPTIONS = argparse.Namespace(epochs=2, batch=32, lr=0.1, seed=1)


def course_of(name: str) -> Course:
    def run(communicator):
        images = read_fashion(DATA)
        few = dataclasses.replace(
            images,
            train=images.train[:NUM_TRAINED],
            train_labels=images.train_labels[:NUM_TRAINED],
        )
        return train(communicator, few, COMPRESSIONS[name], OPTIONS)

    courses = run_ranks(2, run, timeout_s=500.0)
    assert courses[0].accuracies == courses[1].accuracies
    return courses[0]


@pytest.fixture(scope="module")
def plain():
    return course_of("none")


@pytest.mark.soak
@pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the Debian package dataset-fashion-mnist"
)
@pytest.mark.parametrize(
    ("name", "saving"),
    [("fp16", 2), ("bf16", 2)],
)
def test_converges_like_the_plain_run(plain, name, saving):
    course = course_of(name)
    assert plain.step_bytes >= saving * course.step_bytes
    expected, actual = plain.accuracies[-1], course.accuracies[-1]
    assert expected > 0.75
    # Two counts out of 10,000 images: four standard deviations of their difference.
    limit = 4 * math.sqrt(2 * expected * (1 - expected) / 10_000)
    assert actual > expected - limit
