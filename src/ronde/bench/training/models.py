"""The models of the catalogue, built from torch.nn only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

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


class Residual(nn.Module):
    """Residual block: ReLU(body(x) + shortcut(x))."""

    def __init__(
        self, channels: int, width: int, stride: int, *, is_bottleneck: bool
    ) -> None:
        super().__init__()
        narrow = width // 4
        steps = [(channels, width, 3, stride), (width, width, 3, 1)]
        if is_bottleneck:
            steps = [(channels, narrow, 1, 1), (narrow, narrow, 3, stride)]
            steps.append((narrow, width, 1, 1))
        body: list[nn.Module] = []
        for step in steps:
            body += [_convolution(*step), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*body[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if (channels, stride) != (width, 1):
            self.shortcut = PaddedShortcut(width - channels)
            if is_bottleneck:
                self.shortcut = _convolution(channels, width, 1, stride)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, maps: Tensor) -> Tensor:
        return self.activation(self.body(maps) + self.shortcut(maps))


class PaddedShortcut(nn.Module):
    """Shortcut with stride 2 and zero-padded channels (He et al. 2016, option A)."""

    def __init__(self, num_missing: int) -> None:
        super().__init__()
        self.num_missing = num_missing

    def forward(self, maps: Tensor) -> Tensor:
        return pad(maps[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.num_missing))


class Inception(nn.Module):
    """Four branches with their channels concatenated."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        one, narrow, three, narrower, fourth, pooled = widths
        branches = (
            (_rectified(channels, one, 1),),
            (_rectified(channels, narrow, 1), _rectified(narrow, three, 3)),
            (_rectified(channels, narrower, 1), _rectified(narrower, fourth, 3)),
            (nn.MaxPool2d(3, 1, padding=1), _rectified(channels, pooled, 1)),
        )
        self.branches = nn.ModuleList(nn.Sequential(*branch) for branch in branches)

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([branch(maps) for branch in self.branches], 1)


# Output channels of GoogLeNet's inception blocks: 1 x 1; 3 x 3 and the 1 x 1 before it;
# the fourth branch's 3 x 3 and its 1 x 1; the 1 x 1 after the pooling. A lone number is
# the window of a pooling.
_INCEPTIONS: tuple[tuple[int, ...] | int, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    3,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    2,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def _googlenet(num_classes: int) -> nn.Module:
    """Build GoogLeNet as torchvision does, without the auxiliary classifiers.

    Source: Szegedy et al., "Going deeper with convolutions", 2015, table 1, with batch
    norm, and 3 x 3 in place of 5 x 5 convolutions.
    """
    layers: list[nn.Module] = [
        *(_rectified(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(_rectified(64, 64, 1), _rectified(64, 192, 3)),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
    channels = 192
    for widths in _INCEPTIONS:
        if isinstance(widths, int):
            layers.append(nn.MaxPool2d(widths, 2, ceil_mode=True))
        else:
            layers.append(Inception(channels, widths))
            channels = widths[0] + widths[2] + widths[4] + widths[5]
    pooling, flatten, linear = _classifier(channels, num_classes)
    return nn.Sequential(*layers, pooling, flatten, nn.Dropout(0.2), linear)


def _rectified(
    channels: int, width: int, kernel: int, stride: int = 1
) -> nn.Sequential:
    convolution = _convolution(channels, width, kernel, stride)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


def _alexnet(num_classes: int) -> nn.Module:
    """Build AlexNet with one tower, as torchvision does.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural
    networks", 2014.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
        nn.Linear(4096, num_classes),
    )  # fmt: skip


def _resnet50(num_classes: int) -> nn.Module:
    """Build the network of 50 layers for 224 x 224 pixels.

    Source: He et al., "Deep residual learning for image recognition", 2016, table 1,
    with the stride in the 3 x 3 convolution ("v1.5"): the variant whose multiply-adds
    are quoted as 4.09 G.
    """
    sizes = [(256, 3), (512, 4), (1024, 6), (2048, 3)]
    return nn.Sequential(
        _convolution(3, 64, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
        *_stages(64, sizes, is_bottleneck=True),
        *_classifier(2048, num_classes),
    )


def _resnet20(num_classes: int) -> nn.Module:
    """Build 20 layers for CIFAR. Source: He et al. 2016, section 4.2 with n = 3."""
    return nn.Sequential(
        _convolution(3, 16, 3),
        nn.ReLU(inplace=True),
        *_stages(16, [(16, 3), (32, 3), (64, 3)], is_bottleneck=False),
        *_classifier(64, num_classes),
    )


def _stages(
    channels: int, sizes: Sequence[tuple[int, int]], *, is_bottleneck: bool
) -> Iterator[nn.Module]:
    """Yield the blocks of all stages; ``sizes`` has each stage's width and depth.

    The first block of every stage but the first halves height and width.
    """
    for number, (width, depth) in enumerate(sizes):
        stride = 2 if number else 1
        yield Residual(channels, width, stride, is_bottleneck=is_bottleneck)
        for _ in range(depth - 1):
            yield Residual(width, width, 1, is_bottleneck=is_bottleneck)
        channels = width


def _convolution(
    channels: int, width: int, kernel: int, stride: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width),
    )


def _classifier(channels: int, num_classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]


def _mnist_cnn(num_classes: int) -> nn.Module:
    """Build the network of Horovod's MNIST example: 0.02 M parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(),
        nn.Linear(50, num_classes),
    )  # fmt: skip


def _mlp(num_classes: int) -> nn.Module:
    """Build three wide layers: 15.8 M parameters, little compute per parameter."""
    return nn.Sequential(
        nn.Linear(784, 4096), nn.ReLU(),
        nn.Linear(4096, 3072), nn.ReLU(), nn.Linear(3072, num_classes),
    )  # fmt: skip


class Transformer(nn.Module):
    """Decoder-only language model like GPT-2, without dropout.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019:
    layer norm before each sub-layer and after the last block, learned positional
    embeddings, GELU, the output layer tied to the embedding.
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


# Builders by model name; each takes the number of classes.
FACTORIES: Mapping[str, Callable[[int], nn.Module]] = {
    "alexnet": _alexnet,
    "googlenet": _googlenet,
    "gpt2": lambda _: Transformer(GPT2_SMALL),
    "mlp": _mlp,
    "mnist_cnn": _mnist_cnn,
    "resnet20": _resnet20,
    "resnet50": _resnet50,
    "transformer": lambda _: Transformer(CHARACTERS),
}
