"""PCI links of network adapters, as sysfs shows them."""

import pytest

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

SLOT = "sys/devices/pci0000:5d/0000:5d:01.0"
CARD = f"{SLOT}/0000:5e:00.0"
LINK = "sys/class/infiniband/mlx5_0/device"
EIGHT = "its PCI link has 8 lanes of 32 GT/s"
X16_GEN5 = {"width": "16", "speed": "32.0 GT/s PCIe"}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def probe(tmp_path):
    """Return what reads an adapter of 400 Gbit/s from x16 of generation 5."""

    def read(slot=(), port=(), **card):
        own = {"width": "16", "speed": "32.0 GT/s PCIe"} | card
        write(
            tmp_path,
            {
                **{f"{CARD}/current_link_{n}": text for n, text in own.items()},
                **{f"{CARD}/max_link_{n}": text for n, text in X16_GEN5.items()},
                **{
                    f"{SLOT}/max_link_{n}": text
                    for n, text in (X16_GEN5 | dict(slot)).items()
                },
                f"{CARD}/infiniband/mlx5_0/name": "",
                "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
                "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
                "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
                "proc/cpuinfo": "flags : fpu",
                **dict(port),
            },
        )
        links = [(LINK, CARD), ("sys/class/net/ens1/device", CARD)]
        for link, target in links:
            path = tmp_path / link
            if not path.is_symlink():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(tmp_path / target)
        reader = FactReader({"root": str(tmp_path)})
        read_facts(reader, PROBES["network"].modules)
        assert {"network.pci_links", "network.is_virtual"} <= reader.values.keys()
        return reader.values

    return read


def find(values):
    fleet = Fleet((HostFacts("a", values, {}, {}),), {})
    found = judge(fleet, [adapter_pcie]).findings
    return [(each.severity, each.message) for each in found]


def test_a_link_that_carries_its_port_is_no_finding(probe):
    values = probe()
    assert list(values["network.pci_links"]) == ["mlx5_0:1"]
    assert find(values) == []


def test_half_the_lanes_are_found(probe):
    assert find(probe(width="8")) == [
        (FAIL, f"mlx5_0:1: {EIGHT}, 252 Gbit/s, and its port 400 Gbit/s")
    ]


def test_in_a_virtual_machine_it_is_a_warning(probe):
    guest = {"proc/cpuinfo": "flags : fpu hypervisor"}
    assert [severity for severity, _ in find(probe(width="8", port=guest))] == [WARN]


def test_a_slot_with_fewer_lanes_is_how_the_host_was_built(probe):
    found = find(probe({"width": "8"}, width="8"))
    assert [severity for severity, _ in found] == [WARN]


def test_a_slower_generation_is_found(probe):
    found = find(probe(speed="16.0 GT/s PCIe"))
    assert [severity for severity, _ in found] == [FAIL]
    assert "16 lanes of 16 GT/s, 252 Gbit/s" in found[0][1]


def test_fewer_lanes_that_are_enough_are_a_warning(probe):
    slow = {"sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)"}
    assert find(probe(width="8", port=slow)) == [
        (WARN, f"mlx5_0:1: {EIGHT}, where 16 lanes are possible")
    ]


@pytest.mark.parametrize(
    "port",
    [
        {"sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"},
        {"sys/class/infiniband/mlx5_0/ports/1/rate": "10 Gb/sec (4X SDR)"},
    ],
    ids=["down", "slow"],
)
def test_ports_that_are_down_or_slow_are_left_alone(probe, port):
    assert find(probe(width="1", port=port)) == []


def test_adapters_without_a_link_are_left_alone(probe):
    assert probe(width="255")["network.pci_links"] == {}
    assert probe(width="0")["network.pci_links"] == {}
