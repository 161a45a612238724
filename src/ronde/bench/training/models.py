"""The models of the catalogue, in torch.nn alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad

from ronde.bench.training.catalogue import (
    CHARACTERS,
    GPT2_SMALL,
    MODELS,
    TransformerShape,
)

_gelu = partial(gelu, approximate="tanh")


def _alexnet(num_classes: int) -> nn.Module:
    """Make five convolutions and three wide layers for 224 x 224 pixels.

    Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural
    networks", 2014, as torchvision has it: one tower, no response normalisation.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
        nn.Linear(4096, num_classes),
    )  # fmt: skip


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
    """Four branches side by side."""

    def __init__(
        self, channels: int, widths: tuple[int, int, int, int, int, int]
    ) -> None:
        super().__init__()
        one, to_three, three, to_five, five, projection = widths
        branches = (
            (_convolution(channels, one, 1),),
            (_convolution(channels, to_three, 1), _convolution(to_three, three, 3)),
            (_convolution(channels, to_five, 1), _convolution(to_five, five, 3)),
            (nn.MaxPool2d(3, 1, padding=1), _convolution(channels, projection, 1)),
        )
        self.branches = nn.ModuleList(nn.Sequential(*layers) for layers in branches)

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([branch(maps) for branch in self.branches], dim=1)


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Module:
    normalized = _normalized(channels, width, kernel, stride, eps=1e-3)
    return nn.Sequential(*normalized, nn.ReLU(inplace=True))


def _halving(kernel: int) -> nn.Module:
    return nn.MaxPool2d(kernel, 2, ceil_mode=True)


def _auxiliary_classifier(channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), _convolution(channels, 128, 1), nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024), nn.ReLU(inplace=True), nn.Dropout(0.7),
        nn.Linear(1024, num_classes),
    )  # fmt: skip


