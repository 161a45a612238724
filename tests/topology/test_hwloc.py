"""hwloc's XML of versions 2 and 3 becomes a graph."""

from collections import Counter
from pathlib import Path

import pytest
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.topology import (
    HWLOC,
    HostTopology,
    Link,
    LinkKind,
    Saved,
    read_topology,
    write_topology,
)

SAMPLES = Path(__file__).parent / "samples" / "hwloc_xml"
PROBE = HWLOC


def read(data: bytes | str) -> HostTopology:
    data = data.encode() if isinstance(data, str) else data
    (host,) = PROBE.read(Saved("saved.xml", data)).hosts
    return host


def sample(name: str) -> HostTopology:
    return read((SAMPLES / name).read_bytes())


def test_a_machine_without_pci_devices():
    host = sample("nvidia-dgx-gb10.xml")
    (node,) = host.numa_nodes
    assert (host.name, node.arch, len(node.cores)) == ("cfarm107", "arm64", 20)
    assert (host.devices, host.gpus, host.ports, host.links) == ((), (), (), ())


def test_the_power_machine_is_what_its_file_says():
    saved = Saved("p8", (SAMPLES / "power8gpudistances.xml").read_bytes())
    assert PROBE.recognises(saved)
    topology = PROBE.read(saved)
    assert read_topology(write_topology(topology).encode(), "it") == topology
    (host,) = topology.hosts
    assert host.name == "drac-12.grenoble.grid5000.fr"
    assert [each.gb_per_s for each in host.devices] == [7.876923] * 4
    first, second = host.numa_nodes
    assert first.cpus == (0, 1, 8, 9, 16, 17, 24, 25)
    # 0x00000303,0x03030000,,0x0: the words are bits 96, 64, 32 and 0 upwards.
    assert second.cpus == (80, 81, 88, 89, 96, 97, 104, 105)
    assert second.cores == ((80, 81), (88, 89), (96, 97), (104, 105))
    assert (first.memory_bytes, second.memory_bytes) == (68556816384, 68450713600)
    gpus = [(gpu.number, gpu.bus_id, gpu.uuid[-12:]) for gpu in host.gpus]
    assert gpus == [
        (0, "0002:01:00.0", "b77d2c23d1d2"),
        (1, "0003:01:00.0", "e600a300e314"),
        (2, "000a:01:00.0", "daeb01448779"),
        (3, "000b:01:00.0", "85cc675aa903"),
    ]
    assert {(gpu.title, gpu.sm) for gpu in host.gpus} == {("Tesla P100-SXM2-16GB", 60)}
    gpu = next(each for each in host.devices if each.bus_id == "000a:01:00.0")
    # It is said to carry 15.75 GB/s, and the processor's port at the other end 7.88.
    assert (gpu.parent, gpu.node, gpu.gb_per_s) == ("", 1, 7.876923)
    assert (gpu.class_code, gpu.vendor, gpu.device) == (0x030200, 0x10DE, 0x15F9)
    assert (gpu.subsystem_vendor, gpu.subsystem_device) == (0x10DE, 0x116B)


def test_nvlinks_join_the_pairs_that_the_matrix_says():
    links = sample("power8gpudistances.xml").links
    pairs = {(link.source, link.target) for link in links}
    a, b, c, d = "0002:01:00.0", "0003:01:00.0", "000a:01:00.0", "000b:01:00.0"
    one_way = {(a, b), (c, d)}
    one_way |= {(a, "numa/0"), (b, "numa/0"), (c, "numa/1"), (d, "numa/1")}
    assert pairs == one_way | {(target, source) for source, target in one_way}
    # 40000 MB/s are two links of the first NVLink at 20 GB/s.
    assert {(link.gb_per_s, link.num_links, link.kind) for link in links} == {
        (40.0, 2, LinkKind.NVLINK)
    }


def test_devices_are_near_the_object_they_are_in():
    host = sample("fakepcilocalities.xml")
    by_bus = Counter((each.bus_id[5:7], each.node) for each in host.devices)
    # Bus 43 hangs at a group of two cores within package 1.
    assert by_bus == {("02", 0): 2, ("03", 0): 2, ("43", 1): 1}
    # The Matrox there only drives a screen.
    assert not host.gpus
    ports = {port.title: port for port in host.ports}
    assert list(ports) == ["eth0", "eth1", "eth2", "eth3", "qib0"]
    assert {
        title: port.kind for title, port in ports.items() if port.kind[0] == "i"
    } == {"qib0": "infiniband"}
    assert (ports["qib0"].port, ports["qib0"].is_up) == (1, True)
    assert ports["eth3"].bus_id == "0000:03:00.1"


