"""Latency and bandwidth of rows that follow a ring's formula, and of others."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ronde.bench import (
    Device,
    Ending,
    Half,
    Heading,
    Measured,
    Row,
    Side,
    Totals,
    fit_rows,
    from_record,
    parse,
    read_log,
)
from ronde.records import read_records
from ronde.render import ending_lines, heading_lines, row_line

AT = datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001  local, as the table shows it
RECORDS = Path(__file__).parent / "records"
ALPHA_US, NS_PER_BYTE = 12.0, 0.5
SIZES = tuple(1 << power for power in range(8, 25, 2))


def heading(test: str, hosts: tuple[int, ...]) -> Heading:
    size = sum(hosts)
    devices = tuple(
        Device(rank, 0, 100 + rank, "node1", 0, "0000:00:00", "CPU")
        for rank in range(size)
    )
    options = parse([test, "-b", "256", "-e", "16M", "-f", "4"])
    return Heading(options, "gloo", devices, size, {}, hosts=hosts, started_at=AT)


def ring_us(trips: int, size: int, num_bytes: int) -> float:
    return trips * (size - 1) * (ALPHA_US + NS_PER_BYTE * num_bytes / size / 1e3)


def rows(trips: int, size: int) -> list[Row]:
    """Make rows of a ring; those below 4 KiB, and out of place, take any time."""
    found: list[Row] = []
    for num_bytes in SIZES:
        time_us = ring_us(trips, size, num_bytes) if num_bytes >= 4096 else 1e6
        out, into = Side(7.0, 1.0, 1.0, 0.0), Side(time_us, 1.0, 1.0, 0.0)
        found.append(Row(num_bytes, num_bytes // 4, "float", "sum", -1, out, into))
    return found


@settings(max_examples=20)
@given(
    st.sampled_from([("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)]),
    st.sampled_from(
        [((2,), "inside"), ((1, 1, 1), "between"), ((4, 4), "mixed"), ((1, 3), "mixed")]
    ),
)
def test_the_costs_of_a_ring_are_found(
    test: tuple[str, int], layout: tuple[tuple[int, ...], str]
) -> None:
    (name, trips), (hosts, level) = test, layout
    facts = fit_rows(heading(name, hosts), rows(trips, sum(hosts)))
    assert facts["hosts"] == list(hosts)
    assert facts["fit"] == {
        "level": level,
        "alpha_us": pytest.approx(ALPHA_US),
        "beta_ns_per_byte": pytest.approx(NS_PER_BYTE),
        "largest_residual": pytest.approx(0.0, abs=1e-9),
    }


def test_out_of_place_and_the_first_type_count_where_nothing_else_does() -> None:
    ring = rows(2, 3)
    out = [replace(row, out_of_place=row.in_place, in_place=None) for row in ring]
    other = [replace(row, dtype="half", in_place=row.out_of_place) for row in ring]
    unknown = Side(None, None, None, None)
    blank = [replace(row, in_place=unknown) for row in ring]
    known = heading("all_reduce", (3,))
    for measured in (out, ring + other, ring + blank):
        assert fit_rows(known, measured)["fit"]["alpha_us"] == pytest.approx(ALPHA_US)


def test_without_a_fit_there_is_a_reason() -> None:
    ring = rows(2, 2)
    step = [
        replace(row, in_place=Side(1.0 + (i % 2), 1, 1, 0))
        for i, row in enumerate(ring)
    ]
    for known, measured, reason in (
        (heading("all_reduce", (1,)), ring, "no ring of 1 has all_reduce"),
        (heading("alltoall", (2,)), ring, "no ring of 2 has alltoall"),
        (heading("all_reduce", (2,)), ring[:3], "at least 2 of 4096 bytes or more"),
        (heading("all_reduce", (2,)), [], "at least 2 of 4096 bytes or more"),
        (heading("all_reduce", (2,)), step, "within 30 %"),
    ):
        facts = fit_rows(known, measured)
        assert facts["fit"] is None
        assert facts["hosts"] == list(known.hosts)
        assert reason in facts["no_fit"]


def test_readers_of_the_text_pass_over_the_fit() -> None:
    known, ring = heading("all_reduce", (2,)), rows(2, 2)
    totals = Totals()
    lines = heading_lines(known)
    for row in ring:
        halves = [Half(side) for side in row.sides()]
        measured = Measured(row, *halves, cycle=0, at=AT)
        totals.add(measured)
        lines.append(row_line(measured, known))
    fit = fit_rows(known, ring)["fit"]
    ends = [
        ending_lines(known, Ending(totals, fit=each, ended_at=AT))
        for each in (fit, None)
    ]
    added = [line for line in ends[0] if line not in ends[1]]
    assert added == ["# Fitted as a ring     : 12 us a round, 2 GB/s inside, within 0%"]
    texts = ["\n".join([*lines, *each]) for each in ends]
    runs = [read_log(text, "a.txt").runs for text in texts]
    assert runs[0] == runs[1]
    (run,) = runs[0]
    assert run.is_complete
    assert (len(run.rows), run.warnings) == (len(ring), ())


def test_a_record_without_hosts_and_fit_is_read() -> None:
    (record,) = read_records(RECORDS / "without_hosts.jsonl", "bench")
    run = from_record(record)
    assert not {"hosts", "fit"} & set(run.facts)
    assert (run.ranks.value, [row.size_bytes for row in run.rows]) == (2, [4096, 16384])
