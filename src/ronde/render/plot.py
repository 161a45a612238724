"""Benchmarks -> a picture: size against bus bandwidth, and against time.

The one place that knows matplotlib, which comes with the extra ``ronde[plot]``.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ronde.errors import UsageError
from ronde.render.text import shorten
from ronde.topology.limits import Limit
from ronde.units import format_duration, format_size

SUFFIXES = (".svg", ".png")

# Source: Okabe and Ito, colours that the colour-blind tell apart; black is the limit's.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", "-.", ":")
_MAX_SIZE_LABELS = 8
_MAX_COLUMNS = 4


class Point(NamedTuple):
    """One size of a line; on logarithmic axes only values above 0 are drawn."""

    size_bytes: int
    busbw_gb_per_s: float
    time_us: float | None  # None where it was not measured


def check_path(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"--plot must be a file that ends in {' or '.join(SUFFIXES)}, got "
            f"{str(path)!r}."
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"--plot must be in a folder that is there, got {str(path.parent)!r}. "
            "Make it first."
        )
    _figure_class()


def draw(
    series: Mapping[str, Sequence[Point]],
    limit: Limit | None,
    path: Path,
    *,
    title: str = "",
) -> None:
    """Draw a line for each engine, by its name."""
    check_path(path)
    points = {
        name: [
            point
            for point in sorted(own, key=lambda point: point.size_bytes)
            if point.size_bytes >= 1 and 0 < point.busbw_gb_per_s < float("inf")
        ]
        for name, own in series.items()
    }
    drawn = [point for each in points.values() for point in each]
    if not drawn:
        raise UsageError("--plot must have a size with a bandwidth above 0, got none.")
    figure = _figure_class()(figsize=(11.0, 4.8), dpi=150, layout="constrained")
    num_panels = 2 if any(point.time_us for point in drawn) else 1
    bandwidth, *times = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes in (bandwidth, *times):
        _set_up(axes, sorted({point.size_bytes for point in drawn}))
    bandwidth.set_ylabel("bus bandwidth (GB/s)")
    bandwidth.yaxis.set_major_formatter("{x:g}")
    for axes in times:
        axes.set_ylabel("time")
        axes.yaxis.set_major_formatter(_time_label)
    for index, (name, own) in enumerate(points.items()):
        look = {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
            "markersize": 4.5,
            "linewidth": 1.6,
        }
        sizes, rates = [p.size_bytes for p in own], [p.busbw_gb_per_s for p in own]
        bandwidth.plot(sizes, rates, label=name, **look)
        timed = [point for point in own if point.time_us]
        for axes in times:
            axes.plot([p.size_bytes for p in timed], [p.time_us for p in timed], **look)
    if limit is not None:
        rate = limit.bus_bandwidth_gb_per_s
        label = f"limit {rate:.3g} GB/s: {shorten(limit.link, 48)}"
        black = {"color": "black", "linestyle": "--", "linewidth": 1.2}
        bandwidth.axhline(rate, label=label, **black)
        # At the left end, where small sizes leave room.
        at = {"xy": (0, rate), "xycoords": ("axes fraction", "data")}
        bandwidth.annotate("limit", **at, xytext=(4, 3), textcoords="offset points")
    handles, labels = bandwidth.get_legend_handles_labels()
    place = {"loc": "outside lower center", "frameon": False}
    figure.legend(handles, labels, ncols=min(len(labels), _MAX_COLUMNS), **place)
    if title:
        figure.suptitle(title)
    # Without a date and with a fixed salt, one result is one file, byte for byte.
    is_svg = path.suffix.lower() == ".svg"
    figure.savefig(path, metadata={"Date": None} if is_svg else None)


def _time_label(time_us: float, _place: int | None) -> str:
    return format_duration(time_us / 1e6)


def _figure_class() -> Any:  # noqa: ANN401  a class of a library without types
    """Return matplotlib's figure; no window, and no state of a session."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--plot must have matplotlib, which is not installed. Type: pip install "
            "'ronde[plot]'"
        ) from error
    rcParams["svg.hashsalt"] = "ronde"
    return Figure


def _set_up(axes: Any, sizes: Sequence[int]) -> None:  # noqa: ANN401
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size")
    # Powers of two over all sizes, a regular step apart and few enough.
    first, last = sizes[0].bit_length() - 1, (sizes[-1] - 1).bit_length()
    step = max(1, -(-(last - first + 1) // _MAX_SIZE_LABELS))
    ticks = [1 << exponent for exponent in range(first, last + 1, step)]
    labels = [re.sub("(?=[A-Z])", " ", format_size(tick), count=1) for tick in ticks]
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, which="major", color="#D8D8D8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
