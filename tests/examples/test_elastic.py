"""The example and the how-to of elastic jobs: a rank is killed, the others go on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
HOW_TO = (ROOT / "docs" / "how-to" / "elastic.md").read_text()
[PLAIN, ELASTIC, *MORE] = re.findall(r"```python\n(.*?)```", HOW_TO, flags=re.DOTALL)
COMMAND = str(Path(sys.executable).parent / "ronde")
pytestmark = pytest.mark.soak
ENVIRONMENT = {"PATH": os.defpath, "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}


def train(cwd: Path, *program: str, kill_at: str) -> list[str]:
    """Return what a job prints of which rank 1 of 2 is killed when that is printed."""
    job = ["run", "-H", "localhost:2", "--min-ranks", "1", "--timeout", f"{HANG_S}s"]
    lines: list[str] = []
    with subprocess.Popen(
        [COMMAND, *job, "--", sys.executable, *program],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = 0
        for line in process.stdout:
            lines.append(line.rstrip())
            if found := re.search(r"rank 1 of 2, pid (\d+)", line):
                pid = pid or int(found[1])
            if pid and any(kill_at in line for line in lines):
                os.kill(pid, signal.SIGKILL)
                break
        lines += process.stdout.read().splitlines()
    assert process.returncode == 0, lines
    return lines


def find(pattern: str, lines: list[str]) -> re.Match[str]:
    [found] = [m for m in (re.search(pattern, line) for line in lines) if m]
    return found


SURVIVED = "rank 1 on localhost was killed by SIGKILL; 2 ranks became 1 and go on"


def test_the_example_ends_without_the_rank_that_was_killed() -> None:
    lines = train(ROOT, "examples/elastic.py", "--epochs", "8", kill_at="epoch 2:")
    find(f"{SURVIVED} from step", lines)
    # 15 steps an epoch, whoever takes them.
    assert float(find(r"120 steps, test accuracy (.*)%", lines)[1]) > 90
    epochs = [found[1] for x in lines if (found := re.search(r"epoch (\d+):", x))]
    assert epochs == [str(epoch) for epoch in range(1, 9)]


def test_the_how_to_survives_too(tmp_path: Path) -> None:
    # It prints nothing while it trains, and is to be killed then.
    shown = "optimizer.step()\n        print(f'step {step.number}', flush=True)"
    text = ELASTIC.replace("optimizer.step()", shown).replace("=500", "=20")
    (tmp_path / "train.py").write_text(text)
    lines = train(tmp_path, "train.py", kill_at="step 100")
    find(f"{SURVIVED} ", lines)
    assert float(find(r"1280 steps, loss (\S+)", lines)[1]) < 1e-9


def test_the_how_tos_other_programs_train(tmp_path: Path) -> None:
    setup, _ = ELASTIC.split("loop = ")
    programs = [PLAIN.replace("range(500)", "range(2)")] + [setup + x for x in MORE]
    assert len(programs) == 3
    for number, text in enumerate(programs):
        (tmp_path / f"{number}.py").write_text(text)
    # One process, as importing torch takes the longest.
    run_all = "import runpy; [runpy.run_path(f'{n}.py') for n in range(3)]"
    done = subprocess.run(
        [sys.executable, "-c", run_all],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
