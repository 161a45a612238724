"""A topology as a tree of text."""

from pathlib import Path

import pytest

from ronde.render import draw_tree
from ronde.topology import (
    NCCL_TOPOLOGY,
    GpuDevice,
    HostTopology,
    NetPort,
    NetworkSwitch,
    NumaNode,
    PciDevice,
    Saved,
    Topology,
)

SAMPLES = Path(__file__).parent / "samples"

NDV5_END = """\
   └─ PCI switch ffff:ff:08.0  PCI 32.0 GT/s x16, 48 GB/s
      ├─ GPU 7  000c:00:00.0   PCI 32.0 GT/s x16, 48 GB/s
      └─ NIC 0108:00:00.0      rate unknown, PCI 32.0 GT/s x16, 48 GB/s
"""

PERLMUTTER_END = """\
└─ NUMA node 3                CPUs 48-63,112-127, 16 GB/s to other nodes
   ├─ NIC cxi3  0000:01:00.0  200 Gb/s, PCI 16.0 GT/s x16, 24 GB/s
   └─ GPU 0  0000:03:00.0     sm 80, PCI 16.0 GT/s x16, 24 GB/s
NVLink: every GPU: 4 each to the other GPUs, 80 GB/s
"""


def draw_sample(name):
    path = SAMPLES / name
    return draw_tree(NCCL_TOPOLOGY.read(Saved(str(path), path.read_bytes())))


def draw(**fields):
    return draw_tree(Topology((HostTopology(name="a", **fields),)))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml", PERLMUTTER_END),
        ("nccl_topo/azure_ndv5_h100_topo.xml", NDV5_END),
    ],
)
def test_a_real_machine_is_drawn(name, end):
    text = draw_sample(name)
    assert text.endswith(end)
    assert text.count("GPU ") >= end.count("GPU ")


def test_links_that_differ_are_reported_gpu_by_gpu():
    lines = draw_sample("rccl_topo/topo_8p1h_1.xml").splitlines()
    reported = [line for line in lines if line.startswith("xGMI")]
    assert len(reported) == 8
    # From the file: counts 4, 1 and 2; an MI250 carries 36 GB/s a link.
    assert reported[0] == (
        "xGMI: GPU 0: 4 to GPU 1, 144 GB/s; 1 to GPU 2, 36 GB/s; 2 to GPU 6, 72 GB/s"
    )


BRIDGES = (
    PciDevice("0000:00:01.0", node=0, class_code=0x060400),
    PciDevice("0000:01:00.0", "0000:00:01.0", 0, 0x060400, speed="2.5 GT/s PCIe"),
    PciDevice("0000:02:00.0", "0000:01:00.0", 0, 0x030200, speed="16.0 GT/s PCIe"),
)


def test_a_chain_of_bridges_is_left_out_but_for_a_narrow_one():
    text = draw(
        numa_nodes=(NumaNode(0, (0,)),),
        devices=BRIDGES,
        gpus=(GpuDevice("0000:02:00.0", 0),),
    )
    assert "PCI switch" not in text
    # 16 lanes where the width is not told: 16 * 15 / 80 and 16 * 120 / 80.
    assert (
        "GPU 0  0000:02:00.0  PCI 16.0 GT/s, 24 GB/s, behind 0000:01:00.0, PCI 2.5 "
        "GT/s, 3 GB/s" in text
    )


def test_what_is_near_no_node_and_what_is_down_is_said():
    text = draw(
        numa_nodes=(NumaNode(0, (0, 1), memory_bytes=3 << 30), NumaNode(8)),
        devices=(PciDevice("0000:02:00.0", class_code=0x020700),),
        ports=(
            NetPort("ib0", "0000:02:00.0", mbit_per_s=100_000, is_up=False),
            NetPort("tap0", node=0),
        ),
        remarks=("it is odd",),
    )
    lines = text.splitlines()
    assert lines[0] == (
        "a: 2 NUMA nodes, 2 hardware threads, 3GiB of memory, no GPUs, 2 network ports"
    )
    assert lines[1].split("  ")[0] == "├─ NUMA node 0"
    assert lines[2].endswith("rate unknown, no PCI device")
    assert lines[3].endswith("no CPUs")
    assert lines[4] == "└─ NUMA node unknown"
    assert lines[5].endswith("down, PCI link speed unknown, counted as 12 GB/s")
    assert lines[6] == "note: it is odd"


def test_hosts_alike_are_drawn_once():
    hosts = [HostTopology(f"node{n}", numa_nodes=(NumaNode(0),)) for n in range(1, 5)]
    hosts[2] = hosts[2]._replace(gpus=(GpuDevice("", 0),))
    text = draw_tree(Topology(tuple(hosts)))
    assert "3 hosts alike (node1 to node2; node4): 1 NUMA node" in text
    assert text.count("NUMA node 0") == 2
    assert "node3: 1 NUMA node, 1 GPU" in text


def test_switches_between_hosts_are_a_tree():
    switches = (
        NetworkSwitch("leaf1", hosts=("n1", "n2"), speed="100Gb"),
        NetworkSwitch("leaf2", hosts=("n3",)),
        NetworkSwitch("spine", ("leaf1", "leaf2")),
    )
    assert draw_tree(Topology((), switches)) == (
        "3 switches between hosts\n"
        "└─ spine\n"
        "   ├─ leaf1  100Gb, 2 hosts: n1 to n2\n"
        "   └─ leaf2  1 host: n3\n"
    )


GPU = "0000:02:00.0"


def test_nvswitches_are_called_so():
    switch = PciDevice(GPU, class_code=0x068000, vendor=0x10DE, speed="16.0 GT/s PCIe")
    untold = PciDevice("0000:03:00.0", class_code=0x068000, vendor=0x10DE)
    other = PciDevice("0000:04:00.0", class_code=0x068000, vendor=0x8086)
    lines = draw(devices=(switch._replace(width=2), untold, other)).splitlines()
    assert lines[2].split(maxsplit=3)[1:] == [
        *("NVSwitch", GPU, "PCI 16.0 GT/s x2, 3 GB/s")
    ]
    assert lines[3].endswith("NVSwitch 0000:03:00.0")
    assert len(lines) == 4
