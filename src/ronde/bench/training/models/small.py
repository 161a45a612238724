"""The small networks, which a CPU trains in milliseconds a step."""

from itertools import pairwise

from torch import nn


class MnistCnn(nn.Sequential):
    """The network of Horovod's MNIST example: 0.02 M parameters."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(),
            nn.Linear(50, num_classes),
        )  # fmt: skip


class LeNet5(nn.Sequential):
    """The network of LeCun et al. 1998 as it is built today: 0.06 M parameters.

    Every map of C3 sees all maps of S2 and the pools have no weights; the paper's own
    count of 60,000 leaves some of those connections out.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(),
            nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, num_classes),
        )  # fmt: skip


class Mlp(nn.Sequential):
    """Three wide layers: 15.8 M parameters, little compute for much communication."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Linear(784, 4096), nn.ReLU(),
            nn.Linear(4096, 3072), nn.ReLU(), nn.Linear(3072, num_classes),
        )  # fmt: skip


class Cnn(nn.Sequential):
    """Seven convolutions on 32 x 32 pixels: 8.6 M parameters."""

    def __init__(self, num_classes: int) -> None:
        widths = [3, 64, 128, 256, 512, 512, 512, 512]
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            if number in (1, 3, 5):
                layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)]
        super().__init__(*layers)
