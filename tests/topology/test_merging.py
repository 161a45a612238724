"""Several sources of one host become one, and what they disagree on is said."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.topology.saved_trees import unpack

from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
    Relation,
)
from ronde.topology.merging import merge_hosts
from ronde.topology.probes.hwloc import HwlocProbe
from ronde.topology.probes.hwloc_links import keep_lower_ends
from ronde.topology.probes.lspci import LspciProbe
from ronde.topology.probes.nccl_topology import NcclTopologyProbe
from ronde.topology.probes.nvidia_smi import NvidiaSmiProbe
from ronde.topology.probes.nvml_answers import GpuAnswers, Remote, graph_of
from ronde.topology.probes.probe import Saved
from ronde.topology.probes.sysfs_tree import read_host

SAMPLES = Path(__file__).parent / "samples"
PROBES = (NcclTopologyProbe(), HwlocProbe(), NvidiaSmiProbe(), LspciProbe())

PERLMUTTER = "nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml"
PERLMUTTER_SMI = "nvsmi_topo_m/perlmutter_a100_4x_drv580.159.txt"
B200 = "nccl_topo/hgx_b200_8x_vastai_nccl2.27.3.xml"
B200_SMI = "nvsmi_topo_m/hgx_b200_8x_drv595.91.txt"
H200 = "nccl_topo/hgx_h200_8x_vastai.xml"
H200_SMI = "nvsmi_topo_m/hgx_h200_8x_topo_p2p_n.txt"
POWER8 = "hwloc_xml/power8gpudistances.xml"


def read_text(text: str, name: str) -> HostTopology:
    saved = Saved(name, text.encode())
    probe = next(probe for probe in PROBES if probe.recognises(saved))
    (host,) = probe.read(saved).hosts
    return host


def read_sample(name: str) -> HostTopology:
    return read_text((SAMPLES / name).read_text(), Path(name).name)


def host_of(source: str, **elements: object) -> HostTopology:
    return HostTopology(sources=(source,))._replace(**elements)


def elements_of(host: HostTopology) -> dict[str, set[object]]:
    return {
        field: set(getattr(host, field))
        for field in host._fields
        if isinstance(getattr(host, field), tuple)
    }


# NVLinks that leave each GPU, and the word between GPUs, as both files have them.
@pytest.mark.parametrize(
    ("nccl", "smi", "num_links", "path", "peer"),
    [
        (PERLMUTTER, PERLMUTTER_SMI, 12, "NV4", ""),
        (B200, B200_SMI, 18, "NV18", ""),
        (H200, H200_SMI, 18, "", "OK"),
    ],
)
def test_nvidia_smi_and_nccl_tell_of_the_same_gpus(nccl, smi, num_links, path, peer):
    one, other = read_sample(nccl), read_sample(smi)
    host = merge_hosts([one, other])
    assert host.remarks == one.remarks
    assert host.sources == one.sources + other.sources
    assert host.gpus == one.gpus
    assert (host.links, host.ports) == (one.links, one.ports)
    assert (host.devices, host.numa_nodes) == (one.devices, one.numa_nodes)
    addresses = {gpu.bus_id for gpu in host.gpus}
    for bus_id in addresses:
        links = [link.num_links for link in host.links if link.source == bus_id]
        assert sum(links) == num_links
    pairs = {frozenset((each.source, each.target)) for each in host.relations}
    assert pairs == set(map(frozenset, itertools.combinations(sorted(addresses), 2)))
    assert {(each.path, each.peer) for each in host.relations} == {(path, peer)}


def test_nvml_adds_to_what_the_file_tells():
    told = read_sample(B200)
    answers = [
        GpuAnswers(
            f"0000{gpu.bus_id}",
            title="NVIDIA B200",
            sm=100,
            generation=5,
            width=16,
            nvlinks=(Remote(2, "0FFFFFFF:FF:FF.0"),) * 18,
        )
        for gpu in told.gpus
    ]
    host = merge_hosts([told, graph_of(answers, {})])
    assert host.remarks == told.remarks
    assert {gpu.title for gpu in host.gpus} == {"NVIDIA B200"}
    assert [gpu.rank for gpu in host.gpus] == [gpu.rank for gpu in told.gpus]
    devices = {each.bus_id: each for each in host.devices}
    assert set(devices) == {each.bus_id for each in told.devices}
    gpu = devices["0000:51:00.0"]
    assert (gpu.speed_now, gpu.parent) == ("32.0 GT/s PCIe", "0000:45:00.0")


def test_another_number_of_links_is_said():
    text = (SAMPLES / PERLMUTTER_SMI).read_text()
    text = text.replace("NV4\tNV4\tNV4", "NV4\tNV4\tNV3", 1)
    text = re.sub(r"^(GPU3)\tNV4", r"\1\tNV3", text, flags=re.MULTILINE)
    host = merge_hosts([read_text(text, "smi"), read_sample(PERLMUTTER)])
    nccl = f"NCCL topology file {Path(PERLMUTTER).name}"
    assert host.remarks == tuple(
        f"{one}: nvlink links 4 to {other} by {nccl}, but 3 to {other} by nvidia-smi "
        f"topo -m smi."
        for one, other in itertools.permutations(("0000:03:00.0", "0000:c1:00.0"))
    )


def test_gpus_that_cannot_be_found_are_left_out():
    lines = (SAMPLES / PERLMUTTER_SMI).read_text().splitlines()
    # The last GPU's column is the fifth, counted with the names of the rows.
    cut = [[c for n, c in enumerate(line.split("\t")) if n != 4] for line in lines]
    text = "\n".join("\t".join(row) for row in cut if not row[0].startswith("GPU3"))
    smi = read_text(text, "three")
    assert len(smi.gpus) == 3
    told = read_sample(PERLMUTTER)
    host = merge_hosts([told, smi])
    assert (host.gpus, host.links, host.relations) == (told.gpus, told.links, ())
    assert "tells of 3 GPUs and the other sources of 4" in host.remarks[0]


def test_a_gpu_is_found_by_its_uuid():
    one = host_of(
        "sysfs",
        gpus=(GpuDevice("0000:01:00.0", 0, uuid="GPU-a"), GpuDevice("0000:02:00.0", 1)),
    )
    other = host_of(
        "nvidia-smi topo -m x", gpus=(GpuDevice("", 0, uuid="GPU-a", node=3),)
    )
    host = merge_hosts([other, one])
    assert [gpu.bus_id for gpu in host.gpus] == ["0000:01:00.0", "0000:02:00.0"]
    assert host.devices == (PciDevice("0000:01:00.0", node=3),)


def test_hwloc_and_lspci_complete_each_other():
    told = read_sample(POWER8)
    text = "".join(
        f"{gpu.bus_id} 3D controller [0302]: NVIDIA Corporation GP100GL [Tesla P100 "
        "SXM2 16GB] [10de:15f9] (rev a1)\n"
        for gpu in told.gpus[1:]
    )
    host = merge_hosts([read_text(text, "list"), told])
    assert host.gpus == told.gpus
    assert host.numa_nodes == told.numa_nodes
    (remark,) = host.remarks
    assert (
        remark
        == "lspci -nn list does not list 0002:01:00.0, which another source does."
    )
    # What hwloc lists above them are ports of the processor.
    assert {each.bus_id: each.parent for each in host.devices} == {
        gpu.bus_id: "" for gpu in told.gpus
    }


def test_the_kernel_is_believed_and_the_others_are_named():
    node = NumaNode(0, cpus=(0, 1), arch="x86_64")
    device = PciDevice("0000:01:00.0", node=0, vendor=0x10DE, speed="16.0 GT/s PCIe")
    kernel = host_of("sysfs of a", name="a", numa_nodes=(node,), devices=(device,))
    nccl = host_of(
        "NCCL topology file b",
        name="b",
        numa_nodes=(node._replace(cpus=(0, 1, 2, 3)), NumaNode(1)),
        devices=(
            device._replace(node=1, vendor=0x15B3, speed="32.0 GT/s PCIe", width=8),
        ),
    )
    hwloc = host_of("hwloc XML c", devices=(device._replace(speed="16 GT/s"),))
    for order in itertools.permutations([kernel, nccl, hwloc]):
        host = merge_hosts(order)
        assert host.name == "a"
        assert host.numa_nodes == (node, NumaNode(1))
        assert host.devices == (device._replace(width=8),)
        by = "by sysfs of a, but", "by NCCL topology file b."
        assert host.remarks == (
            f"The host: name a {by[0]} b {by[1]}",
            f"numa/0: CPUs 0-1 {by[0]} 0-3 {by[1]}",
            f"0000:01:00.0: node 0 {by[0]} 1 {by[1]}",
            f"0000:01:00.0: vendor 0x10de {by[0]} 0x15b3 {by[1]}",
            f"0000:01:00.0: speed 16.0 GT/s PCIe {by[0]} 32.0 GT/s PCIe {by[1]}",
        )


def test_what_changes_by_itself_is_no_contradiction():
    port = NetPort("mlx5_0", "0000:29:00.0", guid="1", is_up=False, mbit_per_s=400_000)
    one = host_of(
        "sysfs",
        numa_nodes=(NumaNode(0, free_bytes=1),),
        devices=(PciDevice("0000:29:00.0", speed_now="2.5 GT/s PCIe", width=16),),
        ports=(port,),
    )
    other = host_of(
        "NCCL topology file x",
        numa_nodes=(NumaNode(0, free_bytes=2),),
        devices=(PciDevice("0000:29:00.0", speed_now="32.0 GT/s PCIe", width=0),),
        # NCCL lists all functions of an adapter under the first.
        ports=(port._replace(bus_id="0000:29:00.1", guid="0x2", mbit_per_s=0),),
    )
    assert merge_hosts([one, other]) == one._replace(
        sources=(*one.sources, *other.sources)
    )


def test_a_slow_port_is_a_contradiction():
    port = NetPort("mlx5_0", "0000:29:00.0", mbit_per_s=200_000)
    declared = host_of(
        "NCCL topology file x", ports=(port._replace(mbit_per_s=180_000),)
    )
    (remark,) = merge_hosts([declared, host_of("sysfs", ports=(port,))]).remarks
    assert remark == (
        "net/mlx5_0: Mbit/s 200000 by sysfs, but 180000 by NCCL topology file x."
    )


def test_ports_of_other_names_are_found_by_their_adapter():
    at = "0000:29:00.0"
    kernel = host_of("sysfs", ports=(NetPort("hsn0", at, mbit_per_s=200_000),))
    nccl = host_of(
        "NCCL topology file x",
        ports=(NetPort("cxi0", at, gdr=1),),
        relations=(Relation("0000:03:00.0", "net/cxi0", "PHB"),),
    )
    listed = host_of("lspci -nn y", ports=(NetPort(at, at),))
    host = merge_hosts([listed, nccl, kernel])
    assert host.ports == (NetPort("hsn0", at, mbit_per_s=200_000, gdr=1),)
    assert host.relations == (Relation("0000:03:00.0", "net/hsn0", "PHB"),)
    assert merge_hosts([listed, nccl]).ports == (NetPort("cxi0", at, gdr=1),)


def test_second_ports_stay_apart_whatever_they_are_called():
    at = "0000:29:00.0"
    kernel = host_of(
        "sysfs",
        ports=(NetPort("mlx4_0", at, port=1), NetPort("mlx4_0:2", at, port=2)),
    )
    nccl = host_of(
        "NCCL topology file x", ports=(NetPort("mlx4_0", at, port=2, gdr=1),)
    )
    host = merge_hosts([nccl, kernel])
    assert host.ports == (kernel.ports[0], kernel.ports[1]._replace(gdr=1))


def test_interfaces_of_adapters_and_fused_ports_are_not_listed_twice():
    one, two = NetPort("mlx5_0", "0000:29:00.0"), NetPort("mlx5_1", "0000:3a:00.0")
    kernel = host_of("sysfs", ports=(one, two))
    hwloc = host_of("hwloc XML x", ports=(one, one._replace(title="ib0"), two))
    nccl = host_of("NCCL topology file y", ports=(one._replace(title="mlx5_0+mlx5_1"),))
    host = merge_hosts([kernel, hwloc, nccl])
    assert host.ports == (one, two)
    assert [remark.partition(" is left out")[0] for remark in host.remarks] == [
        "net/mlx5_0+mlx5_1 of NCCL topology file y",
        "net/ib0 of hwloc XML x",
    ]


OF_SAVED_TREE = """<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0x0000ffff">
    <object type="NUMANode" os_index="0" cpuset="0x000000ff"/>
    <object type="NUMANode" os_index="1" cpuset="0x0000ff00"/>
    <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[80-83]">
      <object type="Bridge" bridge_type="1-1" bridge_pci="0000:[82-82]"
          pci_busid="0000:80:02.2" pci_type="0604 [8086:3c06] [0000:0000] 07">
        <object type="PCIDev" pci_busid="0000:82:00.0" pci_link_speed="7.876923"
            pci_type="0280 [15b3:1003] [15b3:0059] 00">
          <object type="OSDev" name="ib0" osdev_type="2"/>
          <object type="OSDev" name="mlx4_0" osdev_type="3"/>
        </object>
      </object>
      <object type="PCIDev" pci_busid="0000:83:00.0" pci_link_speed="0"
          pci_type="0b40 [8086:225c] [8086:2500] 20"/>
    </object>
  </object>