# Version 2: nodes stand in packages beside the cores. Sorts of devices are numbers
# from 0.
VERSION_2 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x0000000f">
  <info name="Architecture" value="x86_64"/>
  <info name="HostName" value="old"/>
  <object type="Package" os_index="4" cpuset="0x00000003">
   <object type="NUMANode" os_index="0" cpuset="0x00000003" local_memory="1024"/>
   <info name="CPUVendor" value="AuthenticAMD"/>
   <info name="CPUFamilyNumber" value="23"/>
   <info name="CPUModelNumber" value="49"/>
   <object type="Core" os_index="0" cpuset="0x00000003">
    <object type="PU" os_index="0" cpuset="0x00000001"/>
    <object type="PU" os_index="1" cpuset="0x00000002"/>
   </object>
  </object>
  <object type="Package" os_index="5" cpuset="0x0000000c">
   <object type="NUMANode" os_index="8" cpuset="0x0000000c" local_memory="2048"/>
   <object type="PU" os_index="2" cpuset="0x00000004"/>
   <object type="PU" os_index="3" cpuset="0x00000008"/>
   <object type="Bridge" os_index="0" bridge_type="0-1" bridge_pci="0000:[80-81]">
    <object type="PCIDev" os_index="1" name="x" pci_busid="0000:81:00.0"
      pci_type="0207 [15b3:1017] [15b3:0002] 00" pci_link_speed="0.000000">
     <object type="OSDev" name="ib0" osdev_type="2"/>
     <object type="OSDev" name="mlx5_0" osdev_type="3">
      <info name="NodeGUID" value="98:03"/>
      <info name="Port1State" value="1"/>
      <info name="Port2State" value="4"/>
     </object>
    </object>
    <object type="PCIDev" os_index="2" pci_busid="0000:82:00.0"
      pci_type="0300 [10de:1db1] [10de:1212] a1" pci_link_speed="15.75">
     <object type="OSDev" name="cuda0" subtype="CUDA" osdev_type="5">
      <info name="GPUModel" value="Tesla V100-SXM2-16GB"/>
     </object>
    </object>
   </object>
  </object>
 </object>
 <distances2 type="OSDev" nbobjs="2" kind="25" name="NVLinkBandwidth" indexing="os">
  <indexes length="4">0 8 </indexes>
  <u64values length="12">10 21
   21 10 </u64values>
 </distances2>
</topology>
"""


def test_version_2_has_nodes_in_packages():
    host = read(VERSION_2)
    assert host.name == "old"
    first, second = host.numa_nodes
    assert (first.number, first.cpus, first.cores) == (0, (0, 1), ((0, 1),))
    assert (second.number, second.cpus, second.cores) == (8, (2, 3), ())
    assert (first.arch, first.vendor) == ("x86_64", "AuthenticAMD")
    # 23 is 15 and 8 beyond it: 15 + 16 * 8.
    assert (first.family, first.model) == (143, 49)
    assert second.vendor == ""
    assert [(port.title, port.port, port.is_up) for port in host.ports] == [
        ("mlx5_0", 1, False),
        ("mlx5_0:2", 2, True),
    ]
    assert [(device.node, device.class_code) for device in host.devices] == [
        (8, 0x020700),
        (8, 0x030000),
    ]
    assert [(gpu.title, gpu.sm) for gpu in host.gpus] == [("Tesla V100-SXM2-16GB", 70)]


def test_version_1_is_refused():
    with pytest.raises(UsageError, match="line 1: version must be a number from 2"):
        read('<topology><object type="Machine" cpuset="0x3"/></topology>')


def test_a_machine_without_nodes_has_one():
    host = read(
        '<topology version="2.0"><object type="Machine" os_index="0" cpuset="0x3" '
        'local_memory="512"><object type="PU" os_index="0" cpuset="0x1"/>'
        '<object type="PU" os_index="1" cpuset="0x2"/></object></topology>'
    )
    (node,) = host.numa_nodes
    assert (node.number, node.cpus, node.memory_bytes) == (0, (0, 1), 512)


def machine(inside: str, after: str = "", version: str = "2.0") -> str:
    return (
        f'<topology version="{version}"><object type="Machine" cpuset="0x0000000f">'
        f"{inside}</object>{after}</topology>"
    )


def test_memory_without_cpus_of_its_own_gets_none():
    host = read(
        machine(
            '<object type="Package" os_index="0" cpuset="0x3">'
            '<object type="NUMANode" os_index="2" cpuset="0x3" subtype="GPUMemory"/>'
            '<object type="NUMANode" os_index="3" cpuset="0x3"/></object>'
            '<object type="NUMANode" os_index="1" cpuset="0xc"/>'
            '<object type="NUMANode" os_index="0" cpuset="0xf" local_memory="7"/>'
        )
    )
    assert [(n.number, n.cpus) for n in host.numa_nodes] == [
        (0, ()),
        (1, (2, 3)),
        (2, ()),
        (3, (0, 1)),
    ]


PCI = (
    '<object type="Bridge" bridge_type="0-1"><object type="PCIDev" gp_index="7" '
    'pci_busid="0000:41:00.0" pci_type="{kind}" pci_link_speed="1"/></object>'
)


@pytest.mark.parametrize(
    ("kind", "is_gpu"),
    [
        ("0300 [10de:2330] [0000:0000] a1", True),
        ("0302 [10de:2330] [0000:0000] a1", True),
        ("0300 [1a03:2000] [0000:0000] 41", False),
        ("0380 [1002:740c] [0000:0000] 01", True),
        ("1200 [1002:74a1] [0000:0000] 00", True),
        ("1200 [1d0f:7164] [0000:0000] 00", False),
        ("0380 [8086:0bd5] [0000:0000] 2f", True),
        ("0200 [10de:2330] [0000:0000] a1", False),
    ],
)
def test_which_devices_are_gpus(kind, is_gpu):
    assert len(read(machine(PCI.format(kind=kind))).gpus) == is_gpu


def test_xgmi_of_one_sort_of_object_is_reported_without_its_name():
    gpus = "".join(
        f'<object type="PCIDev" pci_busid="0000:0{n}:00.0" '
        'pci_type="1200 [1002:74a1] [0000:0000] 00"><object type="OSDev" '
        f'gp_index="3{n}" name="rsmi{n}" subtype="RSMI" osdev_type="1"/></object>'
        for n in (1, 2)
    )
    matrix = (
        '<distances2 type="OSDev" nbobjs="2" kind="9" name="XGMIBandwidth" '
        'indexing="gp"><indexes length="6">31 32 </indexes>'
        '<u64values length="9">0 100000</u64values><u64values>50000 0</u64values>'
        "</distances2>"
    )
    assert read(machine(gpus, matrix)).links == (
        Link(LinkKind.XGMI, "0000:01:00.0", "0000:02:00.0", 1, 100.0),
        Link(LinkKind.XGMI, "0000:02:00.0", "0000:01:00.0", 1, 50.0),
    )


PORTS = """
<object type="PCIDev" pci_busid="0000:17:00.{}" pci_type="{} [15b3:101d]">
  <object type="OSDev" name="eth{}" osdev_type="{}"/>{}
