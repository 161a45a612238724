"""Probes in separate processes: a hanging or crashing one is alone."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.check import ProbeEntry, run_probes

PROGRAMS = {
    "slow": "import time\ndef read(reading): time.sleep(600)",
    "quick": "def read(reading): reading.values['a'] = reading.settings['number']",
    "broken": "def read(reading): raise RuntimeError('no such thing')",
    "waiting": "def read(reading): open(reading.settings['path']).read()",
    "opening": "def read(reading): open(reading.settings['path'], 'w').close()",
    "late": "import time\ndef read(reading):\n    for _ in range(10): "
    "time.sleep(0.15), sum(range(3_000_000))",
    "outer": "import subprocess, sys\ndef read(reading):\n    "
    "code = 'import some_probes.late as late; late.read(None)'\n    "
    "subprocess.run([sys.executable, '-c', code], start_new_session=True, check=True)",
    "starved": "import os, pathlib, some_probes.outer\ndef read(reading):\n    "
    "group = pathlib.Path(reading.settings['group'])\n    "
    "(group / 'cgroup.procs').write_text(str(os.getpid()))\n    "
    "some_probes.outer.read(reading)",
    "endless": "def read(reading):\n    while True: pass",
    "loud": "def read(reading):\n    print('noise')\n    reading.values['b'] = 1",
}


@pytest.fixture
def entries(tmp_path, monkeypatch):
    package = tmp_path / "some_probes"
    package.mkdir()
    for name, text in PROGRAMS.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entries = {
        name: ProbeEntry((f"some_probes.{name}",), HANG_S, name) for name in PROGRAMS
    }
    impatient = ("slow", "late", "outer", "starved", "endless")
    return entries | {
        name: entries[name]._replace(deadline_s=1.0) for name in impatient
    }


def test_a_hanging_probe_leaves_the_others(entries):
    # The others are slower to start than one deadline, on a machine that is busy.
    chosen = {name: entries[name] for name in ("slow", "quick", "loud", "broken")}
    outcomes = run_probes(chosen, {"number": 7})
    assert outcomes["slow"].failure == "it hung and was killed after 1 s"
    assert outcomes["quick"].values == {"a": 7}
    assert outcomes["loud"].values == {"b": 1}
    assert outcomes["broken"].failure.endswith("RuntimeError: no such thing")


def test_a_late_probe_that_computes_has_not_hung(entries):
    names = ("late", "outer", "endless")
    outcomes = run_probes({name: entries[name] for name in names}, {})
    for name in ("late", "outer"):
        assert outcomes[name].failure == ""
        assert outcomes[name].seconds > entries[name].deadline_s
    assert outcomes["endless"].failure.startswith("it hung and was killed after ")


@pytest.fixture
def quota():
    """A control group whose processes together have a tenth of a CPU."""
    folder = Path("/sys/fs/cgroup/cpu")
    folder = folder if folder.is_dir() else folder.parent
    group = folder / f"ronde-test-{os.getpid()}"
    file, text = group / "cpu.cfs_quota_us", "10000"
    if folder.name != "cpu":
        file, text = group / "cpu.max", "10000 100000"
    with ExitStack() as closing:
        try:
            group.mkdir()
            closing.callback(group.rmdir)
            file.write_text(text)
        except OSError as error:
            pytest.skip(f"no control group with a quota can be made: {error}")
        yield group


@pytest.mark.waits
def test_a_probe_with_little_of_a_processor_has_not_hung(entries, quota):
    """Its child computes in a session of its own, and mostly waits for a CPU."""
    chosen = {name: entries[name] for name in ("starved", "slow")}
    outcomes = run_probes(chosen, {"group": str(quota)})
    assert outcomes["starved"].failure == ""
    assert outcomes["starved"].seconds > entries["starved"].deadline_s
    assert outcomes["slow"].failure == "it hung and was killed after 1 s"
    text = (quota / "cpu.stat").read_text()
    assert int(text.partition("nr_throttled ")[2].split()[0]) > 0


def test_probes_run_side_by_side(entries, tmp_path):
    """The first waits for the second, which comes to nothing if they take turns."""
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    waiting = entries["waiting"]._replace(settings={"path": str(meeting)})
    opening = entries["opening"]._replace(settings={"path": str(meeting)})
    outcomes = run_probes({"waiting": waiting, "opening": opening}, {})
    assert [each.failure for each in outcomes.values()] == ["", ""]
