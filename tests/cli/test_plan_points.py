"""``ronde plan points``: a table of speeds, its empty cells predicted."""

import csv
import io
from pathlib import Path

import pytest

from ronde.cli import main

_HEAD = "mine,series,gpus,nodes,throughput,parameters,batch_a_gpu,node_gbit_per_s\n"
_ROWS = [
    "a,one,1,1,253.1,25.6e6,64,10\n",
    "b,one,4,1,925,25.6e6,64,10\n",
    "c,one,8,2,1282,25.6e6,64,10\n",
    "d,one,16,4,,25.6e6,64,10\n",
    "e,two,1,1,100,,,\n",
    "f,two,64,8,,,,\n",
]


def _complete(tmp_path: Path, text: str) -> tuple[int, list[dict[str, str]]]:
    sheet, out = tmp_path / "sheet.csv", io.StringIO()
    sheet.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        code = main(["plan", "points", str(sheet)])
    return code, list(csv.DictReader(io.StringIO(out.getvalue())))


def test_empty_speeds_are_predicted_and_unknown_columns_kept(tmp_path: Path) -> None:
    code, rows = _complete(tmp_path, _HEAD + "".join(_ROWS))
    assert code == 0
    assert [row["mine"] for row in rows] == [*"abcdef"]
    assert [bool(row["predicted"]) for row in rows] == [False] * 3 + [True, False, True]
    asked = rows[3]
    low, middle, high = (float(asked[name]) for name in ("low", "predicted", "high"))
    assert 1282 < low < middle < high < 4 * 1282
    assert asked["binds"] == "bandwidth between"


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    _, rows = _complete(tmp_path, _HEAD + "".join(_ROWS))
    _, reversed_rows = _complete(tmp_path, _HEAD + "".join(reversed(_ROWS)))
    assert reversed_rows[::-1] == rows


def test_a_grid_of_layouts_is_predicted_by_arithmetic(tmp_path: Path) -> None:
    head = "series,kind,gpus,throughput,parameters\n"
    grid = "g,model_parallel,8,100,1e9\ng,model_parallel,16,,4e9\n"
    _, rows = _complete(tmp_path, head + grid)
    assert float(rows[1]["predicted"]) == pytest.approx(50)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no series, gpus, throughput"),
        ("series,gpus\na,1\n", "no throughput"),
        ("series;gpus;throughput\n", "with commas in between, but has no series"),
        ("series,gpus,throughput,gpus\n", "got 'gpus' twice"),
        ("series,gpus,throughput\na,1,2,3\n", "line 2 must have 3 cells, got more"),
    ],
)
def test_a_table_without_its_columns_is_refused(
    tmp_path: Path, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(text)
    assert main(["plan", "points", str(sheet)]) == 64
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("a,0,5,\na,2,,\n", "gpus must be a whole number above 0, got '0'"),
        ("a,1,-5,\na,2,,\n", "throughput must be a number above 0, got '-5'"),
        ("a,1,nan,\na,2,,\n", "throughput must be a number above 0, got 'nan'"),
        ("a,1,x,\na,2,,\n", "throughput must be a number above 0, got 'x'"),
        ("a,,5,\na,2,,\n", "gpus must be a number"),
        ("a,1,5,2\na,2,,1\n", "nodes must be at most the gpus"),
        ("a,2,,\n", "it has no speed"),
    ],
)
def test_a_wrong_series_is_left_out_with_its_reason(
    tmp_path: Path, rows: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(f"series,gpus,throughput,nodes\nright,1,5,1\nright,2,,1\n{rows}")
    assert main(["plan", "points", str(sheet)]) == 1
    out, err = capsys.readouterr()
    assert problem in err
    assert "Traceback" not in err
    found = {
        row["series"]: row["predicted"] for row in csv.DictReader(io.StringIO(out))
    }
    assert found["right"]
    assert not found["a"]


def test_doubtful_speeds_are_shown_and_facts_may_stand_in_any_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _HEAD + "a,s,8,1,800,,,\nc,s,8,1,900,,,\nb,s,16,2,,25e6,,1\n"
    code, rows = _complete(tmp_path, text)
    assert code == 0
    assert "speeds of 8 ranks are 800 to 900" in capsys.readouterr().err
    assert rows[2]["predicted"]
    assert 800 < float(rows[2]["predicted"]) < 1800  # of the median, 850
    speeds = []
    for rate in (1, 100):
        asked = f"b,s,16,2,,25e6,64,{rate}\n"
        _, (_, row) = _complete(tmp_path, f"{_HEAD}a,s,8,1,800,25e6,64,\n{asked}")
        speeds.append(float(row["predicted"]))
    assert speeds[0] < 0.8 * speeds[1]
