"""Machines of other people, as their kernels showed them."""

from collections import Counter

import pytest
from tests.topology.saved_trees import unpack

from ronde.topology import Core, Machine, read_machine


def num_cores_by_node(machine: Machine) -> dict[int, int]:
    return dict(Counter(core.node for core in machine.cores))


@pytest.mark.parametrize(
    ("name", "by_node", "threads"),
    [
        ("128arm-2pa2n8cluster4co", dict.fromkeys(range(4), 32), 1),
        ("256ppc-8n8s4t", dict.fromkeys((0, 1, 4, 5, 8, 9, 12, 13), 8), 4),
        ("32em64t-2n8c+dax+nvme+mic+dimms", {0: 8, 1: 8}, 1),
        ("40intel64-4n10c+pci-conflicts", dict.fromkeys(range(4), 10), 1),
        ("48amd64-4pa2n6c-sparse", dict.fromkeys((0, 1, 2, 33, 34, 45, 72, 73), 6), 1),
        # Node 0 went with CPU 0; of CPUs 4-20 the kernel places the odd ones.
        ("offline-cpu0-node0", {-1: 9, 1: 8}, 1),
        # 32 CPUs are online, and the cpuset leaves those of the first node.
        ("nvidiagpunumanodes", {0: 4}, 4),
    ],
)
def test_cores_are_counted_by_memory_node(name, by_node, threads, tmp_path):
    machine = read_machine(unpack(name, tmp_path))
    assert num_cores_by_node(machine) == by_node
    assert {len(core.cpus) for core in machine.cores} == {threads}


def test_the_cores_of_a_node_may_be_numbered_in_strides(tmp_path):
    machine = read_machine(unpack("40intel64-4n10c+pci-conflicts", tmp_path))
    assert machine.cores[:3] == (Core((0,), 0), Core((4,), 0), Core((8,), 0))
    assert machine.cores[-1] == Core((39,), 3)


def test_interfaces_that_are_up_have_a_rate(tmp_path):
    machine = read_machine(unpack("32em64t-2n8c+dax+nvme+mic+dimms", tmp_path))
    assert machine.mbit_per_s == {"eth0": 1000, "ib0": 0}


def test_gpus_are_those_whose_files_may_be_opened(tmp_path):
    tree = unpack("nvidiagpunumanodes", tmp_path)
    assert read_machine(tree).gpus == ()
    (tree / "dev").mkdir()
    for minor in (0, 1, 2, 5):
        (tree / "dev" / f"nvidia{minor}").touch()
    gpus = read_machine(tree).gpus
    addresses = ["0004:05:00.0", "0004:06:00.0", "0006:00:00.0", "0035:05:00.0"]
    assert [gpu.bus_id for gpu in gpus] == addresses
    assert [gpu.visible_as for gpu in gpus] == ["0", "1", "2", "3"]
