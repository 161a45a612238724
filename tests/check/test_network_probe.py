"""Facts of the network, from trees written by hand and from this machine."""

import threading

import pytest

from ronde.check import PROBES, FactReader, look_up_own_name, read_facts


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def facts_of(root="", **settings):
    reader = FactReader({"root": str(root), **settings})
    read_facts(reader, PROBES["network"].modules)
    return reader


BASE = {
    "proc/uptime": "7200.50 14000.00\n",
    "proc/self/environ": "HOME=/root\0NCCL_SOCKET_IFNAME=eth\0NCCL_IB_HCA==mlx5_0\0"
    "NCCL_DEBUG=INFO\0GLOO_SOCKET_IFNAME=eth0\0",
    "sys/class/net/eth0/type": "1\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/mtu": "9000\n",
    "sys/class/net/eth0/speed": "100000\n",
    "sys/class/net/eth0/carrier_changes": "2\n",
    "sys/class/net/eth0/device/vendor": "0x15b3\n",
    "sys/class/net/lo/type": "772\n",
    "sys/class/net/lo/mtu": "65536\n",
    "sys/class/net/docker0/type": "1\n",
    "sys/class/net/docker0/bridge/bridge_id": "8000\n",
    "sys/class/net/docker0/operstate": "down\n",
    "sys/class/net/docker0/speed": "-1\n",
    "sys/class/net/bonding_masters": "\n",
}

PORT = "sys/class/infiniband/mlx5_0/ports/1"
RDMA = {
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/phys_state": "5: LinkUp\n",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)\n",
    f"{PORT}/link_layer": "InfiniBand\n",
    f"{PORT}/counters/link_downed": "3\n",
    f"{PORT}/gids/0": "fe80:0000:0000:0000:a088:c203:00aa:bbcc\n",
    f"{PORT}/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    f"{PORT}/gid_attrs/types/0": "IB/RoCE v1\n",
}


def test_interfaces_are_read(tmp_path):
    write(tmp_path, BASE)
    facts = facts_of(tmp_path)
    assert not facts.unreadable
    assert facts.values["network.interfaces"] == {
        "docker0": {"kind": "bridge", "state": "down", "mtu": 0, "mbit_per_s": 0,
                    "carrier_changes": -1, "carriers": [], "addresses": []},
        "eth0": {"kind": "physical", "state": "up", "mtu": 9000, "mbit_per_s": 100000,
                 "carrier_changes": 2, "carriers": ["eth0"], "addresses": []},
        "lo": {"kind": "loopback", "state": "", "mtu": 65536, "mbit_per_s": 0,
               "carrier_changes": -1, "carriers": [], "addresses": []},
    }  # fmt: skip
    assert facts.values["network.uptime_s"] == 7200.5


def test_the_carriers_of_an_interface_are_found(tmp_path):
    """A bridge over a VLAN of a bond, and interfaces without carriers."""
    net = "sys/class/net"
    tree = {f"{net}/eth1/device/vendor": "0x15b3\n", f"{net}/wg0/lower_eth0": ""}
    for name, kind, lower in (
        ("bond0", "bond", ("eth0", "eth1")),
        ("bond0.7", "vlan", ("bond0",)),
        ("br0", "bridge", ("bond0.7", "veth1")),
        ("vxlan1", "vxlan", ("eth0",)),
    ):
        tree[f"{net}/{name}/uevent"] = f"DEVTYPE={kind}\nINTERFACE={name}\n"
        tree |= {f"{net}/{name}/lower_{each}": "" for each in lower}
    tree[f"{net}/veth1/speed"] = "10000\n"
    write(tmp_path, BASE | tree)
    links = facts_of(tmp_path).values["network.interfaces"]
    carriers = {name: each["carriers"] for name, each in links.items()}
    both = ["eth0", "eth1"]
    assert {name: c for name, c in carriers.items() if c} == {
        "bond0": both, "bond0.7": both, "br0": both, "eth0": ["eth0"], "eth1": ["eth1"],
    }  # fmt: skip


LOG = """\
6,1,{old},-;mlx5_core 0000:5e:00.0 eth0: Link down
6,2,{at},-;mlx5_core 0000:5e:00.0 eth0: Link down
6,3,{at},-;mlx5_core 0000:5e:00.0 eth0: Link up
6,4,{at},-;ixgbe 0000:5e:00.1 eth0: NIC Link is Down
6,5,{at},-;docker0: link down
6,6,{at},-;bond0: (slave eth0): link status definitely down
"""


