"""Sizes and durations, between text and numbers.

Binary units are powers of 1024 (``KiB``, and ``K`` alone as nccl-tests has it), decimal
ones powers of 1000 (``kB``, ``GB/s``). Case does not matter.
"""

import math
import re
from fractions import Fraction

from ronde.errors import UsageError

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_SIZE_UNITS = (
    {"": 1, "b": 1}
    | {u.lower(): 1024**i for i, u in enumerate(_BINARY, 1)}
    | {u[0].lower(): 1024**i for i, u in enumerate(_BINARY, 1)}
    | {f"{u[0].lower()}b": 1000**i for i, u in enumerate(_BINARY, 1)}
)

_DURATION_UNITS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}

_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?|\.[0-9]{1,18}"


def parse_size_bytes(text: str, option: str = "") -> int:
    """Read a size such as ``4096``, ``25MiB``, ``8K`` or ``1.5GB`` in bytes."""
    of = f"{option}: " if option else ""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _SIZE_UNITS:
        raise UsageError(
            f"{of}size must be a number of bytes or one with a unit, got {text!r}. "
            f"Write it as 4096, 25MiB or 1.5GB."
        )
    size = Fraction(match[1]) * _SIZE_UNITS[match[2]]
    if size.denominator != 1:
        raise UsageError(
            f"{of}size must be a whole number of bytes, got {text!r} = {float(size)} "
            f"bytes. Give it in a smaller unit."
        )
    return int(size)


def format_size(size_bytes: int) -> str:
    """Write a size in the largest binary unit, rounded to four digits: ``25MiB``."""
    if size_bytes < 0:
        raise UsageError(f"size_bytes must be at least 0, got {size_bytes}.")
    exponent = 0
    # 1023.5 would be written as 1024: that is one of the next unit.
    while exponent < len(_BINARY) and size_bytes / 1024**exponent >= 1023.5:
        exponent += 1
    if exponent == 0:
        return f"{size_bytes}B"
    return f"{_digits(size_bytes / 1024**exponent, 4)}{_BINARY[exponent - 1]}"


def parse_duration_s(text: str, option: str = "") -> float:
    """Read a duration such as ``0.5`` (seconds), ``5s``, ``250ms`` or ``1h30m``."""
    of = f"{option}: " if option else ""
    stripped = text.strip().lower()
    if re.fullmatch(_NUMBER, stripped, re.ASCII):
        return float(stripped)
    part = rf"({_NUMBER})(us|ms|[smhd])"
    units = [match[2] for match in re.finditer(part, stripped)]
    factors = [_DURATION_UNITS[unit] for unit in units]
    is_whole = re.fullmatch(rf"(?:{part})+", stripped, re.ASCII) is not None
    if not is_whole or factors != sorted(set(factors), reverse=True):
        raise UsageError(
            f"{of}duration must be seconds or numbers with units, the largest first, "
            f"got {text!r}. Write it as 5s, 2m or 1h30m."
        )
    numbers = (Fraction(match[1]) for match in re.finditer(part, stripped))
    return float(sum(n * f for n, f in zip(numbers, factors, strict=True)))


def format_duration(duration_s: float) -> str:
    """Write a duration for a reader: ``250us``, ``1.25s``, ``1m30s``, ``2h5m``."""
    if not 0 <= duration_s < math.inf:
        raise UsageError(f"duration_s must be finite and at least 0, got {duration_s}.")
    if duration_s < 59.95:
        for unit, factor in (("us", 1e-6), ("ms", 1e-3)):
            # 999.6 us would be written as 1000us.
            if 0 < duration_s < 999.5 * factor:
                return f"{_digits(duration_s / factor, 3)}{unit}"
        return f"{_digits(duration_s, 3)}s"
    seconds = round(duration_s)
    if seconds < 3600:
        parts = ((seconds // 60, "m"), (seconds % 60, "s"))
    else:
        minutes = round(seconds / 60)
        parts = ((minutes // 60, "h"), (minutes % 60, "m"))
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def _digits(value: float, count: int) -> str:
    """Write ``value`` with ``count`` significant digits or more, and no exponent."""
    if value == 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
