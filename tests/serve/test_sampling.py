"""Tokens are drawn from the right distribution, by seed and position alone."""

from collections import Counter
from math import sqrt

import pytest
import torch
from tests.serve.model import answer_to, random_requests

from ronde.serve import InferenceRequest, choose_token

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 1.9])
NUM = 4000


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"top_p": 0.7}, [1, 4]),
        ({"top_k": 3, "top_p": 0.99}, [1, 3, 4]),
        ({"top_p": 0.01}, [1]),
    ],
)
def test_tokens_are_as_frequent_as_their_share(options, kept):
    request = InferenceRequest(
        1, (0,), 1, **({"temperature": 1.0, "seed": 3} | options)
    )
    drawn = Counter(choose_token(LOGITS, request, i)[0] for i in range(NUM))
    assert drawn.keys() <= {*kept}
    shares = (LOGITS[kept].double() / request.temperature).softmax(0).tolist()
    for token, share in zip(kept, shares, strict=True):
        deviation = sqrt(share * (1 - share) / NUM)
        assert abs(drawn[token] / NUM - share) <= 5 * deviation


def test_the_log_probability_is_that_of_the_model():
    token, logprob = choose_token(LOGITS, InferenceRequest(1, (0,), 1), 0)
    assert token == 1
    assert logprob == pytest.approx(LOGITS.double().log_softmax(0)[1].item(), abs=1e-12)


def test_seeds_and_positions_draw_different_tokens():
    request = InferenceRequest(1, (0,), 1, temperature=1.5)
    rows = {
        tuple(choose_token(LOGITS, request._replace(seed=seed), i)[0] for i in range(9))
        for seed in range(200)
    }
    assert len(rows) > 190


def test_a_resumed_request_goes_on_as_if_it_had_not_stopped(chance):
    for request in random_requests(chance, 30):
        whole = answer_to(request)
        for cut in range(1, len(whole)):
            rest = request._replace(
                prompt=(*request.prompt, *whole[:cut]),
                max_tokens=request.max_tokens - cut,
                num_made=cut,
            )
            assert answer_to(rest) == whole[cut:]
