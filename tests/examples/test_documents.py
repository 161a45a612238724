"""What README and docs show must be so."""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.launch import JobFacts, NodeFacts, rank_environment
from ronde.world import HOROVOD, OPEN_MPI, PMI, RONDE, World

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]


README = (ROOT / "README.md").read_text()
[PROGRAM] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
CONSOLES = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
TYPED = [
    words
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    for words in re.findall(
        r"^(?:salloc .* )?ronde (.+?)(?:  +#.*)?$", block, re.MULTILINE
    )
]
NODE = "perlmutter_a100_4x_slingshot_nccl2.29.7.xml"


def plain(line: str) -> str:
    """Return what is the same on every machine: numbers and spaces do not count."""
    line = line.replace(platform.node(), "vm")
    line = re.sub(r"(?<= )(ok|!|x|-)(?= |$)", "?", line)
    return re.sub(r"[\s-]+", " ", re.sub(r"\d[\d.e-]*(us|ms|s|%)?", "0", line)).strip()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    sample = ROOT / "tests" / "topology" / "samples" / "nccl_topo" / NODE
    (tmp_path / "node.xml").write_bytes(sample.read_bytes())
    return tmp_path


def marks_of(console: str) -> tuple[pytest.MarkDecorator, ...]:
    """Have one job start whenever tests run; the others start with the soak."""
    is_job = re.match(r"\$ ronde (run|bench) ", console) and console != CONSOLES[0]
    return (pytest.mark.soak,) if is_job else ()


@pytest.mark.parametrize(
    "console",
    [
        pytest.param(text, id=text.splitlines()[0], marks=marks_of(text))
        for text in CONSOLES
    ],
)
def test_the_readme_shows_what_its_commands_print(
    directory: Path, console: str
) -> None:
    for command, output in re.findall(
        r"^\$ ronde (.+)\n([^$]*)", console, re.MULTILINE
    ):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ronde"), *command.split()],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        shown = [plain(line) for line in output.splitlines()]
        printed = [plain(line) for line in done.stdout.splitlines()]
        if "..." in shown:  # any lines
            rest = iter(printed)
            shown = [line for line in shown if line != "..."]
            printed = [next((x for x in rest if x == line), "") for line in shown]
        assert printed == shown, done.stdout


def test_the_first_screen_of_the_readme_installs_and_trains() -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    assert "pip install" in first_screen
    assert CONSOLES[0].strip() in first_screen


# Verbs without verbs of their own.
ALONE = ("run", "horovodrun", "alias", "check", "ps", "top", "why", "profile")


def test_the_readme_names_no_option_that_does_not_exist() -> None:
    assert len(TYPED) > 20
    named: dict[tuple[str, ...], set[str]] = {}
    for words in map(str.split, TYPED):
        depth = 1 if words[0] in ALONE else 2
        options = {w for w in words[depth:] if re.match(r"--?[a-z]", w, re.IGNORECASE)}
        named.setdefault(tuple(words[:depth]), set()).update(options)
    for command, options in named.items():
        done = subprocess.run(
            [sys.executable, "-m", "ronde", *command, "--help"],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        missing = {o for o in options if not re.search(rf"{o}\b", done.stdout)}
        assert not missing, command


def anchors(document: Path) -> set[str]:
    """Return what a link may have after its ``#``, as code hosts derive it."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)", document.read_text())
    for target, anchor in links:
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_contributing_names_places_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = re.findall(r"`((?:src|tests|docs|scripts)/[^`]*)`", text)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place.split()[0]).exists()] == []


def test_every_variable_of_the_environment_is_explained() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    ours = rank_environment(
        World(0, 1, 0, 1, 0, 1), JobFacts("", 0, ""), NodeFacts("", 0, 1)
    )
    read = [name for d in (RONDE, HOROVOD, OPEN_MPI, PMI) for name in d.names.values()]
    assert [name for name in (*ours, *read) if f"`{name}`" not in text] == []
