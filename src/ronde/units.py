"""Convert sizes, durations and counts between text and numbers.

Binary units are powers of 1024 (``KiB``, and ``K`` alone as in nccl-tests), decimal
ones powers of 1000 (``kB``, ``GB/s``). Case does not matter.
"""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ronde.errors import UsageError

if TYPE_CHECKING:
    from fractions import Fraction

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MAX_RANGES = 4
_PREFIXES = "kmgtpe"
_POWERS = dict(enumerate(_PREFIXES, 1))
_SIZE_UNITS = {"": 1, "b": 1}
_SIZE_UNITS.update({prefix: 1024**n for n, prefix in _POWERS.items()})
_SIZE_UNITS.update({f"{prefix}ib": 1024**n for n, prefix in _POWERS.items()})
_SIZE_UNITS.update({f"{prefix}b": 1000**n for n, prefix in _POWERS.items()})
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MICROSECONDS = {
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1000,
    "us": 1,
}
_MOST_BIT_PER_S = 1e24  # above it predictions would overflow
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?|\.[0-9]{1,18})"


def parse_size_bytes(text: str, option: str = "") -> int:
    """Read a size such as ``4096``, ``25MiB``, ``8K`` or ``1.5GB`` in bytes."""
    of = f"{option}: " if option else ""
    match = re.fullmatch(rf"{_NUMBER}\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _SIZE_UNITS:
        raise UsageError(
            f"{of}size must be a number of bytes or a number with a unit, got "
            f"{text!r}. Write it as 4096, 25MiB or 1.5GB."
        )
    size = _exact(match[1]) * _SIZE_UNITS[match[2]]
    if size.denominator != 1:
        raise UsageError(
            f"{of}size must be a whole number of bytes, got {text!r} = {float(size)} "
            f"bytes. Give it in a smaller unit."
        )
    return int(size)


def parse_bit_per_s(text: str) -> float:
    """Read a rate such as ``100Mbit/s``, ``50GB/s`` or ``8x400Gbit/s``, in decimal.

    ``b`` is a bit and ``B`` a byte, ``ps`` is ``/s``, and ``8x`` means 8 such links.
    """
    links = r"(?:([1-9][0-9]{0,3})x)?"
    pattern = rf"{links}{_NUMBER}\s*([kmgtKMGT]?)(B|b|bit)(?:/s|ps)"
    rate = 0.0
    if match := re.fullmatch(pattern, text):
        num_links, number, prefix, unit = match.groups()
        factor = _SIZE_UNITS[prefix.lower() + "b"] * (8 if unit == "B" else 1)
        rate = int(num_links or 1) * float(number) * factor
    if not 1 <= rate <= _MOST_BIT_PER_S:
        raise UsageError(
            f"must be a rate, got {text!r}. Write it as 400Gbit/s, 50GB/s or "
            "8x400Gbit/s."
        )
    return rate


def format_size(size_bytes: int) -> str:
    """Write a size in the largest binary unit, rounded to four digits: ``25MiB``."""
    if size_bytes < 0:
        raise UsageError(f"size_bytes must be at least 0, got {size_bytes}.")
    exponent = 0
    # 1023.5 would be written as 1024: that is one of the next unit.
    while exponent < len(_PREFIXES) and size_bytes / 1024**exponent >= 1023.5:
        exponent += 1
    if exponent == 0:
        return f"{size_bytes}B"
    return (
        f"{_digits(size_bytes / 1024**exponent, 4)}{_PREFIXES[exponent - 1].upper()}iB"
    )


def parse_count(text: str) -> int:
    """Read a count such as ``7B``, ``350M`` or ``7e9``, as the value of an option."""
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.lower()
    )
    count = int(float(match[1]) * _COUNT_UNITS[match[2]]) if match else 0
    if not 0 < count < 10**18:
        raise UsageError(f"must be a count, got {text!r}. Write it as 7B, 350M or 7e9.")
    return count


def parse_duration_s(text: str, option: str = "") -> float:
    """Read a duration such as ``0.5`` (seconds), ``5s``, ``250ms`` or ``1h30m``."""
    stripped = text.strip().lower()
    if re.fullmatch(_NUMBER, stripped, re.ASCII):
        return float(stripped)
    # Each unit at most once, the largest first.
    parts = "".join(f"(?:{_NUMBER}{unit})?" for unit in _MICROSECONDS)
    match = re.fullmatch(parts, stripped, re.ASCII)
    if not stripped or match is None:
        of = f"{option}: " if option else ""
        raise UsageError(
            f"{of}duration must be seconds, or numbers with units from large to small, "
            f"got {text!r}. Write it as 5s, 2m or 1h30m."
        )
    pairs = zip(match.groups(), _MICROSECONDS.values(), strict=True)
    return float(sum(_exact(n) * factor for n, factor in pairs if n) / 1_000_000)


def parse_positive_s(text: str) -> float:
    """Read a duration above 0, as the value of an option."""
    if duration_s := parse_duration_s(text):
        return duration_s
    raise UsageError(f"must be longer than 0, got {text!r}")


def _exact(text: str) -> "Fraction":
    # Imported here: most commands read no such text, and it takes milliseconds.
    from fractions import Fraction

    return Fraction(text)


def format_duration(duration_s: float) -> str:
    """Write a duration in readable form: ``250us``, ``1.25s``, ``1m30s``, ``2h5m``."""
    if not 0 <= duration_s < math.inf:
        raise UsageError(f"duration_s must be finite and at least 0, got {duration_s}.")
    if duration_s < 59.95:
        for unit, factor in (("us", 1e-6), ("ms", 1e-3)):
            # 999.6 us would be written as 1000us.
            if 0 < duration_s < 999.5 * factor:
                return f"{_digits(duration_s / factor, 3)}{unit}"
        return f"{_digits(duration_s, 3)}s"
    seconds, units = round(duration_s), "ms"
    if seconds >= 3600:
        seconds, units = round(seconds / 60), "hm"
    parts = zip(divmod(seconds, 60), units, strict=True)
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def _digits(value: float, count: int) -> str:
    """Write ``value`` with ``count`` significant digits or more, and no exponent."""
    if value == 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{f'{number:,}' if number else 'no'} {noun}{'' if number == 1 else plural}"


def name_rank(rank: int, worker: int) -> str:
    """Return ``rank 1 (worker 4)``; a worker id equal to the rank is left out."""
    return f"rank {rank}{'' if worker in (rank, -1) else f' (worker {worker})'}"


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key; keys and values are in the order of the pairs."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def list_first(names: Sequence[str], most: int = 8, sign: str = ", ") -> str:
    left = len(names) - most
    return sign.join(names[:most]) + (f" and {left:,} more" if left > 0 else "")


def format_list(numbers: Iterable[int]) -> str:
    """Format numbers as the kernel's lists of CPUs, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format numbers as ``0-3, 5``; a long list as ``0, 2, 4, 6 and 60 more``."""
    ordered = sorted(ranks)
    shown = format_list(ordered).split(",")[:_MAX_RANGES]
    last = shown[-1].rpartition("-")[2]
    num_left = sum(rank > int(last) for rank in ordered)
    return ", ".join(shown) + (f" and {num_left} more" if num_left else "")


def name_ranks(ranks: Collection[int]) -> str:
    """Name one or more ranks: ``rank 3``, or ``ranks 0-3, 5``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
