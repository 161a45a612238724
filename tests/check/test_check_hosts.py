"""Names of hosts, folded."""

import pytest
from hypothesis import given, strategies as st

from ronde.render import fold_hosts
from ronde.world import expand_list


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["node1"], "node1"),
        (["node3", "node4", "node5", "node6", "node7"], "node[3-7]"),
        (["node1", "node2", "node4", "login"], "node[1-2,4], login"),
        (["gpu08", "gpu09", "gpu10", "gpu11"], "gpu[08-11]"),
        (["n9", "n10"], "n[9-10]"),
        (["n1", "n01"], "n[1,01]"),
        (["a1.site2.org", "a2.site2.org"], "a[1-2].site2.org"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r1n[1-2], r2n[1-2]"),
        (["a", "b", "a"], "a, b"),
        (["fd00::1", "fd00::2"], "fd00::1, fd00::2"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        ([], ""),
    ],
)
def test_folded(names, folded):
    assert fold_hosts(names) == folded


def test_long_lists_are_counted():
    names = [f"{letter}{number}" for letter in "abcdef" for number in range(3)]
    assert fold_hosts(names, most=2) == "a[0-2], b[0-2] and 12 more"
    odd = [f"n{number}" for number in range(1, 20, 2)]
    assert fold_hosts(odd, most=3) == "n[1,3,5] and 7 more"


NAMES = st.lists(
    st.from_regex(r"[a-c]{0,2}[0-9]{0,3}(-[a-b][0-9]{1,2})?", fullmatch=True).filter(
        bool
    ),
    unique=True,
)


@given(NAMES)
def test_folded_hosts_expand_to_the_same_hosts(names):
    assert sorted(expand_list(fold_hosts(names), "test")) == sorted(names)
