"""Checks of host names, interfaces and RDMA ports."""

import pytest
from tests.check.fleets import of_family

from ronde.check import Family, Fleet, HostFacts, Severity, chooses, judge

ETH0 = {
    "kind": "physical", "state": "up", "mtu": 1500, "mbit_per_s": 10000,
    "carrier_changes": 2, "addresses": ["10.0.0.1"],
}  # fmt: skip
LO = {
    "kind": "loopback", "state": "unknown", "mtu": 65536, "mbit_per_s": 0,
    "carrier_changes": 0, "addresses": [],
}  # fmt: skip
DOCKER0 = {
    "kind": "bridge", "state": "down", "mtu": 1500, "mbit_per_s": 0,
    "carrier_changes": 9, "addresses": ["172.17.0.1"],
}  # fmt: skip
INTERFACES = {"eth0": ETH0, "lo": LO, "docker0": DOCKER0}
IB = {
    "state": "ACTIVE", "physical_state": "LinkUp", "mbit_per_s": 400000,
    "layer": "InfiniBand", "downs": 0,
    "gids": {"0": {"address": "fe80:0000:0000:0000:a088:c203:00aa:bbcc",
                   "type": "IB/RoCE v1", "interface": ""}},
}  # fmt: skip
ROCE = IB | {
    "layer": "Ethernet",
    "gids": {
        "0": {"address": "fe80:0000:0000:0000:a088:c2ff:feaa:bbcc",
              "type": "IB/RoCE v1", "interface": "eth1"},
        "2": {"address": "0000:0000:0000:0000:0000:ffff:0a00:0001",
              "type": "IB/RoCE v1", "interface": "eth1"},
        "3": {"address": "0000:0000:0000:0000:0000:ffff:0a00:0001",
              "type": "RoCE v2", "interface": "eth1"},
    },
}  # fmt: skip
DOWN = {"state": "DOWN", "physical_state": "Polling"}
PLAIN = {
    "network.own_name": {"name": "me", "addresses": ["10.0.0.1"], "error": ""},
    "network.interfaces": INTERFACES,
    "network.variables": {},
    "network.uptime_s": 3600.0,
    "network.link_downs": {},
    "network.rdma_ports": {},
    "network.rdma_device_files": {},
}
WITH_IB = {
    "network.rdma_ports": {"mlx5_0:1": IB, "mlx5_1:1": IB},
    "network.rdma_device_files": {"uverbs0": True},
    "network.has_rdma_library": True,
}

CHECKS = of_family(Family.NETWORK)
FAIL, WARN, INFORM = Severity


def fleet_of(num, changed=None, usual=PLAIN):
    """Return hosts ``n1`` .. with usual facts; ``n2`` has some changed."""
    hosts = [
        HostFacts(f"n{i}", usual | ((changed or {}) if i == 2 else {}), {}, {})
        for i in range(1, num + 1)
    ]
    return Fleet(tuple(hosts), {})


def found(fleet):
    reported = judge(fleet, CHECKS).findings
    return {(each.check, each.host): each for each in reported}


def only(fleet):
    reported = found(fleet)
    assert len(reported) == 1, reported
    return next(iter(reported.values()))


def port(change, name="mlx5_0:1", usual=WITH_IB):
    ports = usual["network.rdma_ports"]
    return {"network.rdma_ports": ports | {name: ports[name] | change}}


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("usual", [PLAIN, PLAIN | WITH_IB])
def test_nothing_is_found_on_healthy_hosts(num, usual):
    assert not found(fleet_of(num, usual=usual))


def test_a_name_that_resolves_to_loopback_is_reported():
    own = {"name": "me", "addresses": ["127.0.1.1"], "error": ""}
    changed = {"network.own_name": own, "network.address": "10.0.0.1"}
    finding = only(fleet_of(3, changed))
    assert (finding.check, finding.host) == ("host-name", "n2")
    # Debian writes that into every /etc/hosts, and ronde run is not hurt by it.
    assert finding.severity == WARN
    assert "resolves to 127.0.1.1" in finding.message
    assert "10.0.0.1 me" in finding.fix
    assert "GLOO_SOCKET_IFNAME=eth0" in finding.fix


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"addresses": ["::1", "10.0.0.1"]}, "resolves to ::1"),
        ({"addresses": ["172.17.0.1"]}, "of docker0"),
        ({"addresses": ["10.9.9.9"]}, "no address of this host"),
        ({"error": "no answer within 2 s"}, "does not resolve: no answer"),
    ],
)
def test_a_name_without_a_usable_address_is_reported(own, said):
    own = PLAIN["network.own_name"] | own
    assert said in only(fleet_of(2, {"network.own_name": own})).message


