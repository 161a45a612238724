"""The fit of the priors of ``ronde plan``, on made-up series."""

import csv
import io
from pathlib import Path

import pytest
from scripts import fit_priors

from ronde.plan import load_priors

_HEAD = "id,source,series,split,kind,gpus,nodes,throughput\n"


def _tables(tmp_path: Path, loss: float) -> tuple[Path, Path]:
    """Write series that lose a share of speed at each doubling, whole and cut short."""
    whole, cut = tmp_path / "points.csv", tmp_path / "tasks.csv"
    rows = [
        (f"{source}{i}{n}", source, f"{source}{i}", n, 100 * n * (1 - loss) ** log_n)
        for source in "abc"
        for i in range(2)
        for log_n, n in enumerate((1, 2, 4, 8))
    ]
    text = [f"{i},{s},{name},test,weak,{n},{n}" for i, s, name, n, _ in rows]
    speeds = [speed for *_, speed in rows]
    whole.write_text(
        _HEAD + "".join(f"{t},{v}\n" for t, v in zip(text, speeds, strict=True))
    )
    short = (v if r[3] == 1 else "" for r, v in zip(rows, speeds, strict=True))
    cut.write_text(
        _HEAD + "".join(f"{t},{v}\n" for t, v in zip(text, short, strict=True))
    )
    return whole, cut


def test_a_loss_that_all_series_show_moves_the_priors(tmp_path: Path) -> None:
    slow, _ = _tables(tmp_path, 0.08)
    found = fit_priors.fit(fit_priors.read(slow), "")
    (tmp_path / "fast").mkdir()
    fast, _ = _tables(tmp_path / "fast", 0.0)
    other = fit_priors.fit(fit_priors.read(fast), "")
    base = fit_priors.BASE.unknowns
    assert found.unknowns["growth"].middle > base["growth"].middle
    assert other.unknowns["growth"].middle < base["growth"].middle


def test_a_source_is_predicted_by_the_others(tmp_path: Path) -> None:
    whole, cut = _tables(tmp_path, 0.05)
    series, tasks = fit_priors.read(whole), fit_priors.read(cut)
    truth = {
        r.text("id"): float(r.text("throughput")) for e in series.values() for r in e
    }
    without = fit_priors.fit(series, "a")
    others = {key: rows for key, rows in series.items() if key[0] != "a"}
    assert without == fit_priors.fit(others, "")
    cases = [c for s in "ab" for c in fit_priors.predict(tasks, truth, s, without)]
    assert len(cases) == 12
    out = tmp_path / "out.csv"
    fit_priors.write_left_out(out, cases)
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["id"] for row in rows][:2] == ["a02", "a04"]
    for row in rows:
        assert float(row["low"]) < float(row["predicted"]) < float(row["high"])


def test_the_committed_priors_are_of_the_script() -> None:
    assert list(load_priors().unknowns) == list(fit_priors.BASE.unknowns)
    fixed = fit_priors.BASE.unknowns["fit"]
    assert load_priors().unknowns["fit"] == pytest.approx(fixed)
