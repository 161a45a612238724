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
EIGHT = "The link runs at 32.0 GT/s PCIe x8 and its most is 32.0 GT/s PCIe x16"
X16_GEN5 = {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}


@pytest.fixture
def probe(tmp_path):
    """Return a function that reads an adapter of 400 Gbit/s, at x16 of generation 5."""

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


GUEST = {"proc/cpuinfo": "flags : fpu hypervisor"}
HDR, SDR = {"rate": "200 Gb/sec (4X HDR)"}, {"rate": "10 Gb/sec (4X SDR)"}


@pytest.mark.parametrize(
    ("changes", "severity", "message"),
    [
        ({}, None, ""),
        ({"width": 8}, FAIL, f"{EIGHT}. It carries 252 Gbit/s, and the port 400"),
        ({"width": 8, **GUEST}, WARN, EIGHT),
        # The slot has no more lanes: the host was built like that.
        ({"slot": 8, "width": 8}, WARN, "The adapter's port carries 50 GB/s, its PCI"),
        ({"speed": 16}, FAIL, "The link runs at 16.0 GT/s PCIe x16 and its most is 32"),
        ({"width": 8, **HDR}, WARN, EIGHT),
        ({"width": 1, "state": "1: DOWN"}, None, ""),
        ({"width": 1, **SDR}, None, ""),
        ({"width": 255}, None, ""),  # unknown
    ],
)
def test_a_pci_link_is_compared_with_its_port(probe, changes, severity, message):
    fleet = Fleet((HostFacts("a", probe(**changes), {}, {}),), {})
    found = judge(fleet, [adapter_pcie]).findings
    assert [each.severity for each in found] == [severity] * bool(severity)
    assert all(each.message.startswith(f"mlx5_0: {message}") for each in found)
