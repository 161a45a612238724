"""The house speaks the field's language, and has one name for one thing."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ronde"

# Names that nobody from this field knows, by the package that had them. A word in
# lower case may be no part of a name (hiring, _HiringAgent, is_hiring); one with a
# capital is an ordinary word that is no whole name (Wire, but wire_size is fine).
REPLACED = {
    "": "told says said",
    "launch": """
        keeper lineage hiring hired gathering greeting introduction arriving Boot wish
        remote_boot arranging arrangement undertaking crew rehearse switchboard
        attendant interview conversation converse Say Silent chronicle Verdict hearsay
        Evidence outbox intake Through Wire ferry door guest invitation knock admit
        introduce dismiss Proof Claim cookie""",
    "world": "Claim knobs dialects settlement",
    "collectives": """
        asked makers scene Agreement apart travelling Pages roll_call Rank_file meeting
        ancestry mail Post_office Box Inbox Outbox Label ground Stage Words places
        Helper patience lag movements combining""",
    "coordination": """
        proceedings tally asking Ask Forget Gone Network bell ears Ring hear medium
        Link Part farewell stir Carry_on Attend""",
    "data_parallel": """
        bond Tie shadows follower standing Keep_up Notes Silent newcomers Move Give""",
    "torch": "Stand_in heed Given Only Carry_out Member",
    "check": "errands keeping Panel Site examining Alike",
    "topology": "Stock Supply Demand Statements Started Told_cores Form",
    "bench": "contest teller Draft Channel own_ranks",
    "render": "contest teller Draft Channel own_ranks",
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def named(path: Path) -> list[str]:
    return [
        node.name
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).strip("_").lower()


def names_of(package: str) -> Iterator[tuple[str, str]]:
    """Yield each module, class and function in snake case, and where it stands."""
    for path in (SOURCE / package).rglob("*.py"):
        place = str(path.relative_to(SOURCE))
        yield path.stem, place
        for name in named(path):
            yield snake(name), f"{place}: {name}"


def has_word(name: str, word: str) -> bool:
    """Return whether a name is, or has as a part, a replaced word."""
    if word != word.lower():
        return name == word.lower()
    return f"_{word}_" in f"_{name}_"


@pytest.mark.parametrize("package", REPLACED)
def test_nothing_is_called_by_a_word_of_our_own(package: str) -> None:
    found = [
        f"{place} ({word})"
        for name, place in names_of(package)
        for word in REPLACED[package].split()
        if has_word(name, word)
    ]
    assert not found


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_the_house_is_as_it_is_drawn() -> None:
    """The drawing in CONTRIBUTING.md has the floors that import-linter holds."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    [drawing] = re.findall(r"```\n(cli .*?)```", contributing, re.DOTALL)
    drawn = [re.split(r"\s{2,}", line)[0] for line in drawing.splitlines()]
    project = (ROOT / "pyproject.toml").read_text()
    [layers] = re.findall(r"layers = \[(.*?)\]", project, re.DOTALL)
    assert drawn == re.findall(r'"(.*?)"', layers)
    floors = [name for floor in drawn for name in floor.split(" | ")]
    there = {path.stem for path in SOURCE.iterdir() if path.suffix != ".typed"}
    assert sorted(floors) == sorted(there - {"__init__", "__main__", "__pycache__"})