def test_a_name_does_not_matter_if_gloo_does_not_use_it():
    own = {"name": "me", "addresses": ["127.0.1.1"], "error": ""}
    usual = PLAIN | {"network.own_name": own}
    assert not found(fleet_of(1, usual=usual))
    chosen = {"network.variables": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert not found(fleet_of(3, usual=usual | chosen))


@pytest.mark.parametrize(
    ("variable", "setting", "said"),
    [
        ("NCCL_SOCKET_IFNAME", "ib", "matches no interface here: eth0, lo, docker0"),
        ("GLOO_SOCKET_IFNAME", "eth", "there is no eth among eth0, lo, docker0"),
        ("GLOO_SOCKET_IFNAME", "ib0", "selects only ib0, which has no address"),
        ("GLOO_SOCKET_IFNAME", "lo", "selects only lo"),
        ("NCCL_SOCKET_IFNAME", "docker", "selects only docker0"),
    ],
)
def test_a_missing_chosen_interface_is_reported(variable, setting, said):
    changed = {"network.variables": {variable: setting}}
    if "ib0" in setting:
        idle = {"ib0": ETH0 | {"kind": "infiniband", "addresses": []}}
        changed["network.interfaces"] = INTERFACES | idle
    finding = only(fleet_of(2, changed))
    assert (finding.check, finding.host) == ("chosen-interface", "n2")
    assert said in finding.message


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0,eth9"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker"),
        ("NCCL_SOCKET_NTHREADS", "4"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("GLOO_SOCKET_IFNAME", ""),
    ],
)
def test_an_existing_chosen_interface_is_no_finding(variable, setting):
    assert not found(fleet_of(2, {"network.variables": {variable: setting}}))


def test_interfaces_are_selected_as_in_nccl():
    names = ["eth0", "eth1", "ib0", "lo"]
    assert [n for n in names if chooses("eth", n)] == ["eth0", "eth1"]
    assert [n for n in names if chooses("=eth0,lo", n)] == ["eth0", "lo"]
    assert [n for n in names if chooses("^eth", n)] == ["ib0", "lo"]
    assert [n for n in names if chooses("^=eth0", n)] == ["eth1", "ib0", "lo"]
    ports = ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1", "mlx5_10:1"]
    assert [n for n in ports if chooses("=mlx5_0:2,mlx5_1", n)] == [
        "mlx5_0:2",
        "mlx5_1:1",
    ]
    assert [n for n in ports if chooses("mlx5_1", n)] == ["mlx5_1:1", "mlx5_10:1"]
    # Rail and plane of an adapter choose nothing.
    assert [n for n in ports if chooses("=mlx5_0:2:0:1", n)] == ["mlx5_0:2"]
    assert [n for n in ports if chooses("=mlx5_1::0:0", n)] == ["mlx5_1:1"]


SLOW = {"network.interfaces": INTERFACES | {"eth0": ETH0 | {"mbit_per_s": 1000}}}


@pytest.mark.parametrize(
    ("changed", "check", "message", "usual"),
    [
        (SLOW, "link-speed", "eth0 runs at 1 Gbit/s", "10 Gbit/s on 2 hosts"),
        (port(DOWN), "rdma-port", "mlx5_0:1 is DOWN/Polling",
         "ACTIVE/LinkUp on 2 hosts"),
        (port({"mbit_per_s": 200_000}), "rdma-rate", "mlx5_0:1 runs at 200 Gbit/s",
         "400 Gbit/s on 2 hosts"),
    ],
)  # fmt: skip
def test_a_link_unlike_the_others_is_reported(changed, check, message, usual):
    finding = only(fleet_of(3, changed, PLAIN | WITH_IB))
    assert (finding.check, finding.host) == (check, "n2")
    assert finding.severity == (WARN if check == "link-speed" else FAIL)
    assert (finding.message, finding.usual) == (message, usual)


@pytest.mark.parametrize("kind", ["paravirtual", "wireless"])
def test_rates_of_virtual_and_wireless_links_are_ignored(kind):
    link = ETH0 | {"kind": kind}
    usual = {"network.interfaces": {"eth0": link | {"mbit_per_s": 20_000}}}
    changed = {"network.interfaces": {"eth0": link}}
    assert not found(fleet_of(3, changed, PLAIN | usual))


@pytest.mark.parametrize(("downs", "is_reported"), [(4, False), (5, True)])
def test_a_link_that_went_down_five_times_in_a_day_is_reported(downs, is_reported):
    reported = found(fleet_of(1, usual=PLAIN | {"network.link_downs": {"eth0": downs}}))
    assert set(reported) == ({("link-flaps", "n1")} if is_reported else set())


