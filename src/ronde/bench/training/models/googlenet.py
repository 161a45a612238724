"""GoogLeNet with batch normalisation and its two auxiliary classifiers."""

import torch
from torch import Tensor, nn


class GoogLeNet(nn.Module):
    """Nine inception blocks on 224 x 224 pixels.

    In training it returns the logits of the classifier and of both auxiliary ones; in
    evaluation a tuple of the classifier's alone.

    Source: Szegedy et al., "Going deeper with convolutions", 2015, in torchvision's
    variant: batch normalisation after every convolution, and 3 x 3 where the paper has
    5 x 5. The published parameters and multiply-adds are that variant's.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.to_4a = nn.Sequential(
            _convolution(3, 64, 7, stride=2), _halving(3),
            _convolution(64, 64, 1), _convolution(64, 192, 3), _halving(3),
            Inception(192, (64, 96, 128, 16, 32, 32)),
            Inception(256, (128, 128, 192, 32, 96, 64)), _halving(3),
            Inception(480, (192, 96, 208, 16, 48, 64)),
        )  # fmt: skip
        self.to_4d = nn.Sequential(
            Inception(512, (160, 112, 224, 24, 64, 64)),
            Inception(512, (128, 128, 256, 24, 64, 64)),
            Inception(512, (112, 144, 288, 32, 64, 64)),
        )
        self.to_logits = nn.Sequential(
            Inception(528, (256, 160, 320, 32, 128, 128)), _halving(2),
            Inception(832, (256, 160, 320, 32, 128, 128)),
            Inception(832, (384, 192, 384, 48, 128, 128)),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(1024, num_classes),
        )  # fmt: skip
        self.auxiliary_4a = _auxiliary_classifier(512, num_classes)
        self.auxiliary_4d = _auxiliary_classifier(528, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return logits of shape (n, num_classes), the classifier's own first."""
        at_4a = self.to_4a(images)
        at_4d = self.to_4d(at_4a)
        logits = self.to_logits(at_4d)
        if not self.training:
            return (logits,)
        return logits, self.auxiliary_4a(at_4a), self.auxiliary_4d(at_4d)


class Inception(nn.Module):
    """Four branches side by side.

    Args:
        channels: Of the input.
        widths: Of the 1 x 1 branch; of the reduction and the 3 x 3 after it; of the
            reduction and the "5 x 5" after it; of the projection after the pool.
    """

    def __init__(
        self, channels: int, widths: tuple[int, int, int, int, int, int]
    ) -> None:
        super().__init__()
        one, to_three, three, to_five, five, projection = widths
        self.branches = nn.ModuleList(
            [
                _convolution(channels, one, 1),
                nn.Sequential(
                    _convolution(channels, to_three, 1),
                    _convolution(to_three, three, 3),
                ),
                nn.Sequential(
                    _convolution(channels, to_five, 1), _convolution(to_five, five, 3)
                ),
                nn.Sequential(
                    nn.MaxPool2d(3, 1, padding=1), _convolution(channels, projection, 1)
                ),
            ]
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Return the branches' maps, one after another in the channels."""
        return torch.cat([branch(maps) for branch in self.branches], dim=1)


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width, eps=1e-3),
        nn.ReLU(inplace=True),
    )


def _halving(kernel: int) -> nn.Module:
    return nn.MaxPool2d(kernel, 2, ceil_mode=True)


def _auxiliary_classifier(channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), _convolution(channels, 128, 1), nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024), nn.ReLU(inplace=True), nn.Dropout(0.7),
        nn.Linear(1024, num_classes),
    )  # fmt: skip
