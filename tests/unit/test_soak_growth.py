"""What ``tests/soak/memory.py`` takes for a leak."""

from dataclasses import replace

from tests.soak.memory import Held, find_growth


def test_only_what_grows_to_the_end_is_a_leak():
    flat = [Held(i, 100.0, 200.0, 300.0, 1000, 4, 7) for i in range(20)]
    leaking = [replace(mark, allocated_mib=100 + mark.number) for mark in flat]
    assert find_growth(flat, 2.0) == []
    assert find_growth(leaking, 2.0) == ["allocated_mib 114 -> 119"]
