"""CPU sets as integers with one bit per CPU, and the kernel's text formats for them.

The integer ``0b101`` is the set ``{0, 2}``.
"""

import re

from ronde.units import format_list as format_list  # noqa: PLC0414  for users of sets

MAX_CPU = (1 << 16) - 1
"""No kernel supports more CPUs; a list with higher numbers could exhaust the memory."""
_WORD = re.compile(r"(?:0x)?[0-9a-fA-F]{0,8}")


def parse_list(text: str) -> int:
    """Parse a list such as ``0-3,8``; empty text is the empty set."""
    bits = 0
    for part in text.split(",") if text else ():
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last <= MAX_CPU:
            raise ValueError(f"{part!r} is not a CPU or a range of CPUs")
        bits |= (1 << (last + 1)) - (1 << first)
    return bits


def parse_mask(text: str) -> int:
    """Parse a mask of 32-bit words such as ``ff,1``; empty text is the empty set."""
    words = text.split(",", MAX_CPU // 32 + 1)
    if not all(map(_WORD.fullmatch, words)):
        raise ValueError(f"{text!r} is not a mask of CPUs")
    return int("".join(word.removeprefix("0x").zfill(8) for word in words), 16)


def members(bits: int) -> list[int]:
    found: list[int] = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
