"""Machines of other people, as their kernels showed them; and small odd ones."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tests.topology.saved_trees import NAMES, Tree, unpack

from ronde.topology import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    read_host,
    read_machine,
)

GPU, NIC, BRIDGE, SWITCH = "0x030200", "0x020000", "0x060400", "0x068000"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {name: unpack(name, tmp_path_factory.mktemp("tree")) for name in NAMES}


@pytest.fixture(scope="module")
def saved(roots):
    hosts = {name: read_host(root) for name, root in roots.items()}
    return hosts.__getitem__


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def by_node(host, field):
    return {node.number: getattr(node, field) for node in host.numa_nodes}


def check_sane(host: HostTopology) -> None:
    numbers = [node.number for node in host.numa_nodes]
    assert numbers == sorted(set(numbers))
    cpus = [cpu for node in host.numa_nodes for cpu in node.cpus]
    assert len(cpus) == len(set(cpus))
    for node in host.numa_nodes:
        assert sorted(cpu for core in node.cores for cpu in core) == list(node.cpus)
    above = {""}
    for device in host.devices:
        assert device.parent in above
        assert device.node in {UNKNOWN, *numbers}
        above.add(device.bus_id)
    assert len(above) == len(host.devices) + 1
    assert {each.bus_id for each in (*host.gpus, *host.ports)} <= above
    names = [each.name for each in (*host.gpus, *host.ports)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_machine_is_a_sane_graph(name, saved):
    check_sane(saved(name))


# Numbers of nodes, CPUs and cores of each that has CPUs, and memory of the last in kB,
# all as the files of each tree have them.
@pytest.mark.parametrize(
    ("name", "numbers", "cpus", "cores", "last_kb"),
    [
        ("128arm-2pa2n8cluster4co", (0, 1, 2, 3), 32, 32, 131062408),
        ("256ppc-8n8s4t", (0, 1, 4, 5, 8, 9, 12, 13), 32, 8, 56885248),
        ("32em64t-2n8c+dax+nvme+mic+dimms", (0, 1), 8, 8, 16777216),
        ("40intel64-4n10c+pci-conflicts", (0, 1, 2, 3), 10, 10, 134217728),
        ("48amd64-4pa2n6c-sparse", (0, 1, 2, 33, 34, 45, 72, 73), 6, 6, 16777216),
        ("nvidiagpunumanodes", (0, 8, *range(250, 256)), 16, 4, 15728640),
    ],
)
def test_nodes_have_cpus_cores_and_memory(name, numbers, cpus, cores, last_kb, saved):
    host = saved(name)
    assert tuple(by_node(host, "cpus")) == numbers
    with_cpus = [node for node in host.numa_nodes if node.cpus]
    assert {len(node.cpus) for node in with_cpus} == {cpus}
    assert {len(node.cores) for node in with_cpus} == {cores}
    assert host.numa_nodes[-1].memory_bytes == last_kb * 1024
    assert host.remarks == ()


def test_a_node_that_is_offline_leaves_its_cpus_without_one(saved):
    host = saved("offline-cpu0-node0")
    assert by_node(host, "cpus") == {
        UNKNOWN: (4, 6, 8, 10, 12, 14, 16, 18, 20),
        1: (5, 7, 9, 11, 13, 15, 17, 19),
    }
    (remark,) = host.remarks
    assert remark.startswith("CPUs 4,6,8,10,12,14,16,18,20 are online")


@pytest.mark.parametrize(
    ("name", "by_node", "threads"),
    [
        ("128arm-2pa2n8cluster4co", dict.fromkeys(range(4), 32), 1),
        ("256ppc-8n8s4t", dict.fromkeys((0, 1, 4, 5, 8, 9, 12, 13), 8), 4),
        # Node 0 went with CPU 0; the kernel knows the node of odd CPUs alone.
        ("offline-cpu0-node0", {-1: 9, 1: 8}, 1),
        # 32 CPUs are online, and the cpuset leaves those of the first node.
        ("nvidiagpunumanodes", {0: 4}, 4),
    ],
)
def test_cores_are_counted_by_memory_node(name, by_node, threads, roots):
    machine = read_machine(roots[name])
    assert Counter(core.node for core in machine.cores) == by_node
    assert {len(core.cpus) for core in machine.cores} == {threads}


def test_gpus_are_those_with_files_that_may_be_opened(tmp_path):
    tree = unpack("nvidiagpunumanodes", tmp_path)
    assert read_machine(tree).gpus == ()
    (tree / "dev").mkdir()
    for minor in (0, 1, 2, 5):
        (tree / "dev" / f"nvidia{minor}").touch()
    gpus = read_machine(tree).gpus
    addresses = ["0004:05:00.0", "0004:06:00.0", "0006:00:00.0", "0035:05:00.0"]
    assert [gpu.bus_id for gpu in gpus] == addresses
    assert [gpu.visible_as for gpu in gpus] == ["0", "1", "2", "3"]


# The family is 15 and 16 times the extended one: 16 of the kernel is 15 + 1.
@pytest.mark.parametrize(
    ("name", "processor"),
    [
        ("128arm-2pa2n8cluster4co", ("arm64", "", -1, -1)),
        ("256ppc-8n8s4t", ("ppc64", "", -1, -1)),
        ("40intel64-4n10c+pci-conflicts", ("x86_64", "GenuineIntel", 6, 47)),
        ("48amd64-4pa2n6c-sparse", ("x86_64", "AuthenticAMD", 31, 9)),
    ],
)
def test_processors_are_reported(name, processor, saved):
    nodes = saved(name).numa_nodes
    assert {(n.arch, n.vendor, n.family, n.model) for n in nodes} == {processor}


@pytest.mark.parametrize(
    ("kernel", "nccl"), [("6", 6), ("15", 15), ("23", 143), ("25", 175), ("x", -1)]
)
def test_the_family_is_counted_as_nccl_does(kernel, nccl, tree):
    info = f"vendor_id\t:   Shanghai  \ncpu family\t: {kernel}\nmodel\t\t: 1\n\n"
    tree.cpus("0").write("proc/cpuinfo", "processor\t: 0\n" + info)
    (node,) = read_host(tree.root).numa_nodes
    assert (node.vendor, node.family) == ("  Shanghai  ", nccl)


def test_network_adapters_and_what_is_not_hardware(saved):
    host = saved("32em64t-2n8c+dax+nvme+mic+dimms")
    assert host.ports == (
        NetPort(
            title="mlx4_0",
            bus_id="0000:82:00.0",
            kind="infiniband",
            mbit_per_s=56000,
            port=1,
            state="4X FDR",
        ),
        NetPort("eth0", "0000:02:00.0", kind="ethernet", mbit_per_s=1000),
        NetPort("eth1", "0000:02:00.3", kind="ethernet", is_up=False),
    )
    devices = {each.bus_id: each for each in host.devices}
    assert {name: each.node for name, each in devices.items()} == {
        "0000:02:00.0": 0,
        "0000:02:00.3": 0,
        "0000:82:00.0": 1,
    }
    adapter = devices["0000:82:00.0"]
    assert (adapter.class_code, adapter.vendor) == (0x028000, 0x15B3)
    assert (adapter.device, adapter.subsystem_device) == (0x1003, 0x59)
    # Neither the controller of its screen nor its coprocessor is a GPU.
    assert host.gpus == ()


def test_gpus_of_which_only_class_and_cpus_are_reported(saved):
    host = saved("nvidiagpunumanodes")
    nodes = {each.bus_id: each.node for each in host.devices}
    assert nodes == {
        "0004:05:00.0": 0,
        "0004:06:00.0": 0,
        "0006:00:00.0": 0,
        "0007:00:00.0": 8,
        "0035:04:00.0": 8,
        "0035:05:00.0": 8,
    }
    assert [(gpu.bus_id, gpu.number) for gpu in host.gpus] == [
        (bus_id, number) for number, bus_id in enumerate(nodes)
    ]


def test_this_machine_is_sane():
    host = read_host()
    check_sane(host)
    assert sum(len(node.cpus) for node in host.numa_nodes) > 0
    assert host.sources == ("sysfs of this machine",)


def test_without_nodes_all_is_one(tree):
    tree.cpus("0-3").write("proc/meminfo", "MemTotal: 64 kB\n")
    (node,) = read_host(tree.root).numa_nodes
    assert (node.number, node.cpus) == (0, (0, 1, 2, 3))
    assert node.memory_bytes == 65536


def with_switch(tree: Tree) -> Tree:
    """Write a GPU and an adapter below one switch: a port of the processor above it."""
    root = "pci0000:15/0000:15:01.0"
    up = f"{root}/0000:16:00.0"
    gen5 = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
    now = {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": "8"}
    tree.cpus("0-3").node(0, "3").node(1, "c")
    tree.device(root, _class=BRIDGE, vendor="0x8086", numa_node="1", **gen5)
    tree.device(up, _class=BRIDGE, vendor="0x1000", numa_node="-1", **gen5, **now)
    tree.device(f"{up}/0000:17:00.0", _class=BRIDGE, vendor="0x1000", **gen5)
    tree.device(
        f"{up}/0000:17:01.0",
        _class=BRIDGE,
        max_link_speed="16.0 GT/s PCIe",
        max_link_width="16",
    )
    tree.device(f"{up}/0000:17:00.0/0000:18:00.0", _class=GPU, vendor="0x10de", **gen5)
    tree.device(
        f"{up}/0000:17:01.0/0000:29:00.0",
        _class=NIC,
        vendor="0x15b3",
        max_link_speed="32.0 GT/s PCIe",
        max_link_width="8",
        current_link_speed="Unknown",
        current_link_width="0",
    )
    return tree.device("pci0000:00/0000:00:1f.0", _class="0x060100", vendor="0x8086")


def test_a_switch_is_one_device_and_links_are_as_weak_as_their_weaker_end(tree):
    host = read_host(with_switch(tree).root)
    check_sane(host)
    assert [
        (each.bus_id, each.parent, each.node, each.speed, each.width)
        for each in host.devices
    ] == [
        ("0000:16:00.0", "", 1, "32.0 GT/s PCIe", 16),
        ("0000:18:00.0", "0000:16:00.0", 1, "32.0 GT/s PCIe", 16),
        ("0000:29:00.0", "0000:16:00.0", 1, "16.0 GT/s PCIe", 8),
    ]
    now = [(each.speed_now, each.width_now) for each in host.devices]
    assert now == [("16.0 GT/s PCIe", 8), ("", UNKNOWN), ("", 0)]
    assert host.gpus == (GpuDevice("0000:18:00.0", 0),)


def test_what_the_driver_reports_of_a_gpu(tree):
    with_switch(tree).device("pci0000:15/0000:15:02.0", _class=GPU, vendor="0x10de")
    tree.write(
        "proc/driver/nvidia/gpus/0000:18:00.0/information",
        "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-1\nDevice Minor: \t 0\n",
    )
    # The one that the driver does not show is not this container's.
    assert read_host(tree.root).gpus == (
        GpuDevice("0000:18:00.0", 0, sm=90, title="NVIDIA H100", uuid="GPU-1"),
    )


def test_a_bus_behind_a_controller_of_volumes_begins_anew(tree):
    place = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0/10000:e1:00.0"
    tree.cpus("0").node(0, "1").device(
        place, _class=NIC, vendor="0x15b3", numa_node="0"
    )
    (device,) = read_host(tree.root).devices
    assert (device.bus_id, device.parent) == ("10000:e1:00.0", "")


def test_nvswitches_are_listed_and_other_bridges_of_their_class_are_not(tree):
    tree.cpus("0").device("pci0000:00/0000:00:01.0", _class=SWITCH, vendor="0x10de")
    tree.device("pci0000:00/0000:00:02.0", _class=SWITCH, vendor="0x8086")
    assert [each.bus_id for each in read_host(tree.root).devices] == ["0000:00:01.0"]


def with_adapter(tree: Tree) -> Tree:
    own = "pci0000:00/0000:00:01.0/0000:01:00.0"
    adapter = f"sys/devices/{own}/infiniband/mlx5_0"
    tree.cpus("0").device(own, _class="0x020700", vendor="0x15b3")
    tree.link("sys/class/infiniband/mlx5_0", adapter)
    tree.link("sys/class/net/ib0", f"sys/devices/{own}/net/ib0")
    for port, state in (("1", "1: DOWN"), ("2", "4: ACTIVE")):
        tree.write(f"{adapter}/ports/{port}/state", f"{state}\n")
        tree.write(f"{adapter}/ports/{port}/rate", "400 Gb/sec (4X NDR)\n")
        tree.write(f"{adapter}/ports/{port}/link_layer", "Ethernet\n")
    return tree


def test_an_adapter_may_have_several_ports(tree):
    rdma = NetPort(
        "mlx5_0",
        "0000:01:00.0",
        kind="ethernet",
        mbit_per_s=400_000,
        port=1,
        is_up=False,
        state="DOWN",
    )
    second = rdma._replace(title="mlx5_0:2", port=2, is_up=True, state="4X NDR")
    assert read_host(with_adapter(tree).root).ports == (rdma, second)


@pytest.mark.parametrize("is_up", [True, False])
def test_a_virtual_function_is_listed_where_it_is_in_use(is_up, tree):
    own = "pci0000:00/0000:00:01.0/0000:01:00.1"
    with_adapter(tree).device(own, _class="0x020000", vendor="0x15b3")
    tree.link(f"sys/devices/{own}/physfn", "sys/devices/pf")
    tree.write("sys/devices/pf/class", "0x020700")
    tree.link("sys/class/net/eth7", f"sys/devices/{own}/net/eth7")
    tree.write(f"sys/devices/{own}/net/eth7/carrier", f"{is_up:d}\n")
    host = read_host(tree.root)
    assert ("eth7" in {port.title for port in host.ports}) == is_up
    assert (host.devices[-1].bus_id == "0000:01:00.1") == is_up


def test_interfaces_of_software_are_left_out_and_paravirtual_ones_are_not(tree):
    tree.cpus("0")
    for name in ("lo", "bond0", "br0", "veth1"):
        tree.link(f"sys/class/net/{name}", f"sys/devices/virtual/net/{name}")
    tree.link("sys/class/net/eth0", "sys/devices/vif-0/net/eth0")
    tree.write("sys/devices/vif-0/net/eth0/carrier", "1\n")
    tree.write("sys/devices/vif-0/net/eth0/speed", "-1\n")
    assert read_host(tree.root).ports == (NetPort("eth0"),)


def test_a_tree_may_be_copied_without_links(tree):
    tree.cpus("0").write("sys/class/net/lo/carrier", "1\n")
    tree.write("sys/class/net/eth0/carrier", "1\n")
    tree.write("sys/class/net/eth0/device/class", f"{NIC}\n")
    tree.write("sys/bus/pci/devices/0000:01:00.0/class", f"{GPU}\n")
    tree.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    host = read_host(tree.root)
    assert host.ports == (NetPort("eth0"),)
    assert [each.bus_id for each in host.devices] == ["0000:01:00.0"]
    assert host.gpus == (GpuDevice("0000:01:00.0", 0),)


def test_links_between_gpus_of_amd(tree):
    tree.cpus("0")
    nodes = "sys/class/kfd/kfd/topology/nodes"
    tree.write(f"{nodes}/0/gpu_id", "0\n")
    for number, bus in ((1, "c1"), (2, "c6")):
        tree.device(f"pci0000:c0/0000:{bus}:00.0", _class="0x120000", vendor="0x1002")
        tree.write(f"{nodes}/{number}/gpu_id", "51234\n")
        tree.write(
            f"{nodes}/{number}/properties",
            "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n"
            f"domain 0\nlocation_id {int(bus, 16) << 8}\n",
        )
        link = f"node_from {number}\nnode_to {3 - number}\ntype 11\n"
        link += "min_bandwidth 50000\nmax_bandwidth 200000\n"
        tree.write(f"{nodes}/{number}/io_links/0/properties", link)
        to_cpu = f"type 2\nnode_from {number}\nnode_to 0\n"
        tree.write(f"{nodes}/{number}/io_links/1/properties", to_cpu)
    host = read_host(tree.root)
    one, other = "0000:c1:00.0", "0000:c6:00.0"
    assert host.gpus == (
        GpuDevice(one, 0, sm=304, gcn="942"),
        GpuDevice(other, 1, sm=304, gcn="942"),
    )
    assert host.links == (
        Link(LinkKind.XGMI, one, other, 4),
        Link(LinkKind.XGMI, other, one, 4),
    )


FILES = (
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/cpu0/topology/thread_siblings",
    "sys/devices/system/node/online",
    "sys/devices/system/node/possible",
    "sys/devices/system/node/node0/cpumap",
    "sys/devices/system/node/node0/distance",
    "sys/devices/system/node/node0/meminfo",
    "sys/bus/pci/devices/0000:01:00.0/class",
    "sys/bus/pci/devices/0000:01:00.0/numa_node",
    "sys/bus/pci/devices/0000:01:00.0/local_cpus",
    "sys/bus/pci/devices/0000:01:00.0/max_link_speed",
    "sys/bus/pci/devices/0000:01:00.0/max_link_width",
    "sys/bus/pci/devices/nonsense/class",
    "sys/class/infiniband/mlx5_0/ports/1/rate",
    "sys/class/infiniband/mlx5_0/ports/one/rate",
    "sys/class/net/eth0/speed",
    "sys/class/kfd/kfd/topology/nodes/1/gpu_id",
    "sys/class/kfd/kfd/topology/nodes/1/properties",
    "proc/cpuinfo",
    "proc/driver/nvidia/gpus/nonsense/information",
)
ODD = st.one_of(
    st.sampled_from(
        ["", "\0", "-1", "-ff", "0-99999999999", "5-3", "0-", "inf Gb/sec", "1e999"]
    ),
    st.sampled_from(["0x030200", "9" * 5000, "location_id -5", "²", "0,,1", "N/A"]),
    st.text(max_size=30),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(ODD, min_size=len(FILES), max_size=len(FILES)))
def test_whatever_files_hold_it_is_no_error(texts):
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(Path(directory))
        for path, text in zip(FILES, texts, strict=True):
            (tree.root / path).parent.mkdir(parents=True, exist_ok=True)
            (tree.root / path).write_bytes(text.encode(errors="replace"))
        check_sane(read_host(tree.root))
