"""Runs the table of ``cases.py``: ``ronde run -n 3 conformance.py FRONT_END...``."""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.frameworks.cases import CASES, REFUSALS, Array, Case, Refusal
from tests.frameworks.front_ends import ADAPTERS, FRONT_ENDS, Adapter

from ronde import session


class Table:
    """The table over one front end, on this rank."""

    def __init__(self, name: str, some: session.ProcessSet | None) -> None:
        self.name = name
        self.adapter: Adapter = ADAPTERS[name]()
        self.some = some
        self.held: list[tuple[str, list[Any], list[bytes]]] = []
        self.same: dict[str, bytes] = {}

    def check(self) -> None:
        for case in CASES:
            is_known = case.dtype != "bfloat16" or find_spec("ml_dtypes")
            is_member = not case.on_set or (self.some and self.some.included())
            if is_known and is_member and self.adapter.supports(case):
                self.check_case(case)
        if self.adapter.compiled is None:
            for refusal in REFUSALS:
                self.check_refusal(refusal)
        for name, results, before in self.held:
            assert [self.bits(each) for each in results] == before, f"{name}: changed"
        sent = session.allgather_object(self.same, f"{self.name} results")
        for name in {name for each in sent for name in each}:
            found = {each[name] for each in sent if name in each}
            assert len(found) == 1, f"{self.name}: {name} differs between ranks"

    def check_case(self, case: Case) -> None:
        ranks = range(session.size())
        if case.on_set and self.some:
            ranks = self.some.ranks
        rank, size = ranks.index(session.rank()), len(ranks)
        given = [case.make(each, size) for each in range(size)]
        expected = case.expect(given, rank)
        inputs = [self.adapter.to_value(array) for array in given[rank]]
        call = self.call_of(case, case.options(rank, size))
        for _ in range(2):  # negotiated, and known
            results = listed(call(inputs))
            found = [self.adapter.to_array(result) for result in results]
            for one, other in zip(found, expected, strict=True):
                require_equal(one, other, case, f"{self.name}: {case.name}")
            for value, array in zip(inputs, given[rank], strict=True):
                is_unchanged = self.bits(value) == array.tobytes()
                assert is_unchanged, f"{self.name}: {case.name} changed its input"
        self.held.append((case.name, results, [self.bits(each) for each in results]))
        if case.is_same:
            self.same[case.name] = b"".join(array.tobytes() for array in found)

    def call_of(self, case: Case, options: Any) -> Callable[[list[Any]], Any]:
        function = getattr(self.adapter.module, case.operation)
        further = dict(options, name=f"{self.name} {case.name}".replace(" ", "."))
        if case.on_set:
            further["process_set"] = self.some

        def call(inputs: list[Any]) -> Any:
            return function(inputs if case.is_group else inputs[0], **further)

        return self.adapter.compiled(call) if self.adapter.compiled else call

    def check_refusal(self, refusal: Refusal) -> None:
        function = getattr(self.adapter.module, refusal.operation)
        try:
            function(self.adapter.to_value(refusal.array), **refusal.options)
        except ValueError:
            return
        raise AssertionError(f"{self.name}: {refusal.name} was not refused")

    def bits(self, value: Any) -> bytes:
        return self.adapter.to_array(value).tobytes()


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def require_equal(found: Array, expected: Array, case: Case, name: str) -> None:
    assert isinstance(found, np.ndarray), name
    assert found.shape == expected.shape, f"{name}: {found.shape}"
    assert found.dtype == expected.dtype, f"{name}: {found.dtype}"
    if case.tolerance:
        np.testing.assert_allclose(
            found, expected, case.tolerance, 5 * case.tolerance, err_msg=name
        )
    else:
        np.testing.assert_array_equal(found, expected, err_msg=name)


def check_front_ends(names: Sequence[str]) -> None:
    """Check front ends on all ranks, which share one session."""
    session.init()
    ranks = sorted({0, session.size() - 1})
    some = session.add_process_set(ranks) if session.size() > 2 else None
    for name in names:
        Table(name, some).check()
    session.shutdown()


if __name__ == "__main__":
    check_front_ends(sys.argv[1:] or FRONT_ENDS)
