import math

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.units import (
    format_duration,
    format_size,
    parse_bit_per_s,
    parse_duration_s,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8KiB", 8192),
        ("8kB", 8000),
        ("25MiB", 25 * 2**20),
        (" 25 mib ", 25 * 2**20),
        ("1.5GB", 1_500_000_000),
        (".5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1e3", "1.KiB", "5 apples", "1KiBB", "nan", "0.1KiB", "٣"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match=r"^size must be a .*, got"):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [
        ("1bit/s", 1),
        ("100Mbit/s", 100e6),
        ("800kbit/s", 800e3),
        ("2.5 Gb/s", 2.5e9),
        ("100Gbps", 100e9),
        ("50GB/s", 400e9),
        ("8x400Gbit/s", 3.2e12),
    ],
)
def test_rates(text: str, bit_per_s: float) -> None:
    assert parse_bit_per_s(text) == pytest.approx(bit_per_s)


@pytest.mark.parametrize(
    "text", ["", "5", "10G/s", "0bit/s", "x1Gbit/s", "0x1Gbit/s", "1Gibit/s", "9" * 40]
)
def test_no_rates(text: str) -> None:
    with pytest.raises(UsageError, match="must be a rate, got"):
        parse_bit_per_s(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (25 * 2**20, "25MiB"),
        (2**20 - 1, "1MiB"),
        (2**70, "1024EiB"),
    ],
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**60))
def test_sizes_survive_as_text_to_four_digits(size: int) -> None:
    number, unit = (
        format_size(size).rstrip("KMGTPEiB"),
        format_size(size).lstrip("0123456789."),
    )
    factor = parse_size_bytes(f"1{unit}")
    assert abs(float(number) * factor - size) <= size * 5e-4
    assert float(number) < 1024


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("5s", 5),
        ("2m", 120),
        ("1h30m", 5400),
        ("0.5", 0.5),
        ("250ms", 0.25),
        ("3us", 3e-6),
        ("1m0.5s", 60.5),
    ],
)
def test_durations(text: str, duration_s: float) -> None:
    assert parse_duration_s(text) == duration_s


@pytest.mark.parametrize(
    "text", ["", "s", "5 s", "-5s", "30m1h", "1s1s", "5x", "inf", "1h30", "nan"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError, match=r"^duration must be .*, got"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0s"),
        (250e-6, "250us"),
        (0.0009996, "1ms"),
        (1.25, "1.25s"),
        (59.99, "1m"),
        (90, "1m30s"),
        (7500, "2h5m"),
        (86400 * 2, "48h"),
    ],
)
def test_durations_as_text(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


@given(st.floats(1e-6, 1e7))
def test_durations_survive_as_text(duration_s: float) -> None:
    back = parse_duration_s(format_duration(duration_s))
    # Three digits below a minute, a second below an hour, then half a minute and one.
    tolerance = 0.005 if duration_s < 60 else 0.5 / 59.5 if duration_s < 3600 else 0.009
    assert abs(back - duration_s) <= duration_s * tolerance


@pytest.mark.parametrize("duration_s", [-1, math.inf, math.nan])
def test_durations_that_are_none(duration_s: float) -> None:
    with pytest.raises(UsageError, match="duration_s must be finite"):
        format_duration(duration_s)
