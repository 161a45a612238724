"""Rounds of pairs, and the slow hosts and links found in their rates."""

import json
from itertools import combinations

import pytest
from hypothesis import given, strategies as st
from tests.check.fleets import of_family
from tests.check.programs import run_step

from ronde.check import (
    Family,
    Fleet,
    HostFacts,
    HostSet,
    Severity,
    Streams,
    judge,
    judge_pairs,
    rounds,
)
from ronde.launch import Answer

RATES, FAILURES = "network.bandwidth", "network.bandwidth_failures"
WAY = "network.bandwidth_way"
LOOPBACK = "127.0.0.1"


def hosts_of(num):
    return [f"h{n}" for n in range(num)]


def even_rates(num, rate=10.0):
    names = hosts_of(num)
    return {a: {b: rate for b in names if b != a} for a in names}


def slow_down(rates, sender, receiver, rate):
    rates[receiver][sender] = rate


def fleet_of(rates, link=None, way="tcp", **settings):
    """Return hosts with rates; with a link, the interface that it names in all."""
    facts = {WAY: way, "network.address": "10.0.0.1"} if link else {}
    facts |= {"network.interfaces": INTERFACES | (link or {})} if link else {}
    reported = (HostFacts(h, {RATES: r} | facts, {}, {}) for h, r in rates.items())
    return Fleet(tuple(reported), settings)


def findings_of(rates, *given, **settings):
    fleet = fleet_of(rates, *given, **settings)
    return judge(fleet, of_family(Family.NETWORK)).findings


OWN = {"state": "up", "mtu": 1500, "carrier_changes": 2, "addresses": []}
INTERFACES = {
    name: OWN | {"kind": "physical", "mbit_per_s": rate, "carriers": [name]}
    for name, rate in (("eth0", 25_000), ("eth1", 25_000), ("eth2", 0))
}


def link_of(kind, mbit_per_s, *carriers):
    """Return the interface ``up0``, by which the hosts reach each other."""
    own = {"kind": kind, "mbit_per_s": mbit_per_s, "addresses": ["10.0.0.1"]}
    return {"up0": OWN | own | {"carriers": list(carriers)}}


UNKNOWN = "any link carries 0.1 Gbit/s, and the rate of up0 ({}) is unknown"
ETHERNET = link_of("physical", 1000, "up0")
BOND = link_of("virtual", 50_000, "eth0", "eth1", "eth2")
VETH, WIFI = link_of("virtual", 10_000), link_of("wireless", 0)


@pytest.mark.parametrize(
    ("link", "rate", "but"),
    [
        (ETHERNET, 0.117, ""),
        (ETHERNET, 0.038, ""),  # 30 % of the link are enough
        (ETHERNET, 0.037, "up0 carries 1 Gbit/s"),
        # Of a fast link 10 Gbit/s count: four streams may not fill more.
        (BOND, 0.38, ""),
        (BOND, 0.37, "up0 carries 2 times 25 Gbit/s"),
        # The kernel's rate of a virtual link means nothing.
        (VETH, 0.004, ""),
        (VETH, 0.0037, UNKNOWN.format("virtual")),
        (WIFI, 0.004, ""),
        (WIFI, 0.002, UNKNOWN.format("wireless")),
    ],
)
@pytest.mark.parametrize("num", [2, 3])
def test_hosts_that_are_all_slow_are_found_by_link_rate(num, link, rate, but):
    found = findings_of(even_rates(num, rate), link)
    severity = Severity.FAIL if but else Severity.INFORM
    assert {(f.check, f.severity, f.usual) for f in found} == {
        ("link-rate", severity, but)
    }
    assert [f.host for f in found] == hosts_of(num)
    shown = f"{rate:.3g} GB/s ({8 * rate:.3g} Gbit/s)"
    assert all(shown in f.message for f in found)
    if but:
        assert "ethtool up0; ip -s link show up0" in found[0].fix
    else:
        assert "between hosts by tcp; " in found[0].message
        assert found[0].fix == ""


def test_an_expected_rate_counts_instead_of_the_links():
    rates = even_rates(3, 0.02)
    assert {f.severity for f in findings_of(rates, ETHERNET)} == {Severity.FAIL}
    slow = {"expected": {"gb_per_s": 0.015}}
    assert {f.severity for f in findings_of(rates, ETHERNET, **slow)} == {
        Severity.INFORM
    }
    # One pair alone is below it, and no host is.
    slow_down(rates, "h0", "h1", 0.0149)
    (found,) = (
        f for f in findings_of(rates, ETHERNET, **slow) if f.severity is Severity.FAIL
    )
    assert (found.host, found.usual) == ("h0 - h1", "0.015 GB/s expected")
    # Ranks of Gloo's wait for each other: without such a rate they are not judged.
    found_by_gloo = findings_of(rates, ETHERNET, "gloo")
    assert {f.severity for f in found_by_gloo} == {Severity.INFORM}


def test_a_host_that_is_slower_than_others_is_reported_once():
    rates = even_rates(4, 0.1)
    for other in ("h0", "h2", "h3"):
        slow_down(rates, "h1", other, 0.001)
    failed = [f for f in findings_of(rates, ETHERNET) if f.severity is Severity.FAIL]
    assert [(f.check, f.host) for f in failed] == [("slow-host-link", "h1")]
    # Two of four hosts lower the medians of all; their links are slow as well.
    for other in ("h0", "h2"):
        slow_down(rates, "h3", other, 0.001)
    failed = [f for f in findings_of(rates, ETHERNET) if f.severity is Severity.FAIL]
    assert [(f.check, f.host) for f in failed] == [
        ("link-rate", "h1"),
        ("link-rate", "h3"),
    ]