</topology>"""


def test_a_saved_tree_and_hwlocs_view_of_it_are_one(tmp_path):
    kernel = read_host(unpack("32em64t-2n8c+dax+nvme+mic+dimms", tmp_path))
    host = merge_hosts([read_text(OF_SAVED_TREE, "x"), kernel])
    assert host.ports == kernel.ports
    assert [each.bus_id for each in host.devices] == [
        each.bus_id for each in kernel.devices
    ]
    assert host.devices[-1] == kernel.devices[-1]._replace(
        gb_per_s=host.devices[-1].gb_per_s
    )
    assert round(host.devices[-1].gb_per_s, 3) == 7.877
    assert [remark.partition(" is left")[0] for remark in host.remarks] == [
        "net/ib0 of hwloc XML x"
    ]


def test_bridges_of_a_cloud_are_taken_where_the_kernel_shows_none():
    gpu = GpuDevice("0001:00:00.0", 0)
    kernel = host_of("sysfs", gpus=(gpu,), devices=(PciDevice(gpu.bus_id),))
    bridge = PciDevice("ffff:ff:01.0", speed="16.0 GT/s PCIe")
    nccl = host_of(
        "NCCL topology file x",
        devices=(
            bridge,
            PciDevice("ffff:ff:02.0"),
            PciDevice(gpu.bus_id, parent=bridge.bus_id),
        ),
        gpus=(gpu,),
    )
    host = merge_hosts([kernel, nccl])
    assert host.devices == (bridge, PciDevice(gpu.bus_id, parent=bridge.bus_id))


def test_nodes_without_numbers_are_those_that_have_some():
    kernel = host_of("sysfs", numa_nodes=(NumaNode(0), NumaNode(1)))
    nccl = host_of("NCCL topology file x", numa_nodes=(NumaNode(UNKNOWN, cpus=(0,)),))
    assert merge_hosts([nccl, kernel]).numa_nodes == kernel.numa_nodes
    assert merge_hosts([nccl, nccl]).numa_nodes == nccl.numa_nodes


def test_one_direction_stands_for_both_unless_both_are_told():
    there, back = Relation("gpu/0", "gpu/1", peer="OK"), Relation("gpu/1", "gpu/0")
    short = host_of("NVML", relations=(there,))
    reverse = host_of("nvidia-smi topo -m x", relations=(back._replace(path="SYS"),))
    both = reverse._replace(relations=(there, back._replace(peer="NS")))
    assert merge_hosts([short, reverse]).relations == (there._replace(path="SYS"),)
    assert merge_hosts([short, both]).relations == both.relations


def test_only_the_lower_end_of_a_link_is_kept():
    chain = ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0"]
    devices = [PciDevice(chain[0])]
    devices += [
        PciDevice(each, parent=above)
        for above, each in itertools.pairwise([*chain[:3], "0000:18:00.0"])
    ]
    assert keep_lower_ends(devices, ["0000:18:00.0"]) == (
        PciDevice("0000:16:00.0"),
        PciDevice("0000:18:00.0", parent="0000:16:00.0"),
    )


def test_parents_below_their_children_do_no_harm():
    one = host_of("sysfs", devices=(PciDevice("0000:01:00.0", parent="0000:02:00.0"),))
    other = host_of(
        "NCCL topology file x",
        devices=(PciDevice("0000:02:00.0", parent="0000:01:00.0"),),
        gpus=(GpuDevice("0000:02:00.0", 0),),
    )
    host = merge_hosts([one, other])
    assert {each.bus_id for each in host.devices} == {"0000:01:00.0", "0000:02:00.0"}


def test_one_source_is_as_it_is():
    host = read_sample(PERLMUTTER)
    assert merge_hosts([host]) is host


ADDRESSES = [f"0000:{bus:02x}:00.0" for bus in range(1, 6)]
SPEEDS = st.sampled_from(["", "16.0 GT/s PCIe", "32.0 GT/s PCIe"])
NUMBERS = st.integers(UNKNOWN, 2)


@st.composite
def hosts(draw, source="sysfs"):
    """Return a host of one source, in the order that readers keep."""
    chosen = draw(st.lists(st.sampled_from(ADDRESSES), unique=True, max_size=5))
    devices = [
        PciDevice(
            each,
            parent=draw(st.sampled_from(["", *chosen[:place]])),
            node=draw(NUMBERS),
            speed=draw(SPEEDS),
            width=draw(st.sampled_from([UNKNOWN, 0, 8, 16])),
        )
        for place, each in enumerate(chosen)
    ]
    are_gpus = [draw(st.booleans()) for _ in chosen]
    gpus = [b for b, is_gpu in zip(chosen, are_gpus, strict=True) if is_gpu]
    rest = [b for b, is_gpu in zip(chosen, are_gpus, strict=True) if not is_gpu]
    numbers = draw(st.sets(NUMBERS))
    links = [
        Link(LinkKind.NVLINK, one, draw(st.sampled_from([NVSWITCH, *gpus])), 4)
        for one in gpus
    ]
    relations = [
        Relation(one, other, draw(st.sampled_from(["", "PIX", "SYS"])))
        for one, other in itertools.permutations(gpus, 2)
        if draw(st.booleans())
    ]
    return HostTopology(
        name=draw(st.sampled_from(["", "a", "b"])),
        sources=(source,),
        numa_nodes=tuple(NumaNode(n, cpus=(n + 1,)) for n in sorted(numbers)),
        devices=tuple(devices),
        gpus=tuple(GpuDevice(b, n, sm=draw(NUMBERS)) for n, b in enumerate(gpus)),
        ports=tuple(NetPort(f"mlx5_{b[6]}", b, mbit_per_s=draw(NUMBERS)) for b in rest),
        links=tuple(links),
        relations=tuple(relations),
        remarks=draw(st.sampled_from([(), ("odd",)])),
    )


@given(hosts())
def test_merging_a_host_with_itself_changes_nothing(host):
    assert merge_hosts([host, host]) == host
    assert merge_hosts([host, HostTopology(sources=host.sources)]) == host


@given(
    hosts("sysfs"),
    hosts("NVML"),
    hosts("NCCL topology file"),
    st.permutations(range(3)),
)
def test_the_order_of_sources_does_not_matter(one, two, three, order):
    sources = [one, two, three]
    host = merge_hosts(sources)
    assert merge_hosts([sources[place] for place in order]) == host
    names = [{each.name for each in found.gpus} for found in sources]
    assert {gpu.name for gpu in host.gpus} == set().union(*names)
    placed = {""}
    for device in host.devices:
        placed.add(device.bus_id)
    assert all(gpu.bus_id in placed for gpu in host.gpus)
    best = next((found.devices for found in sources if found.devices), ())
    assert {each.bus_id for each in best} <= placed


@given(st.permutations(range(3)), st.tuples(hosts(), hosts(), hosts()))
def test_of_equal_sources_only_the_order_of_values_matters(order, sources):
    host = merge_hosts(sources)
    other = merge_hosts([sources[place] for place in order])
    for field in ("gpus", "ports", "numa_nodes"):
        names = {each.name for each in getattr(host, field)}
        assert names == {each.name for each in getattr(other, field)}


@pytest.mark.parametrize("name", [PERLMUTTER, B200, H200, POWER8, B200_SMI, H200_SMI])
def test_real_files_merged_with_themselves_are_as_they_were(name):
    host = read_sample(name)
    assert merge_hosts([host, host]) == host
    assert elements_of(merge_hosts([host, host, host])) == elements_of(host)
