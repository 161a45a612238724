"""Models that ``ronde bench train`` measures, and their sizes; no import of torch.

As usual, multiply-adds are counted for convolutions and matrix products in one forward
pass of one sample; one multiply-add is two FLOP. Figures with a formula in a comment
are derived, not published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Unit(StrEnum):
    """Unit of a model's throughput."""

    IMAGES = "images"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Size of a model, its input and its usual batch."""

    name: str  # as on the command line
    unit: Unit
    sample_shape: tuple[int, ...]  # for language models the context's tokens
    num_classes: int  # for language models the vocabulary size
    batch: int  # default number of samples per step and rank
    num_parameters: int
    forward_macs: int  # multiply-adds of inference on one sample

    @property
    def is_of_maps(self) -> bool:
        """Return True if a sample has channels, height and width."""
        return len(self.sample_shape) == 3

    @property
    def units_per_sample(self) -> int:
        return 1 if self.unit is Unit.IMAGES else self.sample_shape[0]


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a decoder-only language model like GPT-2."""

    num_layers: int
    width: int  # features per token
    num_heads: int  # attention heads; divides ``width``
    context: int  # tokens per sample
    num_words: int  # size of the vocabulary

    @property
    def num_parameters(self) -> int:
        """Count 12 d^2 weights and 13 d biases and gains per block, with width d."""
        d = self.width
        embeddings = (self.num_words + self.context) * d
        return embeddings + self.num_layers * (12 * d * d + 13 * d) + 2 * d

    @property
    def forward_macs(self) -> int:
        """Count multiply-adds as A. Karpathy's nanoGPT does; attention is unmasked."""
        t, d = self.context, self.width
        block = 12 * t * d * d + 2 * t * t * d
        return self.num_layers * block + t * d * self.num_words


GPT2_SMALL = TransformerShape(12, 768, 12, 1024, 50257)
CHARACTERS = TransformerShape(4, 128, 4, 64, 65)
"""nanoGPT's model for a CPU, with one character per token."""


def _language_model(name: str, shape: TransformerShape, batch: int) -> ModelFacts:
    figures = (shape.num_words, batch, shape.num_parameters, shape.forward_macs)
    return ModelFacts(name, Unit.TOKENS, (shape.context,), *figures)


_IMAGENET = (Unit.IMAGES, (3, 224, 224), 1000)
_FACTS = (
    # Sources: torchvision's model zoo for all parameters and ResNet-50's multiply-adds;
    # for the others the sum of k^2 c_in c_out h w over the layers: torchvision rounds
    # them to 0.714 and 1.498 G.
    ModelFacts("alexnet", *_IMAGENET, 8, 61_100_840, 714_188_480),
    ModelFacts("googlenet", *_IMAGENET, 4, 6_624_904, 1_498_376_192),
    ModelFacts("resnet50", *_IMAGENET, 4, 25_557_032, 4_089_000_000),
    # Source: He et al. 2016, table 6: 0.27 M parameters, shortcuts without weights;
    # multiply-adds are the sum of k^2 c_in c_out h w over the layers.
    ModelFacts("resnet20", Unit.IMAGES, (3, 32, 32), 10, 32, 269_722, 40_551_040),
    # Source: Horovod's MNIST example: 260 + 5,020 + 16,050 + 510 and 144,000 + 320,000
    # + 16,000 + 500.
    ModelFacts("mnist_cnn", Unit.IMAGES, (1, 28, 28), 10, 100, 21_840, 480_500),
    # 784-4096-3072-10: 3,215,360 + 12,585,984 + 30,730 and 784 * 4096 + 4096 * 3072 +
    # 3072 * 10.
    ModelFacts("mlp", Unit.IMAGES, (784,), 10, 32, 15_832_074, 15_824_896),
    _language_model("transformer", CHARACTERS, 12),
    # OpenAI's GPT-2 small: 124,439,808 parameters.
    _language_model("gpt2", GPT2_SMALL, 1),
)

MODELS: Mapping[str, ModelFacts] = MappingProxyType({f.name: f for f in _FACTS})
PORTABLE = ("alexnet", "googlenet", "mlp", "mnist_cnn", "resnet50")
"""The models that every framework has."""