</object>"""


@pytest.mark.parametrize(("version", "net", "rdma"), [("2.0", 2, 3), ("3.0", 16, 48)])
def test_interfaces_of_an_rdma_adapter_are_its_ports(version, net, rdma):
    more = f'<object type="OSDev" name="ib0" osdev_type="{net}"/>'
    more += f'<object type="OSDev" name="mlx4_0" osdev_type="{rdma}"/>'
    body = PORTS.format(0, "0c06", 0, net, more) + PORTS.format(1, "0200", 1, net, "")
    host = read(
        f'<topology version="{version}"><object type="Machine" cpuset="0x1">{body}'
        "</object></topology>"
    )
    assert [port.title for port in host.ports] == ["mlx4_0", "eth1"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('cpuset="0x0000000c"', 'cpuset="0x0z"', "cpuset must be words"),
        ('cpuset="0x0000000c"', f'cpuset="{"f," * 9000}1"', "at most 65536 CPUs"),
        ('Node" os_index="8"', 'Node" os_index="0"', "an os_index of its own"),
        ('local_memory="2048"', 'local_memory="2kB"', "must be a whole number"),
        ("0000:82:00.0", "0000:81:00.0", "must be listed once"),
        ("0000:82:00.0", "0000:82", "pci_busid must be an address"),
        ("0207 [15b3:1017]", "0207 15b3:1017", "pci_type must look"),
        ('speed="15.75"', 'speed="nan"', "pci_link_speed must be a number"),
        ("   21 10 <", "   21 x <", "values must be numbers"),
        ("   21 10 <", "   21 <", "2 \\* 2 values, got 3"),
        ('version="2.0"', 'version="v2"', "version must be a number"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(old, new, message):
    assert old in VERSION_2
    with pytest.raises(UsageError, match=rf"^saved.xml, line [0-9]+: .*{message}"):
        read(VERSION_2.replace(old, new, 1))


@pytest.mark.parametrize(
    "data", ["<topology/>", "<topologydiff><object/></topologydiff>", "", "x"]
)
def test_other_files_are_refused(data):
    with pytest.raises(UsageError, match=r"saved\.xml"):
        read(data)


def test_harm_is_refused():
    good = (SAMPLES / "power8gpudistances.xml").read_bytes()
    inputs = bad_inputs(good, root="topology", tag="object")
    assert check_harmless(read, inputs) > 50
