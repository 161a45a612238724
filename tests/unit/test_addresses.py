"""A host's own addresses, and the choice of where several hosts meet."""

import json
import shutil
import subprocess

import pytest
from hypothesis import given, strategies as st

from ronde.addresses import InterfaceAddress, read_interfaces, source_towards
from ronde.errors import HostError, UsageError
from ronde.launch import (
    HostNetwork,
    Rendezvous,
    choose_rendezvous,
    find_candidates,
    hold_port,
    locate,
    require_answers,
)

IP = shutil.which("ip")
ALL_ADDRESSES = ["0.0.0.0", "::", "::ffff:0.0.0.0", "0", ""]  # noqa: S104  to be refused
BRIDGE = InterfaceAddress("docker0", "172.17.0.1", 16)


def on(interface, address, bits=24):
    return InterfaceAddress(interface, address, bits)


def host(number, *more, **fields):
    own = (on("eth0", f"10.0.0.{number}"), on("eth0", f"fd00::{number}", 64))
    return HostNetwork(f"node{number}", (*own, *more), **fields)


def sources_of(host, candidates):
    """Answer as a kernel would that has no routes but to its own networks."""
    own = {i.interface + ":" * (":" in i.address): i.address for i in host.interfaces}
    return [own.get(c.interface + ":" * (":" in c.address), "") for c in candidates]


def choose(hosts, interfaces=(), sources=None):
    candidates = find_candidates(hosts, interfaces)
    answers = sources or [sources_of(h, candidates) for h in hosts[1:]]
    return choose_rendezvous(hosts, candidates, answers, interfaces)


@pytest.mark.skipif(not IP, reason="ip is not installed")
def test_the_addresses_are_those_that_ip_shows():
    shown = subprocess.run(
        [IP, "-json", "addr"], stdout=subprocess.PIPE, check=True
    ).stdout
    expected = {
        (link["ifname"], address["local"], address["prefixlen"])
        for link in json.loads(shown)
        if {"UP", "LOWER_UP"} <= set(link["flags"]) and "LOOPBACK" not in link["flags"]
        for address in link["addr_info"]
        if address["scope"] == "global"
    }
    found = read_interfaces()
    assert {(i.interface, i.address, i.prefix_length) for i in found} == expected
    assert len(found) == len(expected)


def test_a_host_reaches_no_address_of_its_own_from_outside():
    own = [each.address for each in read_interfaces()]
    addresses = [*own, *ALL_ADDRESSES, "127.0.0.1", "::1", "nonsense", "localhost"]
    assert locate(addresses, 0) == ("",) * len(addresses)
    with hold_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        assert locate(["127.0.0.1"], port) == ("",)


def test_the_source_towards_an_own_address_is_that_address():
    for each in read_interfaces():
        assert source_towards(each.address) == each.address


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_is_held_on_one_address(address):
    if source_towards(address) != address:
        pytest.skip(f"{address} is not there")
    with hold_port(address) as held:
        assert held.getsockname()[0] == address
        with pytest.raises(UsageError, match="is not free on"):
            hold_port_again(address, held.getsockname()[1])


def hold_port_again(address, port):
    """Take a port that somebody else listens on."""
    with hold_port(address) as listening:
        listening.listen()
        hold_port(address, listening.getsockname()[1]).close()


@pytest.mark.parametrize("address", [*ALL_ADDRESSES, "localhost", "203.0.113.9"])
def test_no_port_is_held_on_all_addresses_or_on_none(address):
    for port in (0, 23456):
        with pytest.raises(UsageError, match="must be a numeric address of this host"):
            hold_port(address, port)


def test_hosts_meet_by_ipv4_in_their_own_network():
    point = choose([host(1), host(2), host(3)])
    assert point == Rendezvous("10.0.0.1", ("eth0", "eth0", "eth0"))


def test_a_bridge_that_two_hosts_have_leads_to_themselves():
    hosts = [
        HostNetwork("node1", (BRIDGE, *host(1).interfaces)),
        HostNetwork("node2", (BRIDGE, *host(2).interfaces)),
    ]
    assert BRIDGE not in find_candidates(hosts)
    assert choose(hosts).address == "10.0.0.1"


def test_a_network_of_the_heads_own_behind_a_router_comes_last():
    """Everybody has a route to the bridge: the one that leads anywhere."""
    hosts = [HostNetwork("node1", (BRIDGE, *host(1).interfaces)), host(2)]
    candidates = find_candidates(hosts)
    by_router = ["10.0.0.2" if c == BRIDGE else "" for c in candidates]
    near = sources_of(hosts[1], candidates)
    sources = [[n or r for n, r in zip(near, by_router, strict=True)]]
    assert candidates[0] == BRIDGE
    assert choose(hosts, sources=sources).address == "10.0.0.1"


def test_ipv6_serves_where_ipv4_does_not():
    hosts = [host(1), HostNetwork("node2", host(2).interfaces[1:])]
    assert choose(hosts) == Rendezvous("fd00::1", ("eth0", "eth0"))