def test_nccl_is_compared_with_its_ports():
    port = {"state": "ACTIVE", "mbit_per_s": 400_000}
    fleet = fleet_of(even_rates(2, 0.2), ETHERNET, "nccl")
    for facts in fleet.hosts:
        facts.values["network.rdma_ports"] = {"mlx5_0:1": port, "mlx5_1:1": port}
    checks = [c for c in of_family(Family.NETWORK) if c.id == "link-rate"]
    found = judge(fleet, checks).findings
    assert {f.usual for f in found} == {"2 RDMA ports carry 400 Gbit/s each"}


@given(st.integers(0, 40))
def test_rounds_cover_all_pairs_once(num):
    played = list(rounds(hosts_of(num)))
    for pairs in played:
        present = [host for pair in pairs for host in pair]
        assert len(present) == len(set(present))
        assert len(pairs) == num // 2
    met = sorted(tuple(sorted(pair)) for pairs in played for pair in pairs)
    assert met == sorted(tuple(sorted(pair)) for pair in combinations(hosts_of(num), 2))
    # One round less than hosts, or as many where one sits out.
    if num > 1:
        assert len(played) == num - 1 + num % 2


@given(st.integers(3, 12), st.data())
def test_only_the_slow_host_is_named(num, data):
    slow = data.draw(st.sampled_from(hosts_of(num)))
    rates = even_rates(num)
    for other in rates:
        if other != slow:
            slow_down(rates, slow, other, 1.0)
            slow_down(rates, other, slow, 1.0)
    hosts, links = judge_pairs(rates)
    assert [each.host for each in hosts] == [slow]
    assert set(hosts[0].partners) == set(rates) - {slow}
    assert hosts[0][1:5] == (1.0, 1.0, 1.0, 10.0)
    assert links == ()


def test_a_host_that_sends_slowly_is_reported_with_its_partners():
    rates = even_rates(4)
    for other, rate in (("h0", 0.9), ("h2", 0.5), ("h3", 0.7)):
        slow_down(rates, "h1", other, rate)
    (found,) = findings_of(rates)
    assert (found.host, found.severity) == ("h1", Severity.FAIL)
    assert found.message == "it sends only 0.7 GB/s to h2, h3, h0"
    assert found.usual == "10 GB/s between other hosts"


def test_a_slow_link_is_reported_on_no_host():
    rates = even_rates(5)
    slow_down(rates, "h3", "h1", 2.0)
    (found,) = findings_of(rates)
    assert (found.check, found.host) == ("slow-pair", "h1 - h3")
    assert found.severity is Severity.FAIL
    assert "ronde run -H h1,h3 ronde bench sendrecv" in found.fix


class Hosts:
    """Answers as programs on hosts would give them, with the rates that they have.

    Args:
        rates: By receiver and sender; a missing one cannot be measured.
        first: By receiver and sender: what is measured the first time instead.
    """

    def __init__(self, rates, first=()):
        self.rates = rates
        self.first = dict(first)
        self.ports = {name: number for number, name in enumerate(rates)}
        self.tokens = {name: f"of-{name}" for name in rates}
        self.num_questions = 0

    def host_set(self, **settings):
        addresses = {name: f"at-{name}" for name in self.rates}
        return HostSet(self, addresses, settings)

    def ask(self, lines, timeout_s):
        questions = {name: json.loads(line) for name, line in lines.items()}
        self.num_questions += len(questions)
        return {
            name: Answer(json.dumps(self.answer(name, question)), "")
            for name, question in questions.items()
        }

    def answer(self, name, question):
        if question["do"] == "listen":
            return {"ports": [self.ports[name]], "token": self.tokens[name]}
        other = question["address"].removeprefix("at-")
        assert question["port"] == self.ports[other]
        assert question["token"] == self.tokens[other]
        if name not in self.rates[other]:
            return {"error": "refused"}
        return {"gb_per_s": self.first.pop((other, name), self.rates[other][name])}


@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_all_rates_are_stored(num):
    rates = even_rates(num)
    rates["h1"]["h0"] = 9.0
    hosts = Hosts(rates).host_set(bandwidth="tcp")
    run_step("bandwidth", hosts)
    assert {n: f.values[RATES] for n, f in hosts.facts.items()} == rates


def test_a_slow_pair_is_measured_again():
    rates = even_rates(4)
    first = {("h0", "h1"): 0.1, ("h2", "h1"): 0.1}
    hosts = Hosts(rates, first).host_set(bandwidth="tcp")
    run_step("bandwidth", hosts)
    assert {n: f.values[RATES] for n, f in hosts.facts.items()} == rates


def test_many_hosts_are_measured_with_some_others():
    num = 80
    hosts = Hosts(even_rates(num)).host_set(bandwidth="tcp")
    run_step("bandwidth", hosts)
    for facts in hosts.facts.values():
        assert 20 <= len(facts.values[RATES]) <= Streams.max_rounds


def test_a_host_without_partners_is_unread():
    rates = even_rates(3)
    rates["h2"] = {}
    for other in ("h0", "h1"):
        del rates[other]["h2"]
    hosts = Hosts(rates).host_set(bandwidth="tcp")
    run_step("bandwidth", hosts)
    assert hosts.facts["h2"].unreadable == {RATES: "refused"}
    assert hosts.facts["h0"].values[RATES] == {"h1": 10.0}
    assert hosts.facts["h0"].values[FAILURES] == {"h2": "refused"}
    judgement = judge(Fleet(tuple(hosts.facts.values()), {}), of_family(Family.NETWORK))
    assert {each.host for each in judgement.unread} == {"h2"}
