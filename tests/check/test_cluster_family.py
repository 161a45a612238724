"""Checks that compare whole hosts."""

import pytest
from tests.check.fleets import of_family
from tests.check.host_values import GIB, make_fleet

from ronde.check import (
    Family,
    Fleet,
    HostFacts,
    ProbeEntry,
    Severity,
    judge,
    run_probes,
)

FAIL, WARN, INFORM = Severity

HUNG = "it hung and was killed after 15 s"


def find(fleet):
    return judge(fleet, of_family(Family.CLUSTER)).findings


def hosts_with(fact, **values):
    """Return hosts that have one fact each."""
    hosts = (HostFacts(name, {fact: v}, {}, {}) for name, v in values.items())
    return Fleet(tuple(hosts), {})


def clocks(errors=0.001, **offsets):
    fleet = hosts_with("cluster.clock_offset_s", **offsets)
    for facts in fleet.hosts:
        facts.values["cluster.clock_error_s"] = errors
    return fleet


def paces(**walls):
    """Return hosts that need so many ms."""
    return hosts_with("cluster.compute_s", **{h: w / 1e3 for h, w in walls.items()})


def product(checksum="c0ffee", num_wrong=0, gflop_per_s=100.0):
    return {
        "checksum": checksum,
        "num_products": 40,
        "num_wrong": num_wrong,
        "gflop_per_s": gflop_per_s,
    }


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_equal_hosts_are_healthy(names):
    fleet = make_fleet(*names)
    for number, facts in enumerate(fleet.hosts):
        facts.values.update(
            {
                "probe.failed": {},
                "cluster.clock_offset_s": number * 0.04,
                "cluster.clock_error_s": 0.001,
                "cluster.compute_s": 0.001 * (1 + number * 0.4),
                "cluster.products": {"cpu": product(gflop_per_s=100.0 - 9 * number)},
            }
        )
    judged = judge(fleet, of_family(Family.CLUSTER))
    assert judged.findings == ()
    assert judged.unread == ()


def test_a_probe_that_hung_fails_its_host_and_one_that_ended_does_not():
    ended = run_probes({"x": ProbeEntry(("ronde.no_such_probe",), 30.0, "x.")}, {})
    fleet = hosts_with(
        "probe.failed", a={}, b={"gpu": HUNG}, c={"host": ended["x"].failure}
    )
    hung, crashed = find(fleet)
    assert (hung.check, hung.severity, hung.host) == ("probe-hung", FAIL, "b")
    assert hung.message == f"probe gpu: {HUNG}"
    assert (crashed.check, crashed.severity, crashed.host) == ("probe-hung", WARN, "c")
    assert "no_such_probe" in crashed.message


def test_a_torch_whose_import_kills_python_is_a_failure():
    crash = "it ended with code -4: Illegal instruction"
    (finding,) = find(hosts_with("probe.failed", a={"torch": crash}))
    assert (finding.check, finding.severity) == ("probe-hung", FAIL)


@pytest.mark.parametrize(
    ("offsets", "reported"),
    [
        ({"a": 0.0, "b": 0.15, "c": 0.0}, {"b": WARN}),
        ({"a": 0.0, "b": -6.0, "c": 0.01}, {"b": FAIL}),
        ({"a": 0.0, "b": 0.09, "c": 0.0}, {}),
        # It is this machine's clock that is off, and no host's.
        ({"a": 60.0, "b": 60.05, "c": 60.0}, {}),
        ({"a": 60.0, "b": 60.0, "c": 0.0}, {"c": FAIL}),
        ({"a": 0.0, "b": 0.2}, {"a": WARN, "b": WARN}),
        ({"a": 0.0, "b": 0.0, "c": 9.0, "d": 9.0}, dict.fromkeys("abcd", FAIL)),
        ({"a": 60.0}, {}),
    ],
)
def test_clocks(offsets, reported):
    found = find(clocks(**offsets))
    assert {finding.host: finding.severity for finding in found} == reported
    assert {finding.check for finding in found} <= {"clock-offset"}


def test_the_error_of_the_exchange_is_subtracted():
    assert find(clocks(0.05, a=0.0, b=0.19, c=0.0)) == ()
    assert [f.host for f in find(clocks(0.04, a=0.0, b=0.19, c=0.0))] == ["b"]


def test_a_clock_is_reported_as_ahead_or_behind():
    (finding,) = find(clocks(a=0.0, b=-0.25, c=0.0))
    assert finding.message == "its clock is 250ms behind this machine's"
    assert finding.usual == "as this machine's on most hosts"


def test_less_memory_than_most_is_reported_and_a_little_less_is_not():
    less = {"memory_bytes": 192 * GIB}
    (finding,) = find(make_fleet("a", "b", "c", b=less))
    assert (finding.check, finding.host) == ("memory-alike", "b")
    assert finding.message == "192GiB of memory"
    assert find(make_fleet("a", "b", "c", a=less, b=less)) == ()
    assert find(make_fleet("a", "b", "c", b={"memory_bytes": 231 * GIB})) == ()


@pytest.mark.parametrize(
    ("walls", "reported"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.9}, {}),
        ({"a": 1.0, "b": 1.0, "c": 2.1}, {"c": WARN}),
        ({"a": 1.0, "b": 1.0, "c": 10.0}, {"c": FAIL}),
        ({"a": 1.0, "b": 10.0}, {"a": WARN, "b": WARN}),
        ({"a": 99.0}, {}),
    ],
)
def test_slow_hosts(walls, reported):
    found = find(paces(**walls))
    assert {finding.host: finding.severity for finding in found} == reported
    assert {finding.check for finding in found} <= {"slow-host"}


def test_a_slow_host_is_compared_with_the_others():
    (slow,) = find(paces(a=0.5, b=0.5, c=5.0))
    assert slow.message == "5 ms for a fixed computation"
    assert slow.usual == "0.5 ms for a fixed computation on most hosts"
    assert slow.fix.startswith("Look for other programs")


def test_a_product_that_differs_fails_its_host():
    right = {"cpu": product(), "cuda:0": product()}
    fleet = hosts_with(
        "cluster.products", a=right, b=right | {"cuda:0": product("bad0")}
    )
    (finding,) = find(fleet)
    assert (finding.check, finding.severity, finding.host) == (
        "product-checksum",
        FAIL,
        "b",
    )
    assert finding.message == "the product on cuda:0 has checksum bad0"
    assert finding.usual == "c0ffee on 3 devices"


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (product(num_wrong=3), "3 of 40 products on cpu differ from the first one"),
        ({"failure": "out of memory"}, "the product on cpu failed: out of memory"),
    ],
)
def test_a_product_that_fails_by_itself(reported, words):
    (finding,) = find(hosts_with("cluster.products", a={"cpu": reported}))
    assert (finding.severity, finding.message) == (FAIL, words)


@pytest.mark.parametrize(
    ("speed", "severity"), [(81.0, None), (79.0, WARN), (49.0, FAIL)]
)
def test_a_product_that_is_slow(speed, severity):
    usual = {"cpu": product(), "cuda:0": product(gflop_per_s=50000.0)}
    slow = usual | {"cpu": product(gflop_per_s=speed)}
    found = find(hosts_with("cluster.products", a=usual, b=slow, c=usual))
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert {(f.check, f.host) for f in found} <= {("product-speed", "b")}
