"""What every test keeps to: it needs no fast machine and no inner module.

A test asserts what happened and in which order. How long it took belongs into a
benchmark; limits that end a hang are long and the same everywhere: ``HANG_S``. Names of
the product come from its packages, so that files can move.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.limits import HANG_S

TESTS = Path(__file__).parents[1]
LEAST_S = 30.0
CLOCKS = {"monotonic", "perf_counter", "time"}
"""Functions of ``time``; ``process_time`` does not count what others do."""
OWN_MODULES = {"horovod", "torch"}
"""Whose modules have Horovod's names; a session of ``ronde.torch`` has no package."""
KEYWORDS = {"timeout", "within_s", "limit_s", "patience_s"}


def constants(tree: ast.Module) -> dict[str, float]:
    """Return the numbers that have a name in a module."""
    found: dict[str, float] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = number(node.value, found)
            if value is not None:
                found[node.targets[0].id] = value
    return found


def number(node: ast.expr, named: dict[str, float]) -> float | None:
    """Return an expression's value if it is a number; unknown limits count as 0."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return named.get(name, 0.0 if name.endswith("_S") else None)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            values = number(left, named), number(right, named)
            if None in values:
                return None
            return sum(values) if isinstance(op, ast.Add) else values[0] * values[1]
    return None


def reads_clock(node: ast.AST, measured: set[str]) -> bool:
    """Return whether an expression has a clock's reading in it."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=attr)):
                if attr in CLOCKS:
                    return True
            case ast.Name(id=name) if name in measured:
                return True
    return False


def names_of_readings(tree: ast.Module) -> set[str]:
    """Return the names that are assigned a clock's reading, or a difference of two."""
    found: set[str] = set()
    for _ in range(3):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and reads_clock(node.value, found)
                and not isinstance(node.value, ast.Call)
            ):
                found.add(node.targets[0].id)
    return found


def is_difference(node: ast.expr) -> bool:
    """Return whether an expression is seconds by its name, or a difference of such."""
    match node:
        case ast.Name(id=name):
            return name.endswith("_s")
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return is_difference(left) and is_difference(right)
    return False


def is_short(node: ast.expr, named: dict[str, float]) -> bool:
    value = number(node, named)
    return value is not None and value < LEAST_S


def asserts_short(
    node: ast.Assert, named: dict[str, float], measured: set[str]
) -> bool:
    """Return whether an assertion lets something take less than ``LEAST_S``."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Compare):
            continue
        sides = [part.left, *part.comparators]
        for op, *pair in zip(part.ops, sides, sides[1:], strict=False):
            if not isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                continue
            small, large = pair if isinstance(op, ast.Lt | ast.LtE) else pair[::-1]
            is_time = reads_clock(small, measured) or is_difference(small)
            is_bound = isinstance(large, ast.Name) and large.id.endswith("_S")
            if (is_time or is_bound) and is_short(large, named):
                return True
    return False


def short_limits(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that let something take less than ``LEAST_S``."""
    named = {"HANG_S": HANG_S} | constants(tree)
    measured = names_of_readings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Assert() if asserts_short(node, named, measured):
                yield node.lineno
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                if reads_clock(left, set()) and is_short(right, named):
                    yield node.lineno
            case ast.Call(func=func, args=args, keywords=keywords):
                limits = [each.value for each in keywords if each.arg in KEYWORDS]
                name = func.attr if isinstance(func, ast.Attribute) else ""
                limits += args if name in {"settimeout", "timeout"} else []
                if any(is_short(each, named) for each in limits):
                    yield node.lineno


def inner_imports(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that import from a module inside of a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "ronde."
        ):
            _, package, *inner = node.module.split(".")
            if inner and package not in OWN_MODULES:
                yield node.lineno


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("find", [short_limits, inner_imports])
def test_every_test_keeps_to_it(find):
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        # The loops of the soak break jobs at moments that they choose.
        if find is inner_imports or path.parent != TESTS / "soak"
        for line in sorted(set(find(parsed(path))))
    ]
    assert not found