@pytest.mark.parametrize(
    ("uptime_s", "changes", "downs"),
    [(200_000, 400, 2), (80_000, 400, 200), (80_000, 2, 3)],
    ids=["later", "first day", "first day, a driver loaded again"],
)
def test_links_that_went_down_count_within_a_day(tmp_path, uptime_s, changes, downs):
    log = LOG.format(at=(uptime_s - 80_000) * 10**6, old=(uptime_s - 90_000) * 10**6)
    if uptime_s < 90_000:
        log = log.replace("6,1,-10000000000", "6,1,1")
    own = {"dev/kmsg": log, "proc/uptime": f"{uptime_s}.00 1.00\n"}
    changed = {"sys/class/net/eth0/carrier_changes": f"{changes}\n"}
    write(tmp_path, BASE | own | changed)
    assert facts_of(tmp_path).values["network.link_downs"] == {"eth0": downs}


def test_without_a_log_flaps_of_a_later_day_are_unknown(tmp_path):
    write(tmp_path, BASE)
    assert facts_of(tmp_path).values["network.link_downs"] == {"eth0": 1}
    write(tmp_path, BASE | {"proc/uptime": "90000.00 1.00\n"})
    facts = facts_of(tmp_path)
    assert "network.link_downs" not in facts.values
    assert "dev/kmsg" in facts.unreadable["network.link_downs"]


def test_forwarded_variables_take_precedence(tmp_path):
    write(tmp_path, BASE)
    given = {"NCCL_SOCKET_IFNAME": "ib", "NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1"}
    assert facts_of(tmp_path, environment=given).values["network.variables"] == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_IB_HCA": "=mlx5_0",
        "NCCL_SOCKET_IFNAME": "ib",
    }


def test_paravirtual_and_wireless_links_are_recognised(tmp_path):
    net = "sys/class/net"
    write(tmp_path, BASE | {f"{net}/wlan0/device/vendor": "", f"{net}/wlan0/type": "1"})
    (tmp_path / net / "wlan0/phy80211").mkdir()
    for name, driver in (("ens3", "virtio_net"), ("ens4", "mlx5_core")):
        write(tmp_path, {f"{net}/{name}/device/vendor": "", f"{net}/{name}/type": "1"})
        link = tmp_path / net / name / "device/driver"
        link.symlink_to(f"../../../bus/virtio/drivers/{driver}")
    reported = facts_of(tmp_path).values["network.interfaces"]
    kinds = {name: reported[name]["kind"] for name in ("ens3", "ens4", "eth0", "wlan0")}
    assert kinds == {
        "ens3": "paravirtual",
        "ens4": "physical",
        "eth0": "physical",
        "wlan0": "wireless",
    }


def test_rdma_ports_are_read(tmp_path):
    write(tmp_path, BASE | RDMA)
    facts = facts_of(tmp_path)
    assert facts.values["network.rdma_ports"] == {
        "mlx5_0:1": {
            "state": "ACTIVE", "physical_state": "LinkUp", "mbit_per_s": 400000,
            "layer": "InfiniBand", "downs": 3,
            "gids": {"0": {"address": "fe80:0000:0000:0000:a088:c203:00aa:bbcc",
                           "type": "IB/RoCE v1", "interface": ""}},
        }
    }  # fmt: skip
    assert facts.values["network.rdma_device_files"] == {}


def test_one_unreadable_fact_leaves_the_others(tmp_path):
    write(tmp_path, BASE | RDMA)
    (tmp_path / PORT / "state").unlink()
    (tmp_path / "proc/uptime").write_text("")
    facts = facts_of(tmp_path)
    assert set(facts.unreadable) == {
        *("network.rdma_ports", "network.uptime_s", "network.link_downs")
    }
    assert "network.interfaces" in facts.values


def test_a_hanging_name_server_is_reported():
    let_go = threading.Event()

    def hang(name):
        let_go.wait()
        return []

    own = look_up_own_name("gpu7", hang)(0.1)
    let_go.set()
    assert own["error"] == "no answer within 0.1 s"
