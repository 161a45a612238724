"""Probes in processes of their own: what hangs or breaks is alone in it."""

from pathlib import Path

import pytest

from ronde.check import ProbeEntry, run_probes

PROGRAMS = {
    "slow": "import time\ndef read(reading): time.sleep(600)",
    "quick": "def read(reading): reading.values['a'] = reading.settings['number']",
    "broken": "def read(reading): raise RuntimeError('no such thing')",
    "loud": "def read(reading):\n    print('noise')\n    reading.values['b'] = 1",
}


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ProbeEntry]:
    package = tmp_path / "some_probes"
    package.mkdir()
    for name, text in PROGRAMS.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entries = {
        name: ProbeEntry((f"some_probes.{name}",), 60.0, name) for name in PROGRAMS
    }
    return entries | {"slow": entries["slow"]._replace(deadline_s=1.0)}


def test_a_probe_that_hangs_costs_its_deadline_and_no_other_its_facts(
    entries: dict[str, ProbeEntry],
) -> None:
    # The others are slower to start than one deadline, on a machine that is busy.
    others = {name: entry for name, entry in entries.items() if name != "slow"}
    outcomes = run_probes({"slow": entries["slow"], **others}, {"number": 7})
    assert outcomes["slow"].failure == "it hung and was killed after 1 s"
    assert outcomes["quick"].values == {"a": 7}
    assert outcomes["loud"].values == {"b": 1}
    assert outcomes["broken"].failure.endswith("RuntimeError: no such thing")


def test_what_was_quick_is_whole_though_what_was_slow_took_longer_than_it_may(
    entries: dict[str, ProbeEntry],
) -> None:
    slow = entries["slow"]._replace(deadline_s=5.0)
    quick = entries["quick"]._replace(deadline_s=4.0)
    outcomes = run_probes({"slow": slow, "quick": quick}, {"number": 7})
    assert outcomes["slow"].failure == "it hung and was killed after 5 s"
    assert outcomes["quick"].values == {"a": 7}
    assert outcomes["quick"].seconds < 4.0


def test_no_probes_are_no_trouble() -> None:
    assert run_probes({}, {}) == {}
