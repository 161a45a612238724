"""Every form that nccl-tests' text has had, and every way to damage it."""

import contextlib
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from tests.bench.log_writing import Form, all_reduce_row, log, log_lines, side

from ronde.bench import RankSource, Row, Run, Side, read_log, read_text
from ronde.errors import UsageError

ROWS = [all_reduce_row(1 << exponent) for exponent in range(10, 16)]


def read_one(text: str) -> Run:
    log = read_text(text, "a.log")
    assert log.damage == []
    (run,) = log.runs
    return run


def join(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def first_row(lines: list[str]) -> int:
    return next(
        i for i, line in enumerate(lines) if re.match(r" +\d+ +\d+ +[a-z]", line)
    )


@pytest.mark.parametrize(
    "form",
    [
        Form(prefix="[1,0]<stdout>:"),
        Form(prefix="[prterun-node1-77@1,0]<stdout>: "),
        Form(prefix=" 12: "),
        Form(prefix="[pod/trainer-0/main] "),
        Form(prefix="trainer-0: "),
        Form(prefix="2026-11-21T18:30:00.123456789+01:00 stdout F "),
        Form(end=" " * 300 + "\n"),
    ],
    ids=str,
)
def test_forms_do_not_change_rows(form: Form) -> None:
    run = read_one(log("all_reduce", ROWS, form))
    assert run.rows == tuple(ROWS)
    assert run.is_complete
    assert run.ranks.value == 2 or form.num_devices == 0


def test_the_time_of_the_cpu_is_not_that_of_the_operation() -> None:
    text = log("all_reduce", ROWS).replace("   time", "cputime")
    run = read_one(text)
    half = ROWS[0].in_place
    assert half is not None
    assert run.rows[0].in_place == replace(half, time_us=None)


def test_an_old_error_is_no_number_of_elements() -> None:
    text = log("all_reduce", ROWS).replace("#wrong", "error")
    run = read_one(text.replace("       0\n", "   2e-07\n"))
    assert run.rows[0].in_place is not None
    assert run.rows[0].in_place.num_wrong is None
    assert run.num_wrong() == 0
    # Without a number in its rows, 0 in the footer shows no check.
    unchecked = re.sub(r" {7}0(?=\s)", "     N/A", text)
    assert read_one(unchecked).num_wrong() is None
    assert read_one(unchecked.replace("0 OK", "2 FAILED")).num_wrong() == 2


def test_one_half_may_be_missing_altogether() -> None:
    lines = ["#  size  count  type  redop  root  time  algbw  busbw  #wrong"]
    lines += ["  1024  256  float  sum  -1  10.00  0.10  0.10  0"]
    row = read_one(join(lines)).rows[0]
    assert row.out_of_place == Side(10.0, 0.10, 0.10, 0)
    assert row.in_place is None
    lines.insert(0, "#                                     in-place")
    row = read_one(join(lines)).rows[0]
    assert row.in_place == Side(10.0, 0.10, 0.10, 0)
    assert row.out_of_place is None


def test_numbers_have_many_spellings() -> None:
    half = "  1.2e+07     inf    -nan   1e+06"
    line = f"  1024  256  float  sum  -1 {half} {half}"
    text = log("all_reduce", []).replace("# Out of", f"{line}\n# Out of")
    found = read_one(text).rows[0].in_place
    assert found is not None
    assert (found.time_us, found.num_wrong) == (1.2e7, 1e6)
    assert found.algbw_gb_per_s == float("inf")
    assert found.busbw_gb_per_s != found.busbw_gb_per_s


INFO = "node-1:4001:4021 [0] NCCL INFO Connected all rings"
WARN = "\n[2026-11-21 18:30:00] node-1:4001:4021 [0] net.cc:12 NCCL WARN no route"


@pytest.mark.parametrize("noise", [INFO, WARN], ids=["info", "warn"])
def test_nccl_speaks_between_rows(noise: str) -> None:
    lines = log_lines("all_reduce", ROWS, Form())
    lines.insert(first_row(lines) + 2, noise)
    run = read_one(join(lines))
    assert run.rows == tuple(ROWS)
    assert [w for w in run.warnings if "no route" in w] == (
        [] if noise is INFO else [f"line {first_row(lines) + 4}: NCCL: no route"]
    )


@pytest.mark.parametrize("at", [12, 26, 38, 52, 85])
def test_nccl_speaks_within_a_row(at: int) -> None:
    """After size, count, type, root and the first half."""
    lines = log_lines("all_reduce", ROWS, Form())
    row = first_row(lines)
    whole = lines[row]
    lines[row : row + 1] = [whole[:at] + INFO, INFO, whole[at:]]
    assert read_one(join(lines)).rows == tuple(ROWS)


def test_alltoallv_reports_its_traffic_within_a_row() -> None:
    lines = log_lines("alltoallv", ROWS, Form())
    row = first_row(lines)
    whole = lines[row]
    lines[row : row + 1] = [whole[:52] + "# traffic: 3", "# rank 0 : 12", whole[52:]]
    assert read_one(join(lines)).rows == tuple(ROWS)


def test_runs_follow_each_other() -> None:
    first, second = log("all_reduce", ROWS), log("reduce_scatter", ROWS[:2])
    cut = first[: first.index("# Out of")]
    runs = read_text(cut + second + first, "a.log").runs
    assert [(run.test, len(run.rows), run.is_complete) for run in runs] == [
        ("all_reduce", 6, False),
        ("reduce_scatter", 2, True),
        ("all_reduce", 6, True),
    ]
    assert [run.facts["line"] for run in runs] == [1, 18, 37]


def test_a_second_header_opens_a_run_of_the_same_ranks() -> None:
    lines = log_lines("all_reduce", ROWS, Form(num_devices=4))
    at = first_row(lines) + 3
    text = join([*lines[:at], *lines[at - 6 : at - 3], *lines[at:]])
    runs = read_text(text, "a.log").runs
    assert [len(run.rows) for run in runs] == [3, 3]
    assert [run.ranks.value for run in runs] == [4, 4]


def test_a_build_without_mpi_is_named() -> None:
    whole = log_lines("all_reduce", [all_reduce_row(1024, n=1)], Form(num_devices=1))
    mixed = [line for line in whole for _ in range(4)]
    for lines, start in ((whole * 4, "4 runs of 1 "), (mixed, "lists rank 0 4 times")):
        run = read_text(join(lines), "a.log").runs[0]
        assert run.warnings[0].startswith(start)
        assert "built without MPI" in run.warnings[0]
    assert read_one(join(whole)).warnings == ()


def test_a_list_of_devices_that_is_cut_counts_nothing() -> None:
    lines = log_lines(
        "all_reduce", [all_reduce_row(1 << 30, n=16)], Form(num_devices=4)
    )
    lines.insert(9, "...")
    run = read_one(join(lines))
    assert (run.ranks.value, run.ranks.source) == (16, RankSource.RATIO)
    assert run.warnings == ("its list of devices is cut",)


def test_an_old_row_may_have_a_root_that_its_header_has_not() -> None:
    lines = ["# size count type redop time algbw busbw error"]
    lines += ["1024 256 float sum 3 10.00 0.10 0.10 N/A"]
    (row,) = read_one(join(lines)).rows
    assert (row.root, row.out_of_place) == (3, Side(10.0, 0.10, 0.10, None))


def test_devices_that_the_figures_contradict() -> None:
    run = read_one(log("all_reduce", [all_reduce_row(1 << 30, n=16)]))
    assert run.ranks.value == 2
    assert run.warnings == ("lists 2 devices, but its ratio of busbw to algbw differs",)


def test_only_the_group_of_rank_0_counts() -> None:
    lines = log_lines("all_reduce", ROWS, Form(num_devices=4))
    text = join(lines).replace("Rank  1 Group  0", "Rank  1 Group  1")
    assert (
        read_one(text.replace("Rank  3 Group  0", "Rank  3 Group  1")).ranks.value == 2
    )


def test_one_rank_has_no_busbw() -> None:
    half = side(10, 100, 0)
    rows = [Row(1 << 20, 1 << 18, "float", "sum", -1, half, half)]
    for num_devices in (0, 1):
        run = read_one(log("all_reduce", rows, Form(num_devices=num_devices)))
        assert run.ranks.value == 1
        assert run.warnings == ()


def test_an_average_that_is_not_that_of_the_rows() -> None:
    lines = log_lines("all_reduce", ROWS, Form())
    del lines[first_row(lines) + 2]
    (warning,) = read_one(join(lines)).warnings
    assert "rows are missing or altered" in warning


def damage(old: str, new: str) -> str:
    text = log("all_reduce", ROWS)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "damage"),
    [
        (damage("        4096  ", "        40x6  "), "row: a row's size"),
        (damage("   100.00    0.04", "   10o.00    0.04"), "row: a row's time"),
        (
            damage("   100.00    0.04", "   7 100.00    0.04"),
            "row: a row must have 13 cells",
        ),
        (damage("   100.00    0.04    0.04", "   0.04"), "row: a row must"),
        (damage("  4096          1024", "  4096"), "row: a row's count"),
        (damage("1024     float     sum", "1024     float"), "row: only some rows"),
        (damage(" 1024     float     sum", " 1024     sum"), "row: a row's type"),
        (damage("bandwidth    : ", "bandwidth    : x"), "19: Avg bus bandwidth"),
        (damage("values : 0", "values : "), "18: Out of bounds values must"),
    ],
)
def test_damage_is_left_out_and_reported_with_its_line(text: str, damage: str) -> None:
    found = read_text(text, "a.log")
    is_row = damage.startswith("row: ")
    damage = damage.replace("row:", "14: a row was left out:", 1) if is_row else damage
    assert len(found.damage) == 1
    assert found.damage[0].startswith(f"a.log:{damage}")
    (run,) = found.runs
    assert not run.is_complete
    assert run.rows == tuple([*ROWS[:2], *ROWS[3:]] if is_row else ROWS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.log:1: found no nccl-tests table because the file is empty."),
        ("hello\nworld\n", "a.log:2: found no nccl-tests table in 2 lines"),
        (
            damage(" #wrong     time", " #wrong  time  time"),
            "a.log:10: a table's header",
        ),
        (damage("  busbw", ""), "a.log:10: each half of a table must have"),
        (damage("redop  ", "redop  " + "x " * 60), "a.log:10: a table's header"),
    ],
)
def test_a_log_with_nothing_to_read_is_an_error(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_text(text, "a.log")
    assert str(raised.value).startswith(message)


def test_damage_in_one_run_leaves_the_others() -> None:
    """As where Slurm starts a job anew and appends to its output."""
    whole = log("all_reduce", ROWS)
    cut = whole[: whole.index("   16384") + 60]
    found = read_text(f"{whole}{cut}\n{whole}", "a.log")
    assert [(len(r.rows), r.is_complete) for r in found.runs] == [
        (6, True),
        (4, False),
        (6, True),
    ]
    assert len(found.damage) == 1
    assert re.match(r"a\.log:\d+: a row was left out: ", found.damage[0])


def test_a_log_may_lack_its_very_last_line_break() -> None:
    run = read_one(log("all_reduce", ROWS).rstrip())
    assert run.is_complete
    assert run.warnings == ()


FIGURE = st.floats(0, 1e9, allow_nan=False).map(lambda value: round(value, 3))
SIDES = st.builds(
    side, FIGURE, FIGURE, FIGURE, st.none() | st.integers(0, 10**5).map(float)
)
HUGE = st.integers(0, 2**50)


def tables(operations: list[str]) -> st.SearchStrategy[list[Row]]:
    row = st.builds(
        Row,
        size_bytes=HUGE,
        count=HUGE,
        dtype=st.sampled_from(["int8", "float", "bfloat16", "f8e5m2"]),
        redop=st.sampled_from(operations),
        root=st.integers(-1, 4000),
        out_of_place=SIDES,
        in_place=SIDES,
    )
    return st.lists(row, max_size=5)


TABLES = tables(["none", "sum", "mulsum"]) | tables([""])
FORMS = st.builds(
    Form,
    num_devices=st.integers(0, 3),
    has_banner=st.booleans(),
    has_timestamps=st.booleans(),
    has_per_iteration=st.booleans(),
    has_limit=st.booleans(),
    prefix=st.sampled_from(["", "[1,0]<stdout>:", "0: "]),
    end=st.sampled_from(["\n", "\r\n", "   \n"]),
)


@settings(deadline=None)
@given(TABLES, FORMS)
def test_any_table_reads_back(rows: list[Row], form: Form) -> None:
    run = read_one(log("all_reduce", rows, form))
    assert run.rows == tuple(rows)
    assert run.is_complete
    assert form.num_devices in (run.ranks.value, 0)


def runs_or_error(text: str) -> list[Run]:
    """Return the runs; none where the log is refused, by its line."""
    try:
        return read_text(text, "a.log").runs
    except UsageError as error:
        if not re.match(r"a\.log:\d+: ", str(error)):
            raise
        return []


@settings(max_examples=60, deadline=None)
@given(TABLES, FORMS, st.data())
def test_a_log_cut_anywhere_is_incomplete_or_an_error(
    rows: list[Row], form: Form, data: st.DataObject
) -> None:
    text = log("all_reduce", rows, form)
    for cut in data.draw(st.lists(st.integers(0, len(text)), min_size=20, max_size=20)):
        for run in runs_or_error(text[:cut]):
            assert run.rows == tuple(rows[: len(run.rows)])
            assert len(run.rows) == len(rows) or not run.is_complete


PIECES = [
    *(
        "a",
        "1 ",
        "1.5 ",
        " ",
        "[",
        ":",
        ":1",
        "NCCL",
        "0.1node-1:1:2 [0] NCCL INFO x\n",
    ),
    *("x:1:2 [0] NCCL WARN y\n", "\x1b[1", "# ", "# a : ", "...\n", "_", "a_perf\n"),
    *("# size count type redop root time algbw busbw #wrong\n", "# x:\n", "\t", "\n"),
    *("[1 ", "[a] ", "2026-11-21T18:30:00Z ", "a: 1 ", "8 2 float sum -1 1 1 1 0\n"),
    *("# nThread\n", "# Rank 0 Pid 1 on h device 0 x\n", "8 2 float\n", "# a: 1\n8 "),
    *('{"', '{"a":', '"\\', "{", '{"results": [', '{"results": [{},', "{1", "-", "."),
    *("Test ", "slurmstepd: error: ", "srun: error: a: tasks ", "Primary job  ", "> "),
    *('{"schema": 1}\n', "# engine: a\n", "# Out of bounds values : x\n", "1 2 x\n"),
]
HEADS = [
    "",
    "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n",
    '{"results": [',
]


@pytest.mark.parametrize("head", HEADS, ids=["bare", "table", "json"])
def test_reading_takes_time_in_proportion_to_the_text(head: str) -> None:
    """Of 8 times the text no more than 24 times the time of the process, not 64."""

    def time_of(piece: str, size: int) -> float:
        text = head + piece * (size // len(piece))
        begun = time.process_time()
        with contextlib.suppress(UsageError):
            read_log(text, "a.log")
        return time.process_time() - begun

    for piece in PIECES:
        small = min(time_of(piece, 1 << 12) for _ in range(3))
        large = min(time_of(piece, 1 << 15) for _ in range(3))
        assert large < 24 * small + 0.02, (piece, small, large)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_written_into_a_log_is_read_or_an_error(
    data: st.DataObject,
) -> None:
    text = log("all_reduce", ROWS)
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(at + 40, len(text))))
    noise = data.draw(st.text(max_size=20))
    runs_or_error(text[:at] + noise + text[end:])
