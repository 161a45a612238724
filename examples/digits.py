"""Train on the handwritten digits that scikit-learn ships: 1,797 images of 8 x 8.

Run it as ``python digits.py``, ``ronde run -n 2 python digits.py``,
``torchrun --nproc-per-node 2 digits.py`` or ``mpirun -n 2 python digits.py``.

``ronde run -n 2 --max-restarts 5 python digits.py --checkpoint digits.pt`` goes on from
the last epoch when a rank is killed.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from training import Images, Parser, options_of, run, train_and_report

_NUM_TRAIN = 1437


def make_model() -> nn.Module:
    """Make a network of three convolutions, 65,994 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def read_digits() -> Images:
    """Read the digits: 1,437 to train on and 360 for the test, always the same."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    answers = torch.tensor(labels, dtype=torch.int64)[order]
    return Images(
        images[:_NUM_TRAIN],
        answers[:_NUM_TRAIN],
        images[_NUM_TRAIN:],
        answers[_NUM_TRAIN:],
    )


def main() -> None:
    """Train, test and report."""
    parser = Parser(
        "Train on scikit-learn's handwritten digits.", epochs=30, batch_size=64, lr=0.05
    )
    options = options_of(parser.parse_args())
    train_and_report("digits", make_model, read_digits(), options)


if __name__ == "__main__":
    run(main)
