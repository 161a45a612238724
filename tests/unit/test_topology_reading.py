"""Small trees of /proc, /sys and /dev, each odd in one way; and this machine."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from tests.limits import HANG_S
from tests.topology.saved_trees import Tree

from ronde.topology import (
    UNKNOWN_NODE,
    Core,
    format_list,
    members,
    parse_list,
    parse_mask,
    read_cpu_limit,
    read_machine,
)

CPUS = st.sets(st.integers(0, 1100), max_size=40)


class CoreTree(Tree):
    """A root directory with cores of several threads."""

    def with_cores(self, cores: list[list[int]], *, online: str = "") -> "CoreTree":
        for threads in cores:
            mask = f"{sum(1 << cpu for cpu in threads):x}\n"
            for cpu in threads:
                topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
                self.write(f"{topology}/thread_siblings", mask)
        if online:
            self.write("sys/devices/system/cpu/online", online)
        return self

    def cores(self) -> list[tuple[int, ...]]:
        return [core.cpus for core in read_machine(self.root).cores]


@pytest.fixture
def tree(tmp_path):
    return CoreTree(tmp_path)


@given(CPUS)
def test_a_list_of_cpus_is_read_as_it_was_written(cpus):
    assert set(members(parse_list(format_list(cpus)))) == cpus


@given(CPUS)
def test_a_mask_is_read_as_the_kernel_groups_it(cpus):
    digits = f"{sum(1 << cpu for cpu in cpus):x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    grouped = ",".join(digits[n : n + 8] for n in range(0, len(digits), 8))
    assert members(parse_mask(grouped)) == sorted(cpus)


def test_runs_of_cpus_are_written_short():
    assert format_list([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11"
    assert format_list([]) == ""


def test_nothing_readable_is_no_error(tree):
    machine = read_machine(tree.root / "absent")
    assert (machine.cores, machine.gpus, machine.mbit_per_s) == ((), (), {})
    assert machine.cpu_limit == 0.0


def test_threads_of_a_core_stay_together_and_offline_ones_go(tree):
    tree.with_cores([[0, 4], [1, 5], [2, 6], [3, 7]], online="1-5,7\n")
    assert tree.cores() == [(1, 5), (2,), (3, 7), (4,)]


def test_the_affinity_mask_and_the_cpuset_both_count(tree):
    tree.with_cores([[cpu] for cpu in range(8)], online="0-7")
    tree.write("proc/self/status", "Name:\tx\nCpus_allowed:\t3f\n")
    tree.write("proc/self/cgroup", "0::/a/b\n")
    tree.write("sys/fs/cgroup/a/cpuset.cpus.effective", "2-7\n")
    assert tree.cores() == [(2,), (3,), (4,), (5,)]
    tree.write("sys/fs/cgroup/a/b/cpuset.cpus.effective", "3\n")
    assert tree.cores() == [(3,)]


def test_a_cpuset_of_version_1_counts(tree):
    tree.with_cores([[cpu] for cpu in range(8)], online="0-7")
    tree.write("proc/self/cgroup", "3:memory:/x\n2:cpuset:/job\n0::/\n")
    tree.write("sys/fs/cgroup/cpuset/job/cpuset.cpus", "0-6\n")
    tree.write("sys/fs/cgroup/cpuset/job/cpuset.effective_cpus", "6\n")
    assert tree.cores() == [(6,)]


def test_a_cpuset_that_leaves_nothing_is_not_believed(tree):
    tree.with_cores([[cpu] for cpu in range(2)], online="0-1")
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("sys/fs/cgroup/cpuset.cpus.effective", "64-127\n")
    assert tree.cores() == [(0,), (1,)]


def test_a_group_outside_of_what_is_mounted_ends_at_the_top(tree):
    tree.write("proc/self/cgroup", "0::/../../elsewhere\n")
    tree.write("sys/fs/cgroup/cpu.max", "300000 100000\n")
    tree.write("sys/elsewhere/cpu.max", "100000 100000\n")
    assert read_cpu_limit(str(tree.root)) == 3.0


@pytest.mark.parametrize(
    ("top", "memberships"),
    [
        ("sys/fs/cgroup", "0::/outer/inner\n"),
        ("sys/fs/cgroup/unified", "1:name=systemd:/\n0::/outer/inner\n"),
    ],
)
def test_the_tightest_quota_of_all_groups_counts(tree, top, memberships):
    root = str(tree.root)
    tree.write("proc/self/cgroup", memberships)
    tree.write(f"{top}/outer/inner/cpu.max", "max 100000\n")
    assert read_cpu_limit(root) == 0.0
    tree.write(f"{top}/outer/cpu.max", "150000 100000\n")
    assert read_cpu_limit(root) == 1.5
    tree.write(f"{top}/outer/inner/cpu.max", "900000 100000\n")
    assert read_cpu_limit(root) == 1.5


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_version_1_counts(tree, mounted):
    group = f"sys/fs/cgroup/{mounted}/job"
    tree.write("proc/self/cgroup", "3:cpu,cpuacct:/job\n0::/outer\n")
    tree.write(f"{group}/cpu.cfs_period_us", "100000\n")
    tree.write(f"{group}/cpu.cfs_quota_us", "50000\n")
    assert read_cpu_limit(str(tree.root)) == 0.5
    tree.write(f"{group}/cpu.cfs_quota_us", "-1\n")
    assert read_cpu_limit(str(tree.root)) == 0.0


def test_a_node_without_cpus_places_no_core(tree):
    tree.with_cores([[0], [1]], online="0-1")
    tree.write("sys/devices/system/node/node250/cpumap", "0000\n")
    tree.write("sys/devices/system/node/node8/cpumap", "00000002\n")
    tree.write("sys/devices/system/node/nodes", "3")
    assert read_machine(tree.root).cores == (Core((0,), UNKNOWN_NODE), Core((1,), 8))


def nvidia(tree, address, minor, *, uuid="GPU-????????", bus="pci0000:00/0000:00:01.0"):
    tree.link(f"sys/bus/pci/devices/{address}", f"sys/devices/{bus}/{address}")
    tree.write(
        f"proc/driver/nvidia/gpus/{address}/information",
        f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t {uuid}\n"
        f"Device Minor: \t {minor}\n",
    )
    return tree.write(f"dev/nvidia{minor}")


def test_gpus_come_by_bus_address_with_what_the_driver_tells(tree):
    nvidia(tree, "0000:9b:00.0", 0, uuid="GPU-ab-1")
    nvidia(tree, "0000:1b:00.0", 1)
    nvidia(tree, "10000:01:00.0", 2)
    first, second, third = read_machine(tree.root).gpus
    assert [first.bus_id, second.bus_id] == ["0000:1b:00.0", "0000:9b:00.0"]
    assert third.bus_id == "10000:01:00.0"
    assert (first.visible_as, first.uuid) == ("0", "")
    assert (second.name, second.uuid) == ("NVIDIA H100 80GB HBM3", "GPU-ab-1")


def test_a_device_that_knows_no_node_has_that_of_the_nearest_bridge(tree):
    nvidia(tree, "0000:1b:00.0", 0)
    nvidia(tree, "0000:2b:00.0", 1, bus="pci0000:20/0000:20:01.0")
    own = "sys/devices/pci0000:00/0000:00:01.0"
    tree.write(f"{own}/0000:1b:00.0/numa_node", "-1\n").write(f"{own}/numa_node", "3\n")
    tree.write("sys/devices/pci0000:20/0000:20:01.0/numa_node", "-1\n")
    assert [gpu.node for gpu in read_machine(tree.root).gpus] == [3, UNKNOWN_NODE]


def test_the_visible_devices_choose_and_order(tree):
    for n in range(4):
        nvidia(tree, f"0000:{n}b:00.0", n, uuid=f"GPU-{n}a-x")

    def visible(text):
        gpus = read_machine(tree.root, {"CUDA_VISIBLE_DEVICES": text}).gpus
        return [(gpu.bus_id[5:7], gpu.visible_as) for gpu in gpus]

    assert visible("2, 0") == [("2b", "2"), ("0b", "0")]
    assert visible("GPU-1a,3") == [("1b", "GPU-1a"), ("3b", "3")]
    assert visible("MIG-a,MIG-b") == [("", "MIG-a"), ("", "MIG-b")]
    assert visible("") == []
    assert visible("-1") == []
    assert visible("1,9,2") == [("1b", "1")], "CUDA stops at what is not there"
    assert visible("1,1") == [("1b", "1")]


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 1), ("0,2", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-ab,MIG-cd", 2)],
)
def test_a_list_is_believed_where_no_gpu_can_be_seen(tree, text, count):
    gpus = read_machine(tree.root, {"CUDA_VISIBLE_DEVICES": text}).gpus
    assert len(gpus) == count


def test_device_files_count_where_the_driver_tells_nothing(tree):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "xnvidia1"):
        tree.write(f"dev/{name}")
    assert [gpu.visible_as for gpu in read_machine(tree.root).gpus] == ["0", "1"]


def rendering(tree, number, address, vendor, device_class):
    path = f"devices/pci0000:c0/{address}"
    tree.link(f"sys/class/drm/renderD{number}", f"sys/{path}/drm/renderD{number}")
    tree.write(f"sys/{path}/vendor", vendor).write(f"sys/{path}/class", device_class)
    return tree.write(f"dev/dri/renderD{number}")


def test_amds_gpus_are_hidden_by_one_variable_on_top_of_the_other(tree):
    for n in range(4):
        rendering(tree, 128 + n, f"0000:c{n}:00.0", "0x1002", "0x120000")
    rendering(tree, 140, "0000:00:02.0", "0x8086", "0x030000")

    def visible(**environ):
        gpus = read_machine(tree.root, environ).gpus
        return [(gpu.bus_id[5:7], gpu.visible_as) for gpu in gpus]

    assert visible() == [(f"c{n}", f"{n}") for n in range(4)]
    assert visible(ROCR_VISIBLE_DEVICES="2,3") == [("c2", "0"), ("c3", "1")]
    both = visible(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1")
    assert both == [("c3", "1")]
    assert visible(CUDA_VISIBLE_DEVICES="1") == [("c1", "1")]


def test_a_gpu_inside_the_processor_is_none_to_train_on(tree):
    rendering(tree, 128, "0000:00:02.0", "0x8086", "0x030000")
    rendering(tree, 129, "0000:c1:00.0", "0x1a03", "0x030000")
    assert read_machine(tree.root).gpus == ()
    rendering(tree, 130, "0000:c2:00.0", "0x8086", "0x038000")
    (gpu,) = read_machine(tree.root).gpus
    assert (gpu.maker, gpu.bus_id) == ("intel", "0000:c2:00.0")


def interface(tree, name, path, **files):
    tree.link(f"sys/class/net/{name}", f"sys/devices/{path}/net/{name}")
    for file, text in ({"carrier": "1", "type": "1"} | files).items():
        tree.write(f"sys/class/net/{name}/{file}", text)


def test_interfaces_are_those_with_a_carrier(tree):
    interface(tree, "eth0", "pci0000:00/0000:00:03.0/virtio2", speed="-1\n")
    interface(tree, "eth1", "pci0000:00/0000:00:04.0", carrier="0")
    interface(tree, "lo", "virtual", type="772")
    interface(tree, "veth0", "virtual", speed="10000\n")
    assert read_machine(tree.root).mbit_per_s == {"eth0": 0, "veth0": 10000}


def test_this_machine_has_the_cores_that_may_be_used():
    cpus = {cpu for core in read_machine().cores for cpu in core.cpus}
    assert cpus == os.sched_getaffinity(0)


def test_who_is_bound_sees_the_rest_of_the_machine_no_more():
    highest = max(os.sched_getaffinity(0))
    code = (
        "import os\nfrom ronde.topology import read_machine\n"
        f"os.sched_setaffinity(0, [{highest}])\n"
        "print(*[core.cpus for core in read_machine().cores])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout == f"({highest},)\n"
