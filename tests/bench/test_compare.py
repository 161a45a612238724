"""``ronde bench read`` and ``compare``."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.log_writing import Form, all_reduce_row, log
from tests.commands import refusal

from ronde.bench import Exit, RankCount, RankSource, Row, RowKey, Run, Side, compare
from ronde.cli import main
from ronde.records import read_records


def run(words):
    return main(["bench", *words])


LOGS = Path(__file__).parent / "logs"
TWO = RankCount.exactly(2, RankSource.GIVEN)


def half(time_us: float | None, busbw: float) -> Side:
    return Side(time_us, busbw, busbw, 0)


def row(size: int, time_us: float | None = None, busbw: float = 1.0) -> Row:
    return Row(size, size // 4, "float", "sum", -1, half(time_us, busbw), None)


def result(*rows: Row, test: str = "all_reduce", ranks: RankCount = TWO) -> list[Run]:
    return [Run(test, ranks, rows)]


def test_ratios_are_the_second_by_the_first() -> None:
    a = result(row(8, busbw=2.0), row(16, busbw=4.0))
    b = result(row(8, busbw=4.0), row(16, busbw=2.0))
    found = compare(a, b)
    assert [(p.key.size_bytes, p.half, p.ratio) for p in found.pairs] == [
        (8, "out_of_place", 2.0),
        (16, "out_of_place", 0.5),
    ]
    assert found.mean_ratio() == pytest.approx(1.0)
    assert (found.only_a, found.only_b, found.warnings) == ((), (), ())


def test_without_a_common_size_the_peaks_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ([1 << 20, 1 << 24], [1 << 21, 1 << 25])
    paths = [str(tmp_path / name) for name in ("a.log", "b.log")]
    for path, own in zip(paths, sizes, strict=True):
        Path(path).write_text(log("all_reduce", [all_reduce_row(n) for n in own]))
    assert run(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert "no size is in both: the highest busbw of each is compared.\n" in text
    assert re.search(r"^all_reduce +float +sum +-1 +peak ", text, re.MULTILINE)
    found = compare(result(row(8, busbw=2.0), row(32, busbw=5.0)), result(row(16)))
    assert [(p.a_busbw_gb_per_s, p.b_busbw_gb_per_s, p.ratio) for p in found.pairs] == [
        (5.0, 1.0, 0.2)
    ]
    assert found.only_a[0].size_bytes == 8


def test_times_say_more_than_small_bandwidths() -> None:
    a, b = result(row(8, 12.0, 0.01)), result(row(8, 11.0, 0.02))
    assert compare(a, b).mean_ratio() == pytest.approx(12 / 11)
    # Among more ranks the same time is another busbw.
    b = result(row(8, 11.0, 0.02), ranks=RankCount.exactly(4, RankSource.GIVEN))
    assert compare(a, b).mean_ratio() == pytest.approx(2.0)
    assert compare(a, b).warnings == (
        "all_reduce: 2 ranks in the first, 4 in the second",
    )


def test_repeated_rows_count_by_their_median() -> None:
    a = result(*(row(8, time_us) for time_us in (10.0, 30.0, 1000.0)))
    assert compare(a, result(row(8, 15.0))).mean_ratio() == pytest.approx(2.0)


def test_what_one_alone_has_is_reported() -> None:
    other = replace(row(16), dtype="half")
    found = compare(result(row(8), row(16)), result(row(8), other))
    assert [key.size_bytes for key in found.only_a] == [16]
    assert found.only_b == (RowKey("all_reduce", "", "half", "sum", -1, 16),)


def test_old_and_new_forms_of_one_row_meet() -> None:
    old = result(replace(row(8), redop="", root=None), test="alltoall")
    new = result(replace(row(8), redop="none", root=-1), test="alltoall")
    assert compare(old, new).mean_ratio() == 1.0


def test_engines_meet_their_own_kind() -> None:
    def two(fast: float) -> list[Run]:
        return [
            Run("all_reduce", TWO, (row(8, busbw=1.0),), engine="gloo"),
            Run("all_reduce", TWO, (row(8, busbw=fast),), engine="mpi"),
        ]

    ratios = {p.key.engine: p.ratio for p in compare(two(2.0), two(8.0)).pairs}
    assert ratios == {"gloo": 1.0, "mpi": 4.0}
    # One engine against another is what one compares most.
    gloo, mpi = two(2.0)
    assert compare([gloo], [mpi]).mean_ratio() == 2.0


def test_incomplete_and_wrong_results_are_reported() -> None:
    wrong = replace(row(8), in_place=Side(1.0, 1.0, 1.0, 3))
    b = [replace(each, is_complete=False) for each in result(row(8))]
    assert compare(result(wrong), b).warnings == (
        "the first has 3 wrong elements",
        "the second is incomplete",
    )


@pytest.fixture
def logs(tmp_path: Path) -> tuple[str, str]:
    """Write two logs, the second twice as fast."""
    sizes = [1 << exponent for exponent in range(20, 25)]
    for name, time_us in (("slow.log", 200.0), ("fast.log", 100.0)):
        rows = [all_reduce_row(size, time_us) for size in sizes]
        (tmp_path / name).write_text(log("all_reduce", rows))
    return str(tmp_path / "slow.log"), str(tmp_path / "fast.log")


def test_compare_prints_both(
    logs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", *logs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "busbw in GB/s"
    assert lines[4].split()[:8] == [
        "test",
        "type",
        "op",
        "root",
        "size",
        "A",
        "B",
        "B/A",
    ]
    words = "all_reduce float sum -1 1MiB 5.24 10.49 2.00 5.24 10.49 2.00"
    assert lines[5].split() == words.split()
    assert lines[-2] == "B/A, geometric mean: 2.000"
    # The largest size may have lost more than the mean shows.
    assert lines[-1] == ("all_reduce, B/A of the peaks: 2.000 (83.89 and 167.77 GB/s)")


@pytest.mark.parametrize(("fail_below", "code"), [("1.9", 0), ("2.1", 7), ("nan", 7)])
def test_compare_fails_below(logs: tuple[str, str], fail_below: str, code: int) -> None:
    assert run(["compare", *logs, "--fail-below", fail_below]) == code


def test_nothing_in_common_is_an_error(
    logs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(LOGS / "superbench_nccl_reduce.log")
    assert run(["compare", logs[0], other]) == Exit.USAGE
    assert "the results cannot be compared" in capsys.readouterr().err


def test_read_prints_a_line_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(str(path) for path in LOGS.glob("*.log"))
    assert run(["read", *names]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 8
    words = "all_reduce 16 devices float sum 5 1GiB-16GiB 471.22 464.075 0 yes"
    assert lines[4].split()[1:] == words.split()
    words = "alltoall 8 devices float - 34 0B-8GiB 226.16 58.6481 unchecked yes"
    assert lines[5].split()[1:] == words.split()
    assert captured.err.count("rows were left out here") == 2


def test_read_prints_rows_when_asked(
    logs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["read", logs[0], "--rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = "1048576 262144 float sum -1 200.00 5.24 5.24 0 200.00 5.24 5.24 0"
    assert lines[5].split() == words.split()


def test_read_writes_records(logs: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert run(["read", *logs, "--json", str(path)]) == 0
    records = read_records(path, kind="bench")
    assert [len(record.values["rows"]) for record in records] == [5, 5]
    assert records[0].machine.num_cores == 0  # it was not measured here
    assert run(["compare", logs[0], str(path), "--fail-below", "1"]) == 0


def test_read_takes_standard_input(
    logs: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = Path(logs[0]).read_bytes()
    content = io.BytesIO(whole[: whole.index(b"  16777216") + 60])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content))
    assert run(["read", "-"]) == 6
    captured = capsys.readouterr()
    assert "no" in captured.out.splitlines()[1].split()
    assert "ronde: standard input:15: run 1 has no footer" in captured.err


def test_the_user_may_know_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = Side(100.0, 10.0, 7.5, 0)
    rows = [Row(1000000, 250000, "float", "none", -1, half, half)]
    path = tmp_path / "a.log"
    path.write_text(log("", rows, Form(num_devices=4, has_banner=False)))
    assert run(["read", str(path)]) == 0
    captured = capsys.readouterr()
    assert "not named: all_gather or alltoall or alltoallv" in captured.err
    assert run(["read", str(path), "--test", "alltoall"]) == 0
    assert " alltoall " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["read"], "a LOG is required"),
        (["read", "-", "-"], "standard input can be read only once"),
        (["read", "nowhere.log"], "cannot read the log"),
        (["read", "/"], "cannot read the log"),
        (["read", "a.log", "--test", "all"], "--test must be all_reduce"),
        (["compare", "a.log"], "B is required"),
        (["compare", "-", "-"], "standard input can be read only once"),
    ],
)
def test_bad_words_are_an_error(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    said = refusal(capsys, "bench", *words, code=Exit.USAGE)
    assert message in said