def test_flaps_of_rdma_ports_count_on_the_first_day():
    """Their counter has no dates: later it is no measure of the last 24 hours."""
    finding = only(fleet_of(2, port({"downs": 5}), PLAIN | WITH_IB))
    assert finding.message == "mlx5_0:1 went down 5 times within 24 hours"
    week = {"network.uptime_s": 7 * 86400.0}
    assert not found(fleet_of(2, port({"downs": 500}) | week, PLAIN | WITH_IB))


@pytest.mark.parametrize(
    ("num", "setting", "other_up", "severity"),
    [
        (3, "", True, INFORM),
        (3, "=mlx5_0,mlx5_1", True, FAIL),
        (3, "", False, WARN),
        (1, "", True, INFORM),
        (1, "", False, WARN),
    ],
)
def test_a_port_that_is_down_everywhere_may_have_no_cable(
    num, setting, other_up, severity
):
    usual = PLAIN | WITH_IB | port(DOWN)
    usual |= {"network.variables": {"NCCL_IB_HCA": setting}}
    if not other_up:
        ports = usual["network.rdma_ports"]
        usual["network.rdma_ports"] = {"mlx5_0:1": ports["mlx5_0:1"]}
    reported = found(fleet_of(num, usual=usual))
    assert {each.severity for each in reported.values()} == {severity}
    assert len(reported) == num


@pytest.mark.parametrize(
    "variables",
    [{"NCCL_IB_HCA": "mlx5_1"}, {"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}],
)
def test_an_excluded_port_is_ignored(variables):
    changed = port(DOWN) | {"network.variables": variables}
    assert not found(fleet_of(3, changed, PLAIN | WITH_IB))


@pytest.mark.parametrize(
    ("gids", "index", "said"),
    [
        ({"0": ROCE["gids"]["0"]}, "", "no routable GID of RoCE v2"),
        (ROCE["gids"], "0", "NCCL_IB_GID_INDEX=0 is fe80:"),
        (ROCE["gids"], "2", "of mlx5_0:1, IB/RoCE v1"),
        (ROCE["gids"], "7", "NCCL_IB_GID_INDEX=7 is an empty GID"),
        (ROCE["gids"], "3", ""),
        (ROCE["gids"], "-1", ""),
    ],
)
def test_a_roce_port_needs_a_routable_gid(gids, index, said):
    changed = {
        "network.rdma_ports": {"mlx5_0:1": ROCE | {"gids": gids}},
        "network.variables": {"NCCL_IB_GID_INDEX": index},
    }
    usual = PLAIN | WITH_IB | {"network.rdma_ports": {"mlx5_0:1": ROCE}}
    reported = found(fleet_of(2, changed, usual))
    assert set(reported) == ({("roce-gid", "n2")} if said else set())
    assert all(said in each.message for each in reported.values())


NO_GID = ROCE | {"gids": {"0": ROCE["gids"]["0"]}}
ELSEWHERE = ROCE["gids"]["3"] | {"address": f"{'0000:' * 5}ffff:a9fe:0001"}


@pytest.mark.parametrize(
    ("ports", "usual", "num_gpus", "severity"),
    [
        # A cloud gives every machine a port without an address beside the fast ones.
        ({"an:1": NO_GID, "ib:1": IB}, {"an:1": NO_GID, "ib:1": IB}, 8, INFORM),
        # The others have one there.
        ({"an:1": NO_GID, "ib:1": IB}, {"an:1": ROCE, "ib:1": IB}, 8, FAIL),
        # There is no port but this, and NCCL would try it.
        ({"an:1": NO_GID}, {"an:1": NO_GID}, 8, FAIL),
        ({"an:1": ROCE | {"gids": {"3": ELSEWHERE}}}, {"an:1": ROCE}, 8, FAIL),
    ],
)
def test_a_port_without_an_address_is_a_failure_if_needed(
    ports, usual, num_gpus, severity
):
    gpus = {"host.num_gpus": num_gpus}
    usual = PLAIN | WITH_IB | gpus | {"network.rdma_ports": usual}
    reported = found(fleet_of(3, {"network.rdma_ports": ports}, usual))
    assert reported["roce-gid", "n2"].severity == severity


def test_an_unusable_adapter_needs_no_device_files():
    """Virtual machines of a cloud have one for TCP's sake, and no library."""
    bare = {"network.rdma_device_files": {}, "network.has_rdma_library": False}
    usual = PLAIN | WITH_IB | bare | {"host.num_gpus": 0}
    reported = found(
        fleet_of(2, usual=usual | {"network.rdma_ports": {"an:1": NO_GID}})
    )
    assert {check for check, _ in reported} == {"roce-gid"}
    reported = found(fleet_of(2, usual=usual | {"network.rdma_ports": {"an:1": ROCE}}))
    assert {f.severity for f in reported.values()} == {WARN}
