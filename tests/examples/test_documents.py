"""What README and docs show must be so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.launch.environments import JobFacts, NodeFacts, rank_environment
from ronde.world import World
from ronde.world.launcher_env import HOROVOD, OPEN_MPI, PMI, RONDE

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]


def test_the_example_of_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    [program] = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [str(Path(sys.executable).parent / "ronde"), "run", "-n", "2", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("[0] 2 ranks, loss ")
    # It has a solution, and 100 steps get there but for rounding.
    assert float(line.split()[-1]) < 1e-6


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


def test_every_variable_of_the_environment_is_explained() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    ours = rank_environment(
        World(0, 1, 0, 1, 0, 1), JobFacts("", 0, ""), NodeFacts("", 0, 1)
    )
    read = [name for d in (RONDE, HOROVOD, OPEN_MPI, PMI) for name in d.names.values()]
    assert [name for name in (*ours, *read) if f"`{name}`" not in text] == []
