"""nccl-tests' environment variables; does not import torch."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.world.environment import select_variables

SHOWN = (
    "NCCL_*",
    "TORCH_NCCL_*",
    "GLOO_*",
    "UCX_*",
    "OMP_*",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "RONDE_ENGINE",
    "RONDE_ALGORITHM",
)  # Results may quote these. nccl-tests records all variables, even secrets.

_SPLIT = re.compile(r"\s*(AND|OR|MOD|DIV|[&|%/])\s*(\w+)\s*", re.IGNORECASE)
_OPERATORS = {
    "AND": int.__and__,
    "OR": int.__or__,
    "MOD": int.__mod__,
    "DIV": int.__floordiv__,
}
_SIGNS = {"&": "AND", "|": "OR", "%": "MOD", "/": "DIV"}


class Split(NamedTuple):
    """Rule that assigns each rank to a group, like the color of MPI_Comm_split."""

    operator: str  # AND, OR, MOD or DIV
    operand: int

    def colour_of(self, rank: int) -> int:
        return _OPERATORS[self.operator](rank, self.operand)


class Variables(NamedTuple):
    """Settings that nccl-tests reads from the environment."""

    split: Split | None = None  # None for one group
    first_device: int | None = None  # first GPU to use; None: the local rank's
    least_busbw_gb_per_s: float | None = None  # the average must reach 0.9 of it
    shown: tuple[str, ...] = ()  # variables that results may quote


def read_variables(environ: Mapping[str, str] | None = None) -> Variables:
    values = select_variables(("NCCL_TESTS_*",), environ)
    shown = select_variables(SHOWN, environ)
    device = values.get("NCCL_TESTS_DEVICE")
    return Variables(
        split=_split(values),
        first_device=None if device is None else _integer("NCCL_TESTS_DEVICE", device),
        least_busbw_gb_per_s=_number(values, "NCCL_TESTS_MIN_BW"),
        shown=tuple(f"{name}={value}" for name, value in shown.items()),
    )


def _split(values: Mapping[str, str]) -> Split | None:
    mask = values.get("NCCL_TESTS_SPLIT_MASK")
    if mask is not None:
        return Split("AND", _integer("NCCL_TESTS_SPLIT_MASK", mask, base=16))
    text = values.get("NCCL_TESTS_SPLIT")
    if text is None:
        return None
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise UsageError(
            "NCCL_TESTS_SPLIT must be AND, OR, MOD or DIV with a number, got "
            f"{text!r}. Write it as MOD 2 or AND 0x7."
        )
    operator = _SIGNS.get(match[1], match[1].upper())
    operand = _integer("NCCL_TESTS_SPLIT", match[2], base=0)
    if operand == 0 and operator in ("MOD", "DIV"):
        raise UsageError(f"NCCL_TESTS_SPLIT must not divide by 0, got {text!r}.")
    return Split(operator, operand)


def _number(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise UsageError(f"{name} must be a number of at least 0, got {text!r}.")
    return number


def _integer(name: str, text: str, *, base: int = 10) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise UsageError(f"{name} must be a whole number of at least 0, got {text!r}.")
    return number
