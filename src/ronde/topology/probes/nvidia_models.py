"""Compute capabilities of GPUs whose links matter, by the names of their models."""

import re

from ronde.topology.graph import UNKNOWN

_CAPABILITIES = {
    60: "P100",
    61: "P4 P40",
    70: "V100 V100S",
    75: "T4",
    80: "A100 A800 A30 A100X",
    86: "A2 A10 A10G A16 A40 A6000 3090",
    89: "L4 L20 L40 L40S",
    90: "H20 H100 H200 H800 GH200",
    100: "B100 B200 GB200",
    103: "B300 GB300",
}
_BY_WORD = {word: sm for sm, words in _CAPABILITIES.items() for word in words.split()}


def compute_capability(title: str) -> int:
    """Return 90 for ``NVIDIA H100 80GB HBM3``; ``UNKNOWN`` for models not listed.

    Source: https://developer.nvidia.com/cuda-gpus
    """
    words = re.split(r"[^A-Z0-9]+", title.upper())
    return next((_BY_WORD[word] for word in words if word in _BY_WORD), UNKNOWN)
