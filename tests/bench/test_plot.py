"""Pictures of benchmarks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.render import Point, check_path, draw
from ronde.topology import Limit


def series(latency_us: float, gb_per_s: float) -> list[Point]:
    def point(size: int) -> Point:
        time_us = latency_us + size / gb_per_s / 1e3
        return Point(size, size / time_us / 1e3, time_us)

    return [point(1 << exponent) for exponent in range(2, 27)]


GLOO = {"gloo": series(200, 1.4)}
BOTH = {**GLOO, "shared_memory": series(7, 20)}
LIMIT = Limit(6.44, "memory, 25.77 GB/s read and written by a copy")


def texts(path: Path) -> list[str]:
    """Return the words of a drawing: matplotlib names each in a comment."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def num_lines(path: Path, colour: str) -> int:
    """Return how many lines of a colour there are, those of the legend included."""
    return len(re.findall(rf"fill: none; stroke[^\"]*: {colour}", path.read_text()))


def test_axes_and_legend_are_labelled(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw(BOTH, LIMIT, path, title="all_reduce of float, 2 ranks")
    found = texts(path)
    for text in (
        *("all_reduce of float, 2 ranks", "bus bandwidth (GB/s)", "time", "size"),
        *("gloo", "shared_memory", "limit"),
        "limit 6.44 GB/s: memory, 25.77 GB/s read and written by a copy",
        *("4 B", "1 KiB", "256 KiB", "64 MiB", "10us", "1ms", "0.01"),
    ):
        assert text in found


def test_each_engine_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw(GLOO, None, path)
    assert (num_lines(path, "#0072b2"), num_lines(path, "#d55e00")) == (3, 0)
    assert "limit" not in texts(path)
    draw(BOTH, LIMIT, path)
    # Two panels and the legend.
    assert (num_lines(path, "#0072b2"), num_lines(path, "#d55e00")) == (3, 3)
    assert "limit" in texts(path)


def test_one_result_is_one_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw(BOTH, LIMIT, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.PNG"
    draw(GLOO, None, path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[i : i + 4]) for i in (16, 20))
    assert width > 1000
    assert height > 500


def test_what_has_no_place_on_logarithmic_axes_is_left_out(tmp_path: Path) -> None:
    nothing = [Point(0, 0.0, 5.0), Point(8, 0.0, 5.0), Point(16, float("nan"), 5.0)]
    lines = {"odd": [*nothing, Point(4096, 0.5, None)]}
    draw(lines, None, tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    assert "4 KiB" in found
    assert "16 B" not in found
    assert "time" not in found  # there was none, and so no panel
    with pytest.raises(UsageError, match="must have a size with a bandwidth above 0"):
        draw({"odd": nothing}, None, tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", "--plot must be a file that ends in .svg or .png, got"),
        ("a", "--plot must be a file that ends in"),
        ("nowhere/a.svg", "--plot must be in a folder that is there"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_path(tmp_path / name)


def test_without_matplotlib_the_cure_is_said(tmp_path: Path) -> None:
    # In a process of its own, where nothing has imported matplotlib yet.
    code = (
        "import sys; from pathlib import Path; sys.modules['matplotlib'] = None\n"
        "from ronde.render import check_path\n"
        f"check_path(Path({str(tmp_path / 'a.svg')!r}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "UsageError: --plot must have matplotlib" in ended.stderr
    assert "pip install 'ronde[plot]'" in ended.stderr
