"""The programs of the how-to on sharded training run, and print what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
HOW_TO = (ROOT / "docs" / "how-to" / "sharded-training.md").read_text()
[TRAIN, CHECK, PIPELINE] = re.findall(r"```python\n(.*?)```", HOW_TO, flags=re.DOTALL)
HEADER = """
import torch
from torch import nn
from ronde.torch import parallel
from train import build, loss_of

"""
pytestmark = pytest.mark.soak
RUN = (str(Path(sys.executable).parent / "ronde"), "run", "--no-prefix", "-n")
ENVIRONMENT = {"PATH": os.defpath, "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(folder: Path, *words: str, code: str = "") -> str:
    (folder / "program.py").write_text(HEADER + code)
    done = subprocess.run(
        words,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_and_goes_on_with_other_ranks(folder: Path) -> None:
    lines = run(folder, *RUN, "4", "train.py").splitlines()
    losses = dict(re.findall(r"rank (\d): loss (\d+\.\d+)", "\n".join(lines)))
    assert len(losses) == 4
    assert losses["0"] == losses["1"]  # of one tp group
    load = """
mesh = parallel.init_mesh(parallel.Layout(dp_shard=2))
model = parallel.parallelize(build(), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(parallel.load("checkpoint", model, optimizer))
"""
    found = run(folder, *RUN, "2", "program.py", code=load)
    assert found.splitlines() == ["{'step': 19}"] * 2


def test_the_estimate(folder: Path) -> None:
    [words] = re.findall(r"^\$ ronde (plan memory train.py .*)$", HOW_TO, re.MULTILINE)
    found = run(folder, RUN[0], *words.split())
    assert found.startswith("dp_shard=2,tp=2: 4 ranks, zero 3;")
    assert re.search(r"^optimizer state +\d.*\n(.*\n)*total +\d", found, re.MULTILINE)
    assert "It fits: " in found


def test_the_check(folder: Path) -> None:
    lines = run(folder, *RUN, "2", "program.py", code=CHECK).splitlines()
    assert len(lines) == 2
    assert all("is allowed" in line for line in lines)


def test_the_pipeline(folder: Path) -> None:
    found = run(folder, *RUN, "2", "program.py", code=PIPELINE)
    assert found.count("11% of the time is waited") == 2
    assert len(re.findall(r"^loss \d+\.\d+$", found, re.MULTILINE)) == 1
