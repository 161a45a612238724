"""Policies, against the cases of Kubernetes and by their laws."""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ronde.topology import (
    ANY,
    NOWHERE,
    Hint,
    Policy,
    best_count,
    compare,
    counted_hints,
    decide,
    merge,
)

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "samples" / "topology_manager_cases.json").read_text()
)


def mask_of(bits: list[int] | None) -> int | None:
    return None if bits is None else sum(1 << bit for bit in bits)


def hint_of(plain: Any) -> Hint:
    return Hint(mask_of(plain[0]), plain[1])


def providers_of(case: Any) -> list[dict[str, list[Hint] | None] | None]:
    return [
        each
        and {
            name: hints and [hint_of(hint) for hint in hints]
            for name, hints in each.items()
        }
        for each in case["providers"]
    ]


def resources_of(
    providers: Sequence[Mapping[str, Sequence[Hint] | None] | None],
) -> list[tuple[Hint, ...]]:
    """Return the hints of each resource; a missing provider or hint is no obstacle."""
    none: Mapping[str, None] = {"": None}
    each = (hints for provided in providers for hints in (provided or none).values())
    return [ANY if hints is None else tuple(hints) or NOWHERE for hints in each]


RUNS = [
    pytest.param(suite, case, id=f"{suite['policy']}-{suite['numa']}-{case['name']}")
    for suite in CASES["suites"]
    # No distances are asked for.
    if not suite["prefer_closest"]
    for group in suite["groups"]
    for case in CASES["merge"][group]
]


@pytest.mark.parametrize(("suite", "case"), RUNS)
def test_hints_are_merged_as_the_topology_manager_does_in_any_order(suite, case):
    nodes = (1 << len(CASES["numa_distances"][suite["numa"]])) - 1
    bits, is_preferred = case["expected"]
    mask = nodes if bits == "ALL" else mask_of(bits)
    resources = resources_of(providers_of(case))
    shuffler = random.Random(case["name"])
    for _ in range(6):
        shuffler.shuffle(resources)
        verdict = decide(Policy(suite["policy"]), resources, nodes)
        assert (verdict.mask, verdict.is_preferred) == (mask, is_preferred)
        is_kept = is_preferred or suite["policy"] == "best-effort"
        assert verdict.is_admitted == is_kept


def all_combined(resources: list[list[Hint]], nodes: int) -> Hint:
    """Merge as the rules are told: every combination, one after the other."""
    combined: list[Hint] = []
    for combination in itertools.product(*resources):
        named = [hint.mask for hint in combination if hint.mask is not None]
        common = reduce(lambda a, b: a & b, named, nodes)
        is_preferred = all(h.is_preferred for h in combination) and len(set(named)) < 2
        combined.append(Hint(common, is_preferred))
    count = best_count(resources)
    best: Hint | None = None
    for each in combined:
        best = compare(best, each, count)
    return best or Hint(nodes, False)


@st.composite
def situations(draw, *, num_nodes: int = 4):
    """Draw nodes and the hints of up to four resources."""
    nodes = (1 << num_nodes) - 1
    mask = st.one_of(st.none(), st.integers(1, nodes))
    hints = st.lists(st.builds(Hint, mask, st.booleans()), min_size=1, max_size=5)
    return nodes, draw(st.lists(hints, max_size=4))


@given(situations())
def test_merging_equals_trying_every_combination(situation):
    nodes, resources = situation
    assert merge(resources, nodes) == all_combined(resources, nodes)


def test_on_one_node_a_single_node_is_no_limit():
    verdict = decide(Policy.SINGLE_NUMA_NODE, [[Hint(1, True)]], 1)
    assert verdict == (None, True, True)


counts = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@given(counts, st.integers(1, 12), st.data())
def test_a_hint_is_each_set_that_has_enough_and_preferred_where_small(
    total, quantity, data
):
    free = [data.draw(st.integers(0, count)) for count in total]
    hints = {h.mask: h.is_preferred for h in counted_hints(total, free, quantity)}

    def amount(mask: int, of: list[int]) -> int:
        return sum(n for bit, n in enumerate(of) if mask >> bit & 1)

    masks = range(1, 1 << len(total))
    able = [mask.bit_count() for mask in masks if amount(mask, total) >= quantity]
    assert hints == {
        mask: mask.bit_count() == min(able)
        for mask in masks
        if amount(mask, free) >= quantity
    }