def test_the_faster_of_two_networks_counts():
    fast = [on("ib0", f"10.1.0.{n}") for n in (1, 2)]
    rates = {"eth0": 1000, "ib0": 100_000}
    hosts = [host(1, fast[0], mbit_per_s=rates), host(2, fast[1])]
    assert choose(hosts) == Rendezvous("10.1.0.1", ("ib0", "ib0"))
    assert choose(hosts, ("eth0",)) == Rendezvous("10.0.0.1", ("eth0", "eth0"))


def test_interfaces_may_have_another_name_on_each_host():
    hosts = [host(1), HostNetwork("node2", (on("ens5", "10.0.0.2"),))]
    candidates = find_candidates(hosts)
    sources = [["10.0.0.2" if ":" not in c.address else "" for c in candidates]]
    point = choose_rendezvous(hosts, candidates, sources)
    assert point.interfaces == ("eth0", "ens5")
    allowed = choose_rendezvous(hosts, candidates, sources, ("eth0", "ens5"))
    assert allowed.interfaces == ("eth0", "ens5")


def test_the_address_in_the_host_file_counts():
    second = on("eth1", "10.5.0.1")
    hosts = [host(1, second, address="10.5.0.1"), host(2, on("eth1", "10.5.0.2"))]
    assert choose(hosts) == Rendezvous("10.5.0.1", ("eth1", "eth1"))
    longhand = host(2, address="FD00:0:0::2")
    point = choose([host(1, address="fd00:0::1"), longhand])
    assert point == Rendezvous("fd00::1", ("eth0", "eth0"))


@pytest.mark.parametrize(
    ("hosts", "interfaces", "words"),
    [
        ([host(1, address="10.9.9.9"), host(2)], (), "addr= of node1 must be an addr"),
        ([host(1), host(2, address="nonsense")], (), "addr= of node2 must be an addr"),
        ([host(1), host(2)], ("ib0",), "got ib0, which node1, node2 lacks. node1 has"),
        ([host(1, on("ib0", "10.1.0.1")), host(2)], ("ib0",), "which node2 lacks"),
        (
            [HostNetwork("node1", ()), host(2)],
            (),
            "Its addresses: none. Name one with addr=",
        ),
        ([host(1), host(1)], (), "that other hosts can reach. Its addresses: 10.0.0.1"),
    ],
)
def test_what_cannot_be_is_refused(hosts, interfaces, words):
    with pytest.raises(UsageError) as caught:
        find_candidates(hosts, interfaces)
    assert words in str(caught.value)


def test_hosts_without_a_route_are_named():
    hosts = [host(number) for number in range(1, 13)]
    near = ["10.0.0.2", "fd00::2"]
    sources = [near, *[["", ""]] * 10]
    with pytest.raises(HostError) as caught:
        choose(hosts, sources=sources)
    text = str(caught.value)
    assert "node3, node4, node5, node6, node7, node8, node9, node10 and 2 more" in text
    assert "no route to node1 at 10.0.0.1 from node3" in text
    assert "node2," not in text


def test_hosts_that_get_no_answer_are_named():
    hosts = [host(1), host(2), host(3)]
    point = Rendezvous("10.0.0.1", ("eth0",) * 3)
    require_answers(hosts, point, 23456, ["10.0.0.2", "10.0.0.3"])
    with pytest.raises(HostError, match="not answer node3 at 10"):
        require_answers(hosts, point, 23456, ["10.0.0.2", ""])


def test_ranks_are_told_their_hosts_interface_unless_the_user_said():
    point = Rendezvous("10.0.0.1", ("eth0", "ens5"))
    assert point.environment(1, {}) == {
        "GLOO_SOCKET_IFNAME": "ens5",
        "NCCL_SOCKET_IFNAME": "=ens5",
    }
    assert point.environment(0, {"NCCL_SOCKET_IFNAME": "^lo"}) == {
        "GLOO_SOCKET_IFNAME": "eth0"
    }
    assert Rendezvous("127.0.0.1", ("",)).environment(0, {}) == {}


INTERFACES = st.lists(
    st.builds(
        InterfaceAddress,
        st.sampled_from(["eth0", "eth1", "ib0", "docker0"]),
        st.sampled_from(["10.0.0.1", "10.0.0.2", "10.1.0.1", "fd00::1", "172.17.0.1"]),
        st.integers(8, 32),
    ),
    max_size=5,
    unique_by=lambda each: each.address,
).map(tuple)


@given(st.data(), st.lists(INTERFACES, min_size=2, max_size=4))
def test_a_chosen_address_is_the_heads_alone_and_all_reach_it(data, networks):
    hosts = [HostNetwork(f"n{i}", own) for i, own in enumerate(networks)]
    try:
        candidates = find_candidates(hosts)
    except UsageError:
        others = {i.address for own in networks[1:] for i in own}
        assert {i.address for i in networks[0]} <= others
        return
    answers = [
        [
            data.draw(st.sampled_from(["", *(i.address for i in own)]))
            for _ in candidates
        ]
        for own in networks[1:]
    ]
    try:
        point = choose_rendezvous(hosts, candidates, answers)
    except HostError:
        assert not any(map(all, zip(*answers, strict=True)))
        return
    index = [c.address for c in candidates].index(point.address)
    assert all(each[index] for each in answers)
    assert point.address not in {i.address for own in networks[1:] for i in own}
    assert len(point.interfaces) == len(hosts)
    assert all(point.interfaces)
