"""The limits of CONTRIBUTING.md on the size of what is in src."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "ronde"

MAX_MODULE_LINES = 800
MAX_CLASS_LINES = 350
MAX_BODY_LINES = 60
MAX_PARAMETERS = 6

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Horovod's names and signatures, which a script must find as they are.
FOREIGN_SIGNATURES = ("horovod", "jax", "keras", "tensorflow", "torch")


@dataclass(frozen=True)
class Definition:
    """A class or function, and where it stands."""

    module: Path
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    is_public: bool

    def __str__(self) -> str:
        place = self.module.relative_to(SOURCE.parent)
        return f"{place}:{self.node.lineno} {self.node.name}"


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


@functools.cache
def definitions() -> list[Definition]:
    return [
        definition
        for module, tree in modules().items()
        for definition in walk(module, tree, is_public=True)
    ]


def walk(module: Path, parent: ast.AST, *, is_public: bool) -> Iterator[Definition]:
    """Yield all below ``parent``; what a private thing holds is private too."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            is_inner = isinstance(parent, FUNCTIONS)
            is_seen = is_public and not is_inner and not node.name.startswith("_")
            yield Definition(module, node, is_seen)
            yield from walk(module, node, is_public=is_seen)
        else:
            yield from walk(module, node, is_public=is_public)


def functions() -> list[Definition]:
    return [d for d in definitions() if isinstance(d.node, FUNCTIONS)]


# Of the front end, what users do not import.
INNER = ("autograd", "connecting", "delta_step", "recordings")


def is_api(definition: Definition) -> bool:
    """Return whether users import it: of the rest, many names say all there is."""
    parts = definition.module.relative_to(SOURCE).parts
    is_front_end = parts[0] in FOREIGN_SIGNATURES
    return (is_front_end and definition.module.stem not in INNER) or (
        definition.module == SOURCE / "collectives" / "communicator.py"
    )


def num_body_lines(definition: Definition) -> int:
    body = definition.node.body
    if ast.get_docstring(definition.node) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1


def num_parameters(definition: Definition) -> int:
    assert not isinstance(definition.node, ast.ClassDef)
    arguments = definition.node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([each for each in named if each.arg not in ("self", "cls")])


def test_modules_are_short() -> None:
    lengths = {m: len(m.read_text().splitlines()) for m in modules()}
    assert len(lengths) > 20
    too_long = {str(m): n for m, n in lengths.items() if n > MAX_MODULE_LINES}
    assert not too_long


def test_classes_are_short() -> None:
    too_long = [
        f"{definition}: {length} lines"
        for definition in definitions()
        if isinstance(definition.node, ast.ClassDef)
        if (length := (definition.node.end_lineno or 0) - definition.node.lineno + 1)
        > MAX_CLASS_LINES
    ]
    assert not too_long


def test_functions_are_short() -> None:
    too_long = [
        f"{function}: {length} lines"
        for function in functions()
        if (length := num_body_lines(function)) > MAX_BODY_LINES
    ]
    assert not too_long


def test_functions_take_few_parameters() -> None:
    too_many = [
        f"{function}: {count} parameters"
        for function in functions()
        if function.module.relative_to(SOURCE).parts[0] not in FOREIGN_SIGNATURES
        if (count := num_parameters(function)) > MAX_PARAMETERS
    ]
    assert not too_many


def test_modules_classes_and_what_users_import_are_explained() -> None:
    # A method that is defined anew inherits its explanation.
    explained = {
        (definition.module, definition.node.name)
        for definition in definitions()
        if ast.get_docstring(definition.node) is not None
    }
    unexplained = [
        str(definition)
        for definition in definitions()
        if definition.is_public
        if isinstance(definition.node, ast.ClassDef) or is_api(definition)
        if (definition.module, definition.node.name) not in explained
    ]
    unexplained += [
        str(module)
        for module, tree in modules().items()
        if ast.get_docstring(tree) is None
    ]
    assert not unexplained
