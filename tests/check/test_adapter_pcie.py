"""PCI links of network adapters, as sysfs shows them."""

import pytest
from tests.topology.saved_trees import Tree

from ronde.check import (
    FAIL,
    PROBES,
    WARN,
    FactReader,
    Fleet,
    HostFacts,
    adapter_pcie,
    judge,
    read_facts,
)

SLOT, CARD = "pci0000:5d/0000:5d:01.0", "pci0000:5d/0000:5d:01.0/0000:5e:00.0"
PORT = f"sys/devices/{CARD}/infiniband/mlx5_0/ports/1"
EIGHT = "its PCI link has 8 lanes of 32 GT/s"
X16_GEN5 = {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}


@pytest.fixture
def probe(tmp_path):
    """Return what reads an adapter of 400 Gbit/s from x16 of generation 5."""

    def read(slot=16, width=16, speed=32, **files):
        now = {
            "current_link_width": width,
            "current_link_speed": f"{speed}.0 GT/s PCIe",
        }
        tree = Tree(tmp_path).write("proc/cpuinfo", "flags : fpu")
        tree.device(SLOT, **X16_GEN5 | {"max_link_width": slot}, _class="0x060400")
        tree.device(CARD, **X16_GEN5, **now, _class="0x020700", vendor="0x15b3")
        tree.link("sys/class/infiniband/mlx5_0", PORT.removesuffix("/ports/1"))
        tree.link("sys/class/net/ens1", f"sys/devices/{CARD}/net/ens1")
        texts = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"} | files
        for name, text in texts.items():
            tree.write(name if "/" in name else f"{PORT}/{name}", text)
        reader = FactReader({"root": str(tmp_path)})
        read_facts(reader, PROBES["network"].modules)
        return reader.values

    return read


def find(values):
    fleet = Fleet((HostFacts("a", values, {}, {}),), {})
    found = judge(fleet, [adapter_pcie]).findings
    return [(each.severity, each.message) for each in found]


def test_a_link_that_carries_its_port_is_no_finding(probe):
    values = probe()
    assert list(values["network.pci_links"]) == ["mlx5_0"]
    assert find(values) == []


def test_half_the_lanes_are_found(probe):
    assert find(probe(width=8)) == [
        (FAIL, f"mlx5_0: {EIGHT}, 252 Gbit/s, and its port 400 Gbit/s")
    ]


def test_in_a_virtual_machine_it_is_a_warning(probe):
    guest = {"proc/cpuinfo": "flags : fpu hypervisor"}
    assert [severity for severity, _ in find(probe(width=8, **guest))] == [WARN]


def test_a_slot_with_fewer_lanes_is_how_the_host_was_built(probe):
    found = find(probe(slot=8, width=8))
    assert [severity for severity, _ in found] == [WARN]


def test_a_slower_generation_is_found(probe):
    found = find(probe(speed=16))
    assert [severity for severity, _ in found] == [FAIL]
    assert "16 lanes of 16 GT/s, 252 Gbit/s" in found[0][1]


def test_fewer_lanes_that_are_enough_are_a_warning(probe):
    assert find(probe(width=8, rate="200 Gb/sec (4X HDR)")) == [
        (WARN, f"mlx5_0: {EIGHT}, where 16 lanes are possible")
    ]


@pytest.mark.parametrize(
    "port", [{"state": "1: DOWN"}, {"rate": "10 Gb/sec (4X SDR)"}], ids=["down", "slow"]
)
def test_ports_that_are_down_or_slow_are_left_alone(probe, port):
    assert find(probe(width=1, **port)) == []


def test_adapters_without_a_link_are_left_alone(probe):
    assert probe(width=255)["network.pci_links"] == {}
