"""What carries the bytes of a host, from the files of its kernel."""

from pathlib import Path

import pytest
from tests.topology.saved_trees import Tree

from ronde.render import draw_tree
from ronde.topology import (
    Interface,
    KnownRates,
    LimitWorld,
    Topology,
    read_host,
    world_of,
)


class Adapters(Tree):
    """A root directory with network adapters, each in a slot of its own."""

    def link(self, path: str, target: str) -> "Adapters":
        """Make a link unless it is there."""
        if not (self.root / path).is_symlink():
            super().link(path, target)
        return self

    def interface(
        self, name: str, speed: str | None, slot: str = "0000:03:00.0", **files: str
    ) -> "Adapters":
        """Write an interface that is up; of one without speed there is no file."""
        own = f"sys/devices/pci0000:00/{slot}/net/{name}"
        self.device(f"pci0000:00/{slot}", _class="0x020000")
        self.link(f"sys/class/net/{name}", own).write(f"{own}/carrier", "1\n")
        for file, text in {**files, "speed": speed}.items():
            if text is not None:
                self.write(f"{own}/{file}", f"{text}\n")
        return self

    def virtual(self, name: str, *lower: str, bonding: str = "") -> "Adapters":
        """Write an interface of software, above others."""
        own = f"sys/devices/virtual/net/{name}"
        # What software says of its speed is a default, or wrong.
        self.write(f"{own}/speed", "10000\n").write(f"{own}/carrier", "1\n")
        self.link(f"sys/class/net/{name}", own)
        for each in lower:
            (self.root / own / f"lower_{each}").symlink_to(f"../{each}")
        if bonding:
            self.write(f"{own}/bonding/mode", f"{bonding}\n")
        return self

    def adapter(self, name: str, rate: str, state: str, place: str) -> "Adapters":
        """Write an RDMA adapter with one port."""
        own = f"sys/devices/{place}/infiniband/{name}"
        self.device(place, _class="0x020700")
        self.link(f"sys/class/infiniband/{name}", own)
        self.write(f"{own}/ports/1/rate", f"{rate}\n")
        self.write(f"{own}/ports/1/state", f"{state}\n")
        return self

    def rates(self, interface: str = "") -> LimitWorld:
        """Return what is found."""
        given = KnownRates(interface=interface)
        return world_of(read_host(self.root), 2, 1, given)

    def reported(self, interface: str = "") -> str:
        """Return the words for it; empty where nothing is known."""
        network = self.rates(interface).network
        return network.link if network else ""


@pytest.fixture
def tree(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path)


def test_an_ethernet_interface(tree: Adapters) -> None:
    tree.interface("eth0", "25000")
    assert tree.reported("eth0") == tree.reported() == "eth0, 3.125 GB/s"
    rates = tree.rates("eth0")
    assert rates.path == rates.network
    assert rates.unknown == ()


@pytest.mark.parametrize("speed", ["-1", "0", "", None, "unknown"])
def test_an_interface_that_does_not_report(tree: Adapters, speed: str | None) -> None:
    tree.interface("eth0", speed)
    for name in ("eth0", "eth7"):
        rates = tree.rates(name)
        assert (rates.network, rates.path) == (None, None)
        (why,) = rates.unknown
        assert why == (
            f"the link rate is not known: {name} is virtual, or its speed "
            "is unknown; --link-rate gives it"
        )


def test_what_is_virtual_is_no_hardware(tree: Adapters) -> None:
    for name in ("lo", "veth12", "docker0"):
        tree.virtual(name)
        assert tree.reported(name) == ""
    assert read_host(tree.root).interfaces == ()


def two(tree: Adapters) -> Adapters:
    tree.interface("eth0", "25000").interface("eth1", "25000", "0000:04:00.0")
    return tree


