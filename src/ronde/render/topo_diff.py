"""Two hosts, compared -> words."""

from collections.abc import Sequence

from ronde.render.wrapping import list_some, wrap
from ronde.topology.comparison import (
    Difference,
    HostComparison,
    PathChange,
    PathComparison,
)
from ronde.topology.paths.network import Path

_MAX_PAIRS = 3
_MAX_CHANGES = 3
_MAX_NAMES = 4
_MAX_VALUE = 60
_NAMES = ("bus address", "port")


def tell_comparison(first: str, second: str, comparison: HostComparison) -> str:
    """Return what differs from one host to another as text, the cost first.

    Args:
        first: What to call the one.
        second: What to call the other.
        comparison: Of both.
    """
    if comparison.is_equal:
        return (
            f"{first} and {second} are alike: {comparison.num_matched} elements and "
            f"{sum(each.num_pairs for each in comparison.paths)} paths.\n"
            f"{_left_out(comparison)}"
        )
    parts = [
        _head(first, second, comparison),
        _paths(comparison.paths),
        _differences(comparison.differences),
        _missing("only in A", comparison.only_first),
        _missing("only in B", comparison.only_second),
        _left_out(comparison),
    ]
    return "\n".join(part for part in parts if part)


def _head(first: str, second: str, comparison: HostComparison) -> str:
    num, num_same = comparison.num_matched, comparison.num_by_address
    text = f"A: {first}\nB: {second}\n"
    if num_same < num:
        text += wrap(
            "",
            f"{num - num_same} of {num} elements have another bus address or name in "
            "B, or none: they are matched by number and name.",
            indent=0,
        )
    return text


def _paths(paths: Sequence[PathComparison]) -> str:
    told = [each for each in paths if each.num_pairs]
    text = "paths, in NCCL's figures (A -> B):\n" if told else ""
    for each in told:
        text += f"  {each.kind}: {len(each.changes)} of {each.num_pairs} pairs differ\n"
        groups: dict[str, list[PathChange]] = {}
        for change in each.changes:
            groups.setdefault(_change(change), []).append(change)
        for words, changes in sorted(groups.items(), key=lambda g: _kept(g[1][0])):
            names = ["-".join(change.ends) for change in changes]
            text += wrap("    ", f"{words}: {list_some(names, _MAX_PAIRS, 'pairs')}")
    return text


def _change(change: PathChange) -> str:
    words = f"{_path(change.was)} -> {_path(change.now)}"
    kept = _kept(change)
    return words if kept == 1 else f"{words} ({kept - 1:+.0%})"


def _kept(change: PathChange) -> float:
    """Return what share of the bandwidth the second has."""
    was, now = change.was.gb_per_s, change.now.gb_per_s
    return now / was if was and now else 1.0


def _path(path: Path) -> str:
    return f"{path.kind} {path.gb_per_s:g} GB/s" if path.gb_per_s else path.kind


def _differences(differences: Sequence[Difference]) -> str:
    by_fact: dict[str, list[Difference]] = {}
    for each in differences:
        by_fact.setdefault(each.fact, []).append(each)
    text = "what differs (A -> B):\n" if by_fact else ""
    for fact in sorted(by_fact, key=lambda fact: _fact_order(by_fact[fact])):
        text += _fact(fact, by_fact[fact])
    return text


def _fact(fact: str, differences: Sequence[Difference]) -> str:
    """Return the changes of one fact, those of most elements first."""
    groups: dict[str, list[str]] = {}
    for each in differences:
        groups.setdefault(_difference(each), []).append(each.element)
    if fact in _NAMES:
        names = list_some(list(groups), _MAX_CHANGES, "elements")
        return wrap("  ", f"{fact}: {names}")
    ordered = sorted(groups, key=lambda change: -len(groups[change]))
    text = ""
    for change in ordered[:_MAX_CHANGES]:
        names = list_some(groups[change], _MAX_NAMES, "elements")
        text += wrap("  ", f"{fact}: {change}: {names}")
    left = len(ordered) - _MAX_CHANGES
    return text + (f"       and {left} more of this kind\n" if left > 0 else "")


def _fact_order(differences: Sequence[Difference]) -> tuple[bool, float]:
    """Return a key that has the greatest loss first, and mere names last."""
    rates = [
        each.now_gb_per_s / each.was_gb_per_s
        for each in differences
        if each.was_gb_per_s and each.now_gb_per_s
    ]
    return differences[0].fact in _NAMES, min(rates, default=1.0)


def _difference(each: Difference) -> str:
    was = _value(each.was, each.was_gb_per_s)
    return f"{was} -> {_value(each.now, each.now_gb_per_s)}"


def _value(value: str, gb_per_s: float) -> str:
    short = value if len(value) <= _MAX_VALUE else f"{value[: _MAX_VALUE - 3]}..."
    return f"{short} ({gb_per_s:g} GB/s)" if gb_per_s else short


def _left_out(comparison: HostComparison) -> str:
    """Return what is not compared as one host tells of none."""
    sides = ("A", comparison.untold_first), ("B", comparison.untold_second)
    return "".join(
        wrap("", f"{side} has no {' and no '.join(roles)}: not compared.")
        for side, roles in sides
        if roles
    )


def _missing(title: str, names: Sequence[str]) -> str:
    return wrap("", f"{title}: {list_some(names, 8, 'elements')}") if names else ""
