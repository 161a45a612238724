"""Comparison of hosts, to find those that differ from the majority."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from ronde.check.check import FAIL, WARN, Check, Problem, Problems, Severity, make_check
from ronde.check.fleet import Fleet, Value
from ronde.units import list_first

K = TypeVar("K")
MIN_MAJORITY = 3  # with fewer hosts there is no majority


def same_everywhere(
    severity: Severity, fact: str, title: str
) -> Callable[[Callable[[Value], str]], Check]:
    """Return a decorator for a check that one fact is equal on all hosts.

    The decorated function formats the fact.
    """

    def make(show: Callable[[Value], str]) -> Check:
        def judge(fleet: Fleet) -> Problems:
            return differing(fleet, fact, title, show)

        return make_check(show, judge, severity, (fact,))

    return make


def spell(value: Value) -> str:
    """Format a value for output; equal values have equal texts."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return json.dumps(value, sort_keys=True)


def find_odd(shown: Mapping[K, str], of: str = "hosts") -> Iterator[tuple[K, str, str]]:
    """Yield the hosts that differ from the majority, or all hosts without a majority.

    Each host comes with its value, and with a message on the other hosts' values.
    """
    counts = Counter(shown.values())
    if len(counts) < 2:
        return
    (usual, most), (_, second) = counts.most_common(2)
    is_draw = most == second or len(shown) < MIN_MAJORITY
    for host, value in shown.items():
        if is_draw:
            others = [v for v in counts if v != value]
            yield host, value, f"{list_first(others, 4)} elsewhere"
        elif value != usual:
            yield host, value, f"{usual} on {most} {of}"


def usual_value(usual: str) -> str:
    """Return the majority's value in a message of ``find_odd``, "" if there is none."""
    return usual.rpartition(" on ")[0]


def differing(
    fleet: Fleet, fact: str, title: str, show: Callable[[Value], str] = spell
) -> Problems:
    shown = {host: show(value) for host, value in fleet.known(fact).items()}
    for host, value, usual in find_odd(shown):
        yield Problem(f"{title} {value}", usual=usual, host=host)


class LowAmounts(NamedTuple, Generic[K]):
    """The hosts or devices with less than most others; in a draw, all of them."""

    hosts: tuple[K, ...]
    usual: float  # the amount of most hosts; in a draw, the largest
    is_draw: bool


def find_low(amounts: Mapping[K, float], share: float) -> LowAmounts[K]:
    """Find the keys with an amount below ``share`` of the upper median.

    If these are at least half of the keys, the result is a draw with all keys.
    """
    if not amounts:
        return LowAmounts((), 0.0, is_draw=False)
    usual = statistics.median_high(amounts.values())
    few = tuple(host for host, amount in amounts.items() if amount < share * usual)
    if few and 2 * len(few) >= len(amounts):
        return LowAmounts(tuple(amounts), max(amounts.values()), is_draw=True)
    return LowAmounts(few, usual, is_draw=False)


def find_less(
    amounts: Mapping[K, float],
    show: Callable[[float], str],
    share: float,
    fail_share: float = 0.0,
    kind: str = "hosts",
) -> Iterator[tuple[K, Severity, str]]:
    """Yield the keys that ``find_low`` finds, with a severity and the usual amount."""
    few, fewest = find_low(amounts, share), find_low(amounts, fail_share)
    for key in few.hosts:
        usual = f"{show(few.usual)} on most {kind}"
        if few.is_draw:
            others = [a for other, a in amounts.items() if other != key]
            ends = dict.fromkeys((show(min(others)), show(max(others))))
            usual = f"{' to '.join(ends)} elsewhere"
        # In a draw either one may be the slow one.
        is_bad = key in fewest.hosts and not fewest.is_draw
        yield key, FAIL if is_bad else WARN, usual


def having_less(
    amounts: Mapping[str, float],
    show: Callable[[float], str],
    share: float = 1.0,
    fail_share: float = 0.0,
) -> Problems:
    """Yield a problem for each host below ``share`` of the usual amount."""
    for host, severity, usual in find_less(amounts, show, share, fail_share):
        yield Problem(show(amounts[host]), severity, usual, host=host)


def once_a_host(*problems: Problems) -> Problems:
    """Yield, for each host, only the problems of the first source that has any."""
    known: set[str] = set()
    for each in problems:
        found = [problem for problem in each if problem.host not in known]
        known |= {problem.host for problem in found}
        yield from found
