"""A decoder-only language model of GPT-2's form."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from ronde.bench.training.catalogue import TransformerShape


class Transformer(nn.Module):
    """Embeddings, blocks of attention and a wide layer, and a head tied to the input.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019:
    normalisation before each part and after the last, learned positions, GELU. Without
    dropout.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.num_words, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.context, shape.width))
        self.blocks = nn.Sequential(
            *(Block(shape.width, shape.num_heads) for _ in range(shape.num_layers))
        )
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (n, tokens, words) for tokens of shape (n, tokens)."""
        features = self.words(tokens) + self.positions[: tokens.shape[1]]
        return linear(self.norm(self.blocks(features)), self.words.weight)


class Block(nn.Module):
    """Attention to what came before, then a layer four times as wide."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.to_heads = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape, (n, tokens, width)."""
        features = features + self._attention(self.norm(features))
        return features + self.wide(features)

    def _attention(self, features: Tensor) -> Tensor:
        heads = self.to_heads(features).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.from_heads(mixed.transpose(1, 2).flatten(2))
