"""Residual networks: those for ImageNet and the one for CIFAR."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import pad

Block = Callable[[int, int, int], nn.Module]
"""Makes a block of (channels, width, stride)."""


class Residual(nn.Module):
    """A body whose result is added to what a shortcut makes of its input."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.activation = nn.ReLU(inplace=True)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the rectified sum."""
        return self.activation(self.body(maps) + self.shortcut(maps))


class PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are missing: no weights.

    Source: option A of He et al. 2016, which their CIFAR networks use.
    """

    def __init__(self, num_missing: int) -> None:
        super().__init__()
        self.num_missing = num_missing

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of half the side."""
        return pad(maps[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.num_missing))


def make_resnet18(num_classes: int) -> nn.Module:
    """Make the network of 18 layers for 224 x 224 pixels.

    Source: He et al., "Deep residual learning for image recognition", 2016, table 1.
    """
    return _make_for_image_net(_basic, (2, 2, 2, 2), num_classes, expansion=1)


def make_resnet50(num_classes: int) -> nn.Module:
    """Make the network of 50 layers for 224 x 224 pixels.

    Source: as ``make_resnet18``, with the stride in the 3 x 3 convolution ("v1.5"),
    which is the variant whose multiply-adds are quoted as 4.09 G.
    """
    return _make_for_image_net(_bottleneck, (3, 4, 6, 3), num_classes, expansion=4)


def make_resnet20(num_classes: int) -> nn.Module:
    """Make the network of 20 layers for CIFAR's 32 x 32 pixels.

    Source: as ``make_resnet18``, section 4.2 with n = 3.
    """
    return nn.Sequential(
        _convolution(3, 16, 3),
        nn.ReLU(inplace=True),
        *_stage(_basic_padded, 16, 16, 3, stride=1),
        *_stage(_basic_padded, 16, 32, 3, stride=2),
        *_stage(_basic_padded, 32, 64, 3, stride=2),
        *_classifier(64, num_classes),
    )


def _make_for_image_net(
    block: Block, depths: Sequence[int], num_classes: int, *, expansion: int
) -> nn.Module:
    layers: list[nn.Module] = [
        _convolution(3, 64, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for number, depth in enumerate(depths):
        width = 64 * 2**number * expansion
        layers += _stage(block, channels, width, depth, stride=2 if number else 1)
        channels = width
    return nn.Sequential(*layers, *_classifier(channels, num_classes))


def _stage(
    block: Block, channels: int, width: int, depth: int, *, stride: int
) -> list[nn.Module]:
    rest = [block(width, width, 1) for _ in range(depth - 1)]
    return [block(channels, width, stride), *rest]


def _basic(channels: int, width: int, stride: int) -> nn.Module:
    return Residual(
        _two_convolutions(channels, width, stride), _projection(channels, width, stride)
    )


def _basic_padded(channels: int, width: int, stride: int) -> nn.Module:
    shortcut = PaddedShortcut(width - channels) if stride > 1 else nn.Identity()
    return Residual(_two_convolutions(channels, width, stride), shortcut)


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    narrow = width // 4
    body = nn.Sequential(
        _convolution(channels, narrow, 1),
        nn.ReLU(inplace=True),
        _convolution(narrow, narrow, 3, stride),
        nn.ReLU(inplace=True),
        _convolution(narrow, width, 1),
    )
    return Residual(body, _projection(channels, width, stride))


def _two_convolutions(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        _convolution(channels, width, 3, stride),
        nn.ReLU(inplace=True),
        _convolution(width, width, 3),
    )


def _projection(channels: int, width: int, stride: int) -> nn.Module:
    if stride == 1 and channels == width:
        return nn.Identity()
    return _convolution(channels, width, 1, stride)


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width),
    )


def _classifier(channels: int, num_classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