class Residual(nn.Module):
    """Residual block: ReLU(body(x) + shortcut(x))."""

    def __init__(self, channels: int, width: int, stride: int, kind: str) -> None:
        super().__init__()
        narrow = width // 4
        steps = [(channels, width, 3, stride), (width, width, 3, 1)]
        if kind == "bottleneck":
            steps = [(channels, narrow, 1, 1), (narrow, narrow, 3, stride)]
            steps.append((narrow, width, 1, 1))
        body: list[nn.Module] = []
        for step in steps:
            body += [_normalized(*step), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*body[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if (channels, stride) != (width, 1):
            self.shortcut = _normalized(channels, width, 1, stride)
            if kind == "padded":
                self.shortcut = PaddedShortcut(width - channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, maps: Tensor) -> Tensor:
        return self.activation(self.body(maps) + self.shortcut(maps))


class PaddedShortcut(nn.Module):
    """Every second pixel, zeros for missing channels: option A of He et al. 2016."""

    def __init__(self, num_missing: int) -> None:
        super().__init__()
        self.num_missing = num_missing

    def forward(self, maps: Tensor) -> Tensor:
        return pad(maps[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.num_missing))


def _resnet18(num_classes: int) -> nn.Module:
    """Make 18 layers for 224 x 224 pixels.

    Source: He et al., "Deep residual learning for image recognition", 2016, table 1.
    """
    stages = _stages("basic", 64, [(64, 2), (128, 2), (256, 2), (512, 2)])
    return nn.Sequential(*_stem(), *stages, *_classifier(512, num_classes))


def _resnet50(num_classes: int) -> nn.Module:
    """Make the network of 50 layers for 224 x 224 pixels.

    Source: as ``_resnet18``, with the stride in the 3 x 3 convolution ("v1.5"), which
    is the variant whose multiply-adds are quoted as 4.09 G.
    """
    sizes = [(256, 3), (512, 4), (1024, 6), (2048, 3)]
    stages = _stages("bottleneck", 64, sizes)
    return nn.Sequential(*_stem(), *stages, *_classifier(2048, num_classes))


def _resnet20(num_classes: int) -> nn.Module:
    """Make 20 layers for CIFAR: as ``_resnet18``, section 4.2 with n = 3."""
    stages = _stages("padded", 16, [(16, 3), (32, 3), (64, 3)])
    first = [_normalized(3, 16, 3), nn.ReLU(inplace=True)]
    return nn.Sequential(*first, *stages, *_classifier(64, num_classes))


def _stem() -> list[nn.Module]:
    pool = nn.MaxPool2d(3, 2, padding=1)
    return [_normalized(3, 64, 7, stride=2), nn.ReLU(inplace=True), pool]


def _stages(
    kind: str, channels: int, sizes: Sequence[tuple[int, int]]
) -> Iterator[nn.Module]:
    """Yield so many blocks of so many channels; all but the first begin by halving."""
    for number, (width, depth) in enumerate(sizes):
        yield Residual(channels, width, 2 if number else 1, kind)
        yield from (Residual(width, width, 1, kind) for _ in range(depth - 1))
        channels = width


def _normalized(
    channels: int, width: int, kernel: int, stride: int = 1, eps: float = 1e-5
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width, eps),
    )


def _classifier(channels: int, num_classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]


def _mnist_cnn(num_classes: int) -> nn.Module:
    """Make the network of Horovod's MNIST example: 0.02 M parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(),
        nn.Linear(50, num_classes),
    )  # fmt: skip


def _lenet5(num_classes: int) -> nn.Module:
    """Make the network of LeCun et al. 1998 as it is built today: 0.06 M parameters."""
    # Every map of C3 sees all maps of S2 and the pools have no weights; the paper's own
    # count of 60,000 leaves some of those connections out.
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(),
        nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, num_classes),
    )  # fmt: skip


def _mlp(num_classes: int) -> nn.Module:
    """Make three wide layers: 15.8 M parameters, little compute for them."""
    return nn.Sequential(
        nn.Linear(784, 4096), nn.ReLU(),
        nn.Linear(4096, 3072), nn.ReLU(), nn.Linear(3072, num_classes),
    )  # fmt: skip


def _cnn(num_classes: int) -> nn.Module:
    """Make seven convolutions for 32 x 32 pixels: 8.6 M parameters."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise([3, 64, 128, 256, *[512] * 4])):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        if number in (1, 3, 5):
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_classifier(512, num_classes))


class Transformer(nn.Module):
    """Embeddings, blocks of attention and a wide layer, and a head tied to the input.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019:
    normalisation before each part and after the last, learned positions, GELU. Without
    dropout.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        d = shape.width
        self.words = nn.Embedding(shape.num_words, d)
        self.positions = nn.Parameter(torch.empty(shape.context, d))
        self.blocks = nn.ModuleList()
        for _ in range(shape.num_layers):
            sizes = (d, shape.num_heads, 4 * d, 0.0)
            form = nn.TransformerEncoderLayer(
                *sizes, _gelu, batch_first=True, norm_first=True
            )
            self.blocks.append(form)
        self.norm = nn.LayerNorm(d)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (n, tokens, words) for tokens of shape (n, tokens)."""
        length = tokens.shape[1]
        features = self.words(tokens) + self.positions[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, features.device)
        for block in self.blocks:
            features = block(features, mask, is_causal=True)
        return linear(self.norm(features), self.words.weight)


def build(name: str) -> nn.Module:
    return FACTORIES[name](MODELS[name].num_classes)


FACTORIES: Mapping[str, Callable[[int], nn.Module]] = {
    "alexnet": _alexnet,
    "cnn": _cnn,
    "googlenet": GoogLeNet,
    "gpt2": lambda _: Transformer(GPT2_SMALL),
    "lenet5": _lenet5,
    "mlp": _mlp,
    "mnist_cnn": _mnist_cnn,
    "resnet18": _resnet18,
    "resnet20": _resnet20,
    "resnet50": _resnet50,
    "transformer": lambda _: Transformer(CHARACTERS),
}  # makes a model for so many classes, by name
