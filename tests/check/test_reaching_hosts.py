"""Hosts of namespaces reach each other; faults are planted one by one, and found."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.check.programs import WORDS, panel_of
from tests.cluster.machines import Cluster, machines, why_not

from ronde.check.families import network_reach
from ronde.check.fleet import Fleet
from ronde.check.judging import judge
from ronde.check.reachability import REACH
from ronde.check.steps import clock, reaching

CLEAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with machines(3) as hosts:
        yield hosts


@pytest.fixture
def examine(cluster):
    """Return what lets the hosts reach each other and tells what is found."""

    def run():
        hosts = {host.name: host for host in cluster.hosts}

        def start(name, **popen):
            return cluster.start(hosts[name], WORDS, **popen)

        addresses = {name: host.address for name, host in hosts.items()}
        with panel_of(addresses, start=start) as panel:
            clock.run(panel)
            reaching.run(panel)
        facts = tuple(panel.facts.values())
        found = judge(Fleet(facts, {}), network_reach.CHECKS).findings
        return {each.host: each for each in found}, found, panel.facts

    return run


def order(cluster, host, *words):
    done = cluster.run(host, words, env={"PATH": CLEAN_PATH})
    assert done.returncode == 0, done.stderr


@contextmanager
def planted(cluster, host, plant, undo):
    """Have a host's ``tc`` and ``ip`` do something, and undo it."""
    order(cluster, host, *plant.split())
    try:
        yield
    finally:
        order(cluster, host, *undo.split())


@contextmanager
def dropping(cluster, host, match):
    """Let packets that come to a host and match a rule of nft's vanish."""
    rules = (
        "add table inet planted; add chain inet planted input "
        f"{{ type filter hook input priority 0; }}; add rule inet planted input {match}"
    )
    order(cluster, host, "nft", f"{rules} drop")
    try:
        yield
    finally:
        order(cluster, host, *["nft", "delete", "table", "inet", "planted"])


needs_nft = pytest.mark.skipif(
    shutil.which("nft", path=CLEAN_PATH) is None,
    reason="firewalls need nft. Debian: apt-get install nftables",
)


def test_nothing_is_found_on_hosts_without_faults(examine):
    _, found, facts = examine()
    assert not found
    for each in facts.values():
        told = each.values[REACH]
        assert {one["mtu"] for one in told.values()} == {1500}
        assert {one["interface"] for one in told.values()} == {"eth0"}


@needs_nft
def test_who_lets_no_connection_in_is_named(cluster, examine):
    begins = "tcp flags & (syn | ack) == syn"
    with dropping(cluster, cluster.hosts[1], begins):
        by_host, found, _ = examine()
    assert [each.check for each in found] == ["reachable"]
    assert set(by_host) == {"node2"}
    assert by_host["node2"].what.startswith("node1, node3 cannot connect to it")
    assert "the other way it works" in by_host["node2"].what
    assert "no answer; datagrams arrive" in by_host["node2"].what


@needs_nft
def test_whose_packets_are_lost_one_way_is_named(cluster, examine):
    with dropping(cluster, cluster.hosts[1], "ip saddr 10.77.0.3"):
        by_host, found, _ = examine()
    assert [each.check for each in found] == ["reachable"]
    assert set(by_host) == {"node3"}
    assert by_host["node3"].what.startswith("it cannot connect to node2; the other way")


def test_a_smaller_mtu_is_named(cluster, examine):
    with planted(
        cluster, cluster.hosts[1],
        "ip link set dev eth0 mtu 1300", "ip link set dev eth0 mtu 1500",
    ):  # fmt: skip
        by_host, found, _ = examine()
    assert [each.check for each in found] == ["mtu"]
    assert (by_host["node2"].what, by_host["node2"].usual) == (
        "MTU 1300", "1500 on 2 hosts",
    )  # fmt: skip


@needs_nft
def test_lost_large_packets_are_named(cluster, examine):
    with dropping(cluster, cluster.hosts[2], "ip length > 1400"):
        by_host, found, _ = examine()
    assert {each.check for each in found} == {"path-mtu"}
    assert set(by_host) == {"node3"}
    assert by_host["node3"].what == (
        "from node1, node2: no packets above 1400 bytes arrive, its MTU is 1500"
    )


def test_a_link_with_a_tenth_of_the_others_rate_is_named(cluster, examine):
    limits = "tc qdisc change dev eth0 root tbf rate {} burst 128kb latency 50ms"
    slow, fast = limits.format("100mbit"), limits.format("1gbit")
    with planted(cluster, cluster.hosts[1], slow, fast):
        by_host, found, _ = examine()
    assert [each.check for each in found] == ["slow-link"]
    assert set(by_host) == {"node2"}
