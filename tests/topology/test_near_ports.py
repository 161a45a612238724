"""``ronde run`` and ``ronde topo place`` find the same ports near the same GPUs."""

import pytest
from tests.topology.saved_trees import Tree

from ronde.topology import (
    AlignmentRequest,
    Machine,
    nearest_ports,
    plan_host,
    read_host,
    read_machine,
)

NDR, HDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"
BRIDGE, GPU, NIC = "0x060400", "0x030200", "0x020700"


class Host:
    """A saved machine of two sockets, built device by device."""

    def __init__(self, root) -> None:
        self.tree = Tree(root).cpus("0-7")
        self.tree.node(0, "0f").node(1, "f0")
        self._num_gpus = 0

    def device(self, place: str, kind: str, width: int, node: int) -> str:
        self.tree.device(
            place,
            _class=kind,
            vendor="0x1002" if kind == GPU else "0x15b3",
            numa_node=str(node),
            max_link_speed="32.0 GT/s PCIe",
            current_link_speed="32.0 GT/s PCIe",
            max_link_width=str(width),
            current_link_width=str(width),
        )
        return place

    def bridges(self, *places: str, width: int = 16, node: int = 0) -> str:
        """Add bridges, each below the one before; return the place of the last."""
        above = f"pci0000:{node}0"
        for place in places:
            above = self.device(f"{above}/{place}", BRIDGE, width, node)
        return above

    def gpu(self, above: str, address: str, node: int = 0) -> None:
        place = self.device(f"{above}/{address}", GPU, 16, node)
        name = f"renderD{128 + self._num_gpus}"
        self.tree.link(f"sys/class/drm/{name}", f"sys/devices/{place}/drm/{name}")
        self.tree.write(f"dev/dri/{name}")
        self._num_gpus += 1

    def port(
        self,
        above: str,
        address: str,
        name: str,
        *,
        width: int = 16,
        rate: str = NDR,
        node: int = 0,
    ) -> None:
        place = self.device(f"{above}/{address}", NIC, width, node)
        own = f"sys/devices/{place}/infiniband/{name}"
        self.tree.link(f"sys/class/infiniband/{name}", own)
        self.tree.write(f"{own}/ports/1/state", "4: ACTIVE")
        self.tree.write(f"{own}/ports/1/rate", rate)
        self.tree.write(f"{own}/ports/1/link_layer", "InfiniBand")

    def chosen(self, num_ranks: int) -> list[str]:
        """Return each rank's port, which both commands must find alike."""
        machine = read_machine(self.tree.root)
        plan = plan_host(read_host(self.tree.root), AlignmentRequest(num_ranks))
        planned = ["".join(nic.name for nic in rank.nics) for rank in plan.ranks]
        assert list(nearest_ports(machine, machine.gpus[:num_ranks])) == planned
        return planned


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_a_port_that_shares_fewer_bridges_and_carries_more_is_nearer(host):
    upper = host.bridges("0000:00:01.0", "0000:01:00.0")
    switch = host.device(f"{upper}/0000:02:00.0", BRIDGE, 16, 0)
    narrow = host.device(f"{switch}/0000:03:00.0", BRIDGE, 4, 0)
    narrow = host.device(f"{narrow}/0000:04:00.0", BRIDGE, 4, 0)
    beside = host.device(f"{upper}/0000:02:01.0", BRIDGE, 16, 0)
    host.gpu(switch, "0000:0a:00.0")
    host.port(narrow, "0000:0b:00.0", "mlx5_0", width=4)
    host.port(beside, "0000:0c:00.0", "mlx5_1")
    assert host.chosen(1) == ["mlx5_1"]


def test_each_gpu_has_the_port_at_its_switch(host):
    for n in range(2):
        upper = host.bridges(f"0000:00:0{n + 1}.0", f"0000:{n + 1}0:00.0")
        host.port(upper, f"0000:{n + 1}2:00.0", f"mlx5_{1 - n}")
        host.gpu(upper, f"0000:{n + 1}3:00.0")
    assert host.chosen(2) == ["mlx5_1", "mlx5_0"]


def test_of_equal_ports_the_one_trained_down_is_left(host):
    upper = host.bridges("0000:00:01.0", "0000:01:00.0")
    for n, width in enumerate((8, 16, 16)):
        host.port(upper, f"0000:0{n + 2}:00.0", f"mlx5_{n}", width=width)
    for n in range(2):
        host.gpu(upper, f"0000:0{n + 6}:00.0")
    assert host.chosen(2) == ["mlx5_1", "mlx5_2"]


def test_ports_of_the_same_socket_are_nearer_and_taken_in_turn(host):
    for node in range(2):
        for n in range(2):
            slot = host.bridges(f"0000:{node}0:0{n + 1}.0", node=node)
            host.gpu(slot, f"0000:{node}{n + 1}:00.0", node)
        slot = host.bridges(f"0000:{node}0:09.0", node=node)
        host.port(slot, f"0000:{node}9:00.0", f"mlx5_{1 - node}", node=node)
    assert host.chosen(4) == ["mlx5_1", "mlx5_1", "mlx5_0", "mlx5_0"]


def test_where_nothing_is_near_a_gpu_no_port_is_named(host):
    host.gpu(host.bridges("0000:00:01.0"), "0000:01:00.0")
    assert host.chosen(1) == [""]
    machine = read_machine(host.tree.root)
    assert nearest_ports(machine, [None, machine.gpus[0]]) == ("", "")
    assert nearest_ports(Machine((), 0.0, (), {}), [None]) == ("",)
