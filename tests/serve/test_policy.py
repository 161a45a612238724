"""Admission and the rules of requests: pure functions."""

import pytest
from tests.serve.model import CAPACITY

from ronde.errors import UsageError
from ronde.serve import (
    POLICIES,
    Capacity,
    InferenceRequest,
    TokenCounts,
    require_servable,
)

SMALL = Capacity(6, block_tokens=4, max_requests=3, max_len=100, vocabulary=9)
LONG, SHORT = (
    TokenCounts(4, 8),
    TokenCounts(1, 3),
)  # 3 blocks and 1 at the end; 2 and 1 at the start


@pytest.mark.parametrize(
    ("policy", "running", "waiting", "number"),
    [
        ("guaranteed_no_evict", [], [LONG, LONG, SHORT], 2),
        ("guaranteed_no_evict", [LONG], [SHORT, LONG], 1),
        ("guaranteed_no_evict", [SHORT, SHORT, SHORT], [SHORT], 0),
        ("guaranteed_no_evict", [LONG._replace(num_made=7)], [LONG, SHORT], 1),
        ("max_utilization", [], [LONG, LONG, LONG], 3),
        ("max_utilization", [LONG._replace(num_made=4)], [LONG, LONG], 1),
        ("static_batch", [SHORT], [SHORT], 0),
        ("static_batch", [], [LONG, SHORT, SHORT], 3),
        ("static_batch", [], [], 0),
    ],
)
def test_requests_start_in_order_as_long_as_there_is_room(
    policy, running, waiting, number
):
    assert POLICIES[policy](running, waiting, SMALL) == number


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": -1}, "id must be from 0 to 18446744073709551615, got -1"),
        ({"prompt": ()}, "prompt must be at least one token, got none"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to 61 after a prompt of 3"),
        ({"max_tokens": 62}, "max_tokens must be from 1 to 61 after a prompt of 3"),
        ({"prompt": (1,) * 64}, "max_tokens must be from 1 to 0 after a prompt of 64"),
        ({"temperature": -1.0}, "temperature must be a number from 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a number from 0, got nan"),
        ({"top_k": -2}, "top_k must be a whole number from 0, got -2"),
        ({"prompt": (3, 23)}, r"stop_ids must be tokens from 0 to 22, got \[23\]"),
        ({"stop_ids": (-1,)}, r"stop_ids must be tokens from 0 to 22, got \[-1\]"),
        ({"num_made": 4}, "num_made must be from 0 to 3, got 4"),
        ({"prompt": ("a",)}, r"types of its fields: it.prompt\[0\] must be int"),
        (
            {"max_tokens": 2.5},
            "types of its fields: it.max_tokens must be int, got 2.5",
        ),
        ({"seed": object()}, "types of its fields: Object of type object"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(changes, message):
    request = InferenceRequest(7, (1, 2, 3), 4)
    require_servable(request, CAPACITY)
    with pytest.raises(UsageError, match=message):
        require_servable(request._replace(**changes), CAPACITY)


def test_a_request_that_never_fits_is_refused_with_the_sum():
    message = "must be at most 6 blocks of 4 tokens, got 7"
    with pytest.raises(UsageError, match=message):
        require_servable(InferenceRequest(7, (1,) * 20, 5), SMALL)
