"""Make a small Llama with random weights and a tokenizer, to try ronde serve with.

    python examples/make_llama.py /tmp/llama
    ronde serve /tmp/llama -n 2

It answers with nonsense, but always with the same.
"""

import argparse
from itertools import product
from string import ascii_lowercase

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {  # width, layers, inner width
    "small": (128, 4, 352),  # 1 million parameters
    "medium": (512, 8, 1408),  # 25 million
}
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}<|{{ each.role }}|>{{ each.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of pairs of letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(ascii_lowercase, repeat=2))
    words = [*SPECIAL, *letters, *("".join(pair) for pair in pairs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        chat_template=TEMPLATE,
    )


def make_model(folder: str, size: str = "small", seed: int = 0) -> None:
    """Save a model and its tokenizer in a folder."""
    torch.manual_seed(seed)  # the same weights each time
    tokenizer = make_tokenizer()
    width, num_layers, inner_width = SIZES[size]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=inner_width,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        initializer_range=0.1,  # wide, so that tokens vary
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a small Llama to serve.")
    parser.add_argument("folder")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_model(options.folder, options.size, options.seed)
