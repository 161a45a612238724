"""Connections between hosts: the hosts that explain the faults are reported."""

import pytest
from hypothesis import given, strategies as st
from tests.check.fleets import of_family

from ronde.check import Family, Fleet, HostFacts, Severity, blame, judge, lost_pairs

FINE = {
    "error": "", "is_refused": False, "lost_bytes": 0,
    "own_mtu": 1500, "mtu": 1500,
}  # fmt: skip
CLOSED = {
    "error": "port 4001: no answer", "is_refused": False, "lost_bytes": 0,
    "own_mtu": 1500, "mtu": None, "is_heard": False,
}  # fmt: skip


def fleet_of(num, changed, **facts):
    """Return hosts ``n1``, ... that reach each other, except for changes by pair."""
    names = [f"n{i + 1}" for i in range(num)]
    return Fleet(
        tuple(
            HostFacts(
                name,
                {
                    "network.reach": {
                        other: FINE | changed.get((name, other), {})
                        for other in names
                        if other != name
                    },
                    "network.address": f"10.0.0.{name[1:]}",
                    "network.peer_mtu": 1500,
                    **facts.get(name, {}),
                },
                {},
                {},
            )
            for name in names
        ),
        {},
    )


def found(fleet):
    return {
        (each.check, each.host): each
        for each in judge(fleet, of_family(Family.NETWORK)).findings
    }


def pairs_with(host, num):
    others = [f"n{i + 1}" for i in range(num) if f"n{i + 1}" != host]
    return [(host, o) for o in others] + [(o, host) for o in others]


@pytest.mark.parametrize("num", [1, 2, 3, 40])
def test_healthy_connections_have_no_findings(num):
    assert not found(fleet_of(num, {}))


def test_a_host_behind_a_firewall_is_named():
    reported = found(fleet_of(4, {(f"n{i}", "n2"): CLOSED for i in (1, 3, 4)}))
    assert set(reported) == {("reachable", "n2")}
    finding = reported["reachable", "n2"]
    assert finding.severity == Severity.FAIL
    assert finding.message == (
        "n1, n3, n4 cannot connect to it; the other way it works; port 4001: no answer"
    )
    assert "from n1 to n2" in finding.fix


def test_a_host_that_is_cut_off_is_named():
    reported = found(fleet_of(3, dict.fromkeys(pairs_with("n1", 3), CLOSED)))
    assert set(reported) == {("reachable", "n1")}
    assert reported["reachable", "n1"].message == (
        "it cannot connect to n2, n3 and n2, n3 cannot connect to it; "
        "port 4001: no answer"
    )


def test_loss_in_one_direction_is_found():
    """Without n3's packets n2 gets neither requests nor replies; n2's arrive at n3."""
    heard = CLOSED | {"is_heard": True}
    reported = found(fleet_of(3, {("n3", "n2"): CLOSED, ("n2", "n3"): heard}))
    assert set(reported) == {("reachable", "n3")}
    assert reported["reachable", "n3"].message == (
        "it cannot connect to n2; the other way packets arrive; port 4001: no answer"
    )


def test_the_refusing_host_is_reported():
    refused = CLOSED | {"is_refused": True, "error": "port 5: connection refused"}
    reported = found(fleet_of(3, {("n1", "n3"): refused | {"is_heard": True}}))
    assert set(reported) == {("reachable", "n3")}
    assert reported["reachable", "n3"].message.endswith("refused; datagrams arrive")


def test_a_smaller_mtu_is_reported_once():
    """Packets of n2's size arrive: that its size is another is all there is to say."""
    small = {("n2", "n1"): 1280, ("n2", "n3"): 1280, ("n1", "n2"): 1280,
             ("n3", "n2"): 1280}  # fmt: skip
    changed = {pair: {"mtu": size} for pair, size in small.items()}
    for pair in [("n2", "n1"), ("n2", "n3")]:
        changed[pair]["own_mtu"] = 1280
    reported = found(fleet_of(3, changed, n2={"network.peer_mtu": 1280}))
    assert set(reported) == {("mtu", "n2")}
    assert reported["mtu", "n2"].message == "MTU 1280"
    assert reported["mtu", "n2"].usual == "1500 on 2 hosts"
    # All that TCP sends arrives: it takes the smaller of two.
    assert reported["mtu", "n2"].severity == Severity.WARN


def test_a_small_path_mtu_is_found():
    changed = {pair: {"mtu": 1400} for pair in pairs_with("n3", 3)}
    reported = found(fleet_of(3, changed))
    assert set(reported) == {("path-mtu", "n3")}
    assert reported["path-mtu", "n3"].message == (
        "to n1, n2 and from n1, n2: no packets above 1400 bytes arrive, its MTU is 1500"
    )


def test_lost_large_messages_are_distinguished_from_a_closed_port():
    changed = {("n1", "n2"): {"lost_bytes": 65536, "mtu": None}}
    reported = found(fleet_of(3, changed))
    assert set(reported) == {("path-mtu", "n1")}
    assert "to n2: messages of 64KiB are lost" in reported["path-mtu", "n1"].message
    assert "INTERFACE" not in reported["path-mtu", "n1"].fix


HOSTS = st.sampled_from("abcdef")
PAIRS = st.lists(st.tuples(HOSTS, HOSTS).filter(lambda p: p[0] != p[1]), unique=True)


@given(PAIRS, HOSTS)
def test_the_common_host_explains_all_faults(pairs, host):
    own = [pair for pair in pairs if host in pair]
    partners = {other for pair in own for other in pair} - {host}
    if len(partners) >= 2:
        assert list(blame(own)) == [host]


@given(PAIRS, st.randoms(use_true_random=False))
def test_heard_datagrams_hide_no_fault(pairs, random):
    reached = {}
    for a, b in pairs:
        entry = CLOSED | {"is_heard": random.random() < 0.5}
        reached.setdefault(a, {})[b] = entry
    left = lost_pairs(reached)
    assert {frozenset(pair) for pair in left} == {frozenset(pair) for pair in pairs}