def test_what_lies_below_a_bridge_or_vlan(tree: Adapters) -> None:
    two(tree).virtual("veth1").virtual("br0", "eth0", "veth1")
    assert tree.reported("br0") == "br0 over eth0, 3.125 GB/s"
    tree.virtual("bond0", "eth0", "eth1", bonding="802.3ad 4")
    tree.virtual("a.9", "bond0").virtual("br1", "a.9", "veth1")
    assert tree.reported("br1") == "br1 over a.9 over bond0 over eth0+eth1, 6.25 GB/s"
    assert read_host(tree.root).interfaces == (
        Interface("bond0", ("eth0", "eth1"), "802.3ad"),
        Interface("a.9", ("bond0",)),
        Interface("br0", ("eth0",)),
        Interface("br1", ("a.9",)),
    )


@pytest.mark.parametrize(
    ("mode", "bond", "host"),
    [
        ("802.3ad 4", 6.25, 6.25),
        ("balance-rr 0", 6.25, 6.25),
        ("active-backup 1", 3.125, 3.125),
        ("broadcast 3", 3.125, 3.125),
    ],
)
def test_a_bond_is_a_link_over_its_ports(
    tree: Adapters, mode: str, bond: float, host: float
) -> None:
    two(tree).virtual("bond0", "eth0", "eth1", bonding=mode)
    assert tree.reported("bond0") == f"bond0 over eth0+eth1, {bond:g} GB/s"
    drawn = draw_tree(Topology((read_host(tree.root),)))
    reported = f"bond0 over eth0+eth1: {mode.partition(' ')[0]}, {bond * 8:g} Gb/s"
    assert reported in drawn.splitlines()
    # Where no interface is named all count, but for what a bond holds in reserve.
    network = tree.rates().network
    assert network is not None
    assert network.gb_per_s == host


def test_of_a_bond_a_port_without_its_cable_is_not_there(tree: Adapters) -> None:
    two(tree).virtual("bond0", "eth0", "eth1", bonding="802.3ad 4")
    tree.interface("eth1", "-1", "0000:04:00.0", carrier="0")
    assert tree.reported("bond0") == "bond0 over eth0, 3.125 GB/s"


def test_interfaces_below_each_other_in_a_circle_carry_nothing(tree: Adapters) -> None:
    two(tree).virtual("a", "b", "eth0").virtual("b", "a").virtual("c", "c")
    assert read_host(tree.root).interfaces == ()
    assert tree.reported("a") == ""


def test_the_interface_of_an_rdma_adapter_stands_on_its_port(tree: Adapters) -> None:
    place = "pci0000:00/0000:0f:00.0"
    tree.adapter("mlx4_0", "40 Gb/sec (4X QDR)", "4: ACTIVE", place)
    own = f"sys/devices/{place}/infiniband/mlx4_0/ports/2"
    tree.write(f"{own}/rate", "100 Gb/sec (4X EDR)\n").write(f"{own}/state", "4: A\n")
    tree.interface("eth2", "40000", "0000:0f:00.0", dev_port="0")
    tree.interface("eth3", "100000", "0000:0f:00.0", dev_port="1")
    assert tree.reported("eth2") == "eth2 over mlx4_0, 5 GB/s"
    assert tree.reported("eth3") == "eth3 over mlx4_0:2, 12.5 GB/s"
    tree.virtual("bond0", "eth2", "eth3", bonding="balance-xor 2")
    assert tree.reported("bond0") == (
        "bond0 over eth2 over mlx4_0 + eth3 over mlx4_0:2, 17.5 GB/s"
    )


def test_rdma_ports_that_are_up(tree: Adapters) -> None:
    tree.adapter("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE", "pci0/0000:0f:00.0")
    tree.adapter("mlx5_1", "56 Gb/sec (4X FDR)", "4: ACTIVE", "pci0/0000:1f:00.0")
    tree.adapter("mlx5_2", "10 Gb/sec (4X SDR)", "1: DOWN", "pci0/0000:2f:00.0")
    # Ethernet for management is no way for them, whatever their own link layer.
    tree.interface("eth0", "25000")
    assert tree.reported() == "mlx5_0+mlx5_1, 57 GB/s"
    path = tree.rates().path
    assert path is not None
    assert path.link == "mlx5_0, 50 GB/s"
