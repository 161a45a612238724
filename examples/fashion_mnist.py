"""Train on Fashion-MNIST (or MNIST): 60,000 images of 28 x 28 in ten classes.

Run it as ``python fashion_mnist.py --data DIR``, ``ronde run -n 2 python
fashion_mnist.py --data DIR``, ``torchrun --nproc-per-node 2 fashion_mnist.py --data
DIR`` or ``mpirun -n 2 python fashion_mnist.py --data DIR``. On Debian
``apt-get install dataset-fashion-mnist`` puts the files into
``/usr/share/datasets/fashion-mnist``.
"""

from pathlib import Path

import numpy as np
import torch
from idx import read_images_and_labels
from torch import Tensor, nn
from training import Images, Parser, options_of, run, train_and_report


def make_model() -> nn.Module:
    """Make a network of two convolutions, 206,922 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def read_fashion(directory: Path) -> Images:
    """Read the four files; pixels become -1 to 1.

    Raises:
        UsageError: A file is missing or damaged.
    """
    train, train_labels = read_images_and_labels(directory, "train")
    test, test_labels = read_images_and_labels(directory, "t10k")
    return Images(
        _pixels(train), _labels(train_labels), _pixels(test), _labels(test_labels)
    )


def _pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images.astype(np.float32)).unsqueeze(1) / 127.5 - 1


def _labels(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def main() -> None:
    """Train, test and report."""
    parser = Parser(
        "Train on the IDX files of Fashion-MNIST or MNIST.",
        epochs=3,
        batch_size=64,
        lr=0.05,
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="directory of the four IDX files"
    )
    arguments = parser.parse_args()
    # Read before anything starts: a damaged file must cost nothing.
    images = read_fashion(arguments.data)
    train_and_report("fashion-mnist", make_model, images, options_of(arguments))


if __name__ == "__main__":
    run(main)
