"""A model of transformers that fails by order, and its answers to random requests.

    python -m tests.soak.serve_model FOLDER 40 1

prints 40 requests of seed 1 and their answers, each made without a batch.
"""

import json
import random
import sys
from typing import Any

import torch
from tests.serve.faulty_engine import FaultyEngine
from transformers import AutoModelForCausalLM

import ronde.serve.engines.transformers as own
from ronde.plain_values import to_plain
from ronde.serve import InferenceRequest, choose_token


def make_engine(config: Any, info: Any) -> FaultyEngine:
    return FaultyEngine(own.make_engine(config, info), info.rank)


@torch.inference_mode()
def _answer(model: Any, request: InferenceRequest) -> list[int]:
    made: list[int] = []
    tokens, cache = torch.tensor([request.prompt]), None
    while len(made) < request.max_tokens:
        out = model(tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        made.append(choose_token(out.logits[0, -1], request, len(made))[0])
        tokens = torch.tensor([made[-1:]])
    return made


def main(folder: str, num: int, seed: int) -> None:
    chance = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()
    for _ in range(num):
        prompt = chance.choices(range(model.config.vocab_size), k=chance.randint(1, 60))
        request = InferenceRequest(
            id=0,
            prompt=tuple(prompt),
            max_tokens=chance.randint(1, 30),
            temperature=chance.choice((0.0, 0.0, 0.9)),
            seed=chance.getrandbits(64),
        )
        print(json.dumps([to_plain(request), _answer(model, request)]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
