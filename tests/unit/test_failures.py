"""What torch says of a failed collective, in one sentence."""

import pytest

from ronde.collectives import ErrorContext
from ronde.errors import CollectiveError, PeerLostError

SCENE = ErrorContext("all_reduce", 0, 2, 60.0)
HEAD = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
VERSION = " (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
TWICE = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 8000"
GONE = "remote process exited or there was a network error, NCCL version 2.28.9\n"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            (
                f"{HEAD}invalid usage{VERSION}ncclInvalidUsage: This usually reflects "
                f"invalid usage of NCCL library.\nLast error:\n{TWICE}\n"
            ),
            CollectiveError,
            f"; NCCL: {TWICE}",
        ),
        (
            (
                f"{HEAD}{GONE}ncclRemoteError: A call failed possibly due to a network "
                "error.\nLast error:\nNET/Socket : peer 127.0.0.1 has closed connection"
            ),
            PeerLostError,
            "failed because another rank was lost",
        ),
        (
            "[enforce fail at x.cc:9] . Timed out waiting 60000ms for recv\nadvice",
            CollectiveError,
            "timed out after 60 s without an answer (Timed out",
        ),
    ],
)
def test_the_first_sentence_and_what_nccl_says_last_are_told(said, kind, words):
    error = SCENE.explain(RuntimeError(said))
    assert type(error) is kind
    assert words in str(error)
    assert "\n" not in str(error)
