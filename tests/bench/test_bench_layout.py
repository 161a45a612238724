"""The text is nccl-tests', column for column. The lines are theirs, of a real run."""

from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given, strategies as st

from ronde.bench import (
    Compared,
    Device,
    Ending,
    Half,
    Heading,
    IterationTimes,
    Measured,
    Row,
    Side,
    Totals,
    parse,
)
from ronde.render import compared_line, ending_lines, heading_lines, number, row_line
from ronde.topology import Limit

AT = datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001  local, as they print it
TITLES = """\
#                                                              out-of-place          \
             in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong\
     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)        \
     (us)  (GB/s)  (GB/s)         
""".splitlines()  # noqa: W291  they end in blanks
ROW = (
    "  1073741824     268435456     float     sum      -1  4389.53  244.62  458.65"
    "       0  4331.12  247.91  464.84       0"
)
FOOTERS = [
    "# Out of bounds values : 0 OK",
    "# Avg bus bandwidth    : 461.746 ",
    "#",
    "# Collective test concluded: all_reduce_perf",
    "#",
    "",
]


def heading(*words: str, **changes) -> Heading:
    device = Device(0, 0, 1942267, "node1", 0, "0000:0f:00", "NVIDIA H100 80GB HBM3")
    options = parse(["all_reduce", "-b", "8", "-e", "1G", "-f", "2", *words])
    known = Heading(options, "gloo", (device,), 16, {"torch": "2.13.0"}, started_at=AT)
    return replace(known, **changes)


def measured(*, is_each_timed: bool = False) -> Measured:
    out = Side(4389.53, 244.62, 458.65, 0.0)
    into = Side(4331.12, 247.91, 464.84, 0.0)
    row = Row(1 << 30, 1 << 28, "float", "sum", -1, out, into)
    times = IterationTimes([[1.0, 3.0], [2.0, 2.0]], 0)
    iterations = times if is_each_timed else None
    return Measured(
        row, Half(out, iterations), Half(into, iterations), cycle=0,
        at=AT,
    )  # fmt: skip


def test_titles_and_row_are_theirs() -> None:
    assert heading_lines(heading())[-3:] == TITLES
    assert row_line(measured(), heading()) == ROW


def test_the_head_is_theirs() -> None:
    lines = heading_lines(heading("-m", "2", "-u", "1"))
    assert lines[1] == "# Collective test starting: all_reduce_perf"
    assert lines[2] == (
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) "
        "warmup iters: 1 iters: 20 agg iters: 2 validation: 1 graph: 0 unalign: 1"
    )
    assert "# Using devices" in lines
    assert (
        "#  Rank  0 Group  0 Pid 1942267 on      node1 device  0 [0000:0f:00] "
        "NVIDIA H100 80GB HBM3" in lines
    )


def test_footers_are_theirs() -> None:
    totals = Totals(num_rows=1)
    totals.add(measured())
    totals.peak_busbw_gb_per_s = 0.0
    ended = ending_lines(heading(), Ending(totals, ended_at=AT))
    assert [*ended[:1], *ended[2:]] == [FOOTERS[0], *FOOTERS[2:]]
    assert ended[1] == "# Avg bus bandwidth    : 461.745 "
    judged = Ending(totals, least_busbw_gb_per_s=600.0, errors=("no",), ended_at=AT)
    ended = ending_lines(heading(), judged)
    assert ended[1] == "# Avg bus bandwidth    : 461.745 FAILED"
    assert ended[-1] == "# error: no"


def test_further_columns_come_after_theirs() -> None:
    """-S and then ours: whoever counts from the left finds all where it was."""
    limit = Limit(929.68, "a link")
    known = heading("-S", "1", limit=limit)
    assert row_line(measured(), known) == f"{ROW}  2026-01-02 03:04:05   50.00"
    titles = heading_lines(known)[-2]
    assert titles == f"{TITLES[1]}          timestamp  %limit"


@pytest.mark.parametrize("time_us", [1.0, 101589.01, 123456789.0])
def test_columns_of_engines_never_touch(time_us: float) -> None:
    side = Side(time_us, 0.17, 0.17, 0.0)
    row = Row(1 << 24, 1 << 22, "float", "sum", None, side, None)
    words = compared_line(Compared({"gloo": row, "shared_memory": row})).split()
    assert words[:5] == ["16777216", "float", "sum", "-1", "|"]
    assert len(words) == 12
    assert words[8] == "|"
    assert float(words[9]) == pytest.approx(time_us, rel=0.05)


def test_the_limit_is_reported_with_what_nccl_counts_on() -> None:
    limit = Limit(482.14, "18 NVLinks", "a pure ring less", 397.29, "NVLinks, too")
    lines = heading_lines(heading(limit=limit))
    first = lines.index("# limit: busbw at most 482.14 GB/s")
    assert lines[first + 1 : first + 4] == [
        "# limit: set by 18 NVLinks",
        "# limit: NCCL counts on 397.29 GB/s, set by NVLinks, too",
        "# limit: a pure ring less",
    ]


def test_more_than_the_limit_is_reported_below_the_rows() -> None:
    totals = Totals(peak_busbw_gb_per_s=600.0, peak_size_bytes=1 << 20)
    known = heading(limit=Limit(482.14, "18 NVLinks"))
    ended = ending_lines(known, Ending(totals, ended_at=AT))
    (reported,) = [line for line in ended if line.startswith("# limit: ")]
    assert reported.startswith("# limit: 124 % of the bound: an assumption")
    totals.peak_busbw_gb_per_s = 482.0
    ended = ending_lines(known, Ending(totals, ended_at=AT))
    assert not any(line.startswith("# limit: ") for line in ended)


def test_single_iterations_have_four_columns_a_side() -> None:
    known = heading("-I", "1")
    line = row_line(measured(is_each_timed=True), known)
    cells = line.split()
    assert cells[5:9] == ["4389.53", "244.62", "458.65", "0"]
    assert cells[9:13] == ["2.00", "3.00", "3.00", "20.00"]
    titles = heading_lines(known)[-2].split()
    assert titles[1:].index("i_min") == 9
    assert len(titles) - 1 == len(cells)


@given(st.floats(0, 1e30), st.sampled_from([6, 7]))
def test_no_number_is_wider_than_its_column(value: float, width: int) -> None:
    text = number(value, width)
    assert len(text) <= width
    assert float(text) == pytest.approx(value, rel=0.5, abs=0.006)
