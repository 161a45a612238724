"""Facts of hosts: from trees written here, and from this one."""

import json
import mmap
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tests.check.fleets import of_family
from tests.topology.saved_trees import Tree

from ronde.check.catalogue import PROBES
from ronde.check.check import Family
from ronde.check.facts import Reading, UnreadableError
from ronde.check.host import kernel, limits, memory
from ronde.check.host.kernel import Ticks, parse_cmdline, parse_stat
from ronde.check.host.limits import UNLIMITED, parse_limit
from ronde.check.host.memory import parse_meminfo
from ronde.check.probing import run_probes

HOST = tuple(check for check in of_family(Family.HOST) if "scheduler" not in check.id)
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             4096                 8192                 processes
Max open files            1024                 1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
MEMINFO = """\
MemTotal:       16384000 kB
MemAvailable:    8000000 kB
SwapTotal:       2097152 kB
SwapFree:        1048576 kB
"""


def stat(pid, name="rank", state="S", ticks=0, started=100):
    """Return a line of ``/proc/PID/stat``; niceness 5, last on a CPU that there is."""
    cpu = min(os.sched_getaffinity(0))
    numbers = f"1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 5 1 0 {started}"
    numbers += f" {'0 ' * 16}{cpu} 0"
    return f"{pid} ({name}) {state} {numbers}\n"


def machine(root):
    """Write a machine: 2 NUMA nodes, control groups of version 2."""
    tree = Tree(root).cpus("0-3").node(0, "3").node(1, "c")
    group = "sys/fs/cgroup/job"
    for path, text in {
        "proc/self/limits": LIMITS,
        "proc/self/uid_map": "         0          0 4294967295\n",
        "proc/self/status": "CapEff:\t0000000000084000\nCpus_allowed:\tf\n",
        "proc/self/stat": stat(7, "a (b) c"),
        "proc/self/cgroup": "0::/job\n",
        "proc/meminfo": MEMINFO,
        "proc/loadavg": "9.00 5.25 1.00 3/400 1234\n",
        "proc/uptime": "1000.0 500.0\n",
        "proc/cpuinfo": "model name: x\nmicrocode : 0xb1\nflags: sse hypervisor\n\n"
        "microcode : 0xff\n",
        "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=UUID=1 quiet iommu=pt\n",
        "proc/sys/kernel/osrelease": "6.8.0-41-generic\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/sys/kernel/hostname": "node1\n",
        "proc/sys/kernel/random/boot_id": "8a7b\n",
        f"{group}/cpu.max": "150000 100000\n",
        f"{group}/memory.max": "4096000000\n",
        f"{group}/memory.current": "1096000000\n",
        f"{group}/memory.stat": "inactive_file 0\n",
        f"{group}/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
        f"{group}/pids.max": "500\n",
        f"{group}/pids.current": "480\n",
        "sys/fs/cgroup/pids.max": "max\n",
        "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpufreq/policy1/scaling_governor": "performance\n",
        "sys/devices/system/cpu/cpufreq/policy2/scaling_governor": "powersave\n",
    }.items():
        tree.write(path, text)
    for kind in ("net", "pid", "mnt"):
        link = root / "proc/self/ns" / kind
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"{kind}:[4026531833]")
    return tree


def read(root):
    reading = Reading({"root": str(root)})
    for part in (kernel, limits, memory):
        part.read(reading)
    return reading


def test_a_machine_that_was_written(tmp_path):
    machine(tmp_path)
    reading = read(tmp_path)
    told = {name.removeprefix("host."): v for name, v in reading.values.items()}
    expected = {
        "memlock_bytes": UNLIMITED,
        "open_files": 1024,
        "max_processes": 4096,
        # Bit 14 of 0x84000.
        "capabilities": ["ipc_lock"],
        "shm_size_bytes": 0,
        "shm_free_bytes": 0,
        "is_shm_writable": False,
        "shm_stale": {"names": [], "count": 0, "bytes": 0},
        "cpu_quota": 1.5,
        "num_cpus": 4,
        "num_cpus_online": 4,
        "memory_bytes": 16_384_000 * 1024,
        "memory_available_bytes": 3_000_000_000,
        "oom_kills": 2,
        "pids_max": 500,
        "pids_left": 20,
        "kernel": "6.8.0-41-generic",
        "cmdline": ["iommu=pt", "quiet"],
        "is_virtual": True,
        "governors": {"powersave": 2, "performance": 1},
        "numa_nodes": 2,
        "numa_balancing": 1,
        "swap_used_bytes": 1 << 30,
        "num_gpus": 0,
        "iommu_translated": [],
        "rdma_devices": [],
        "identity": "8a7b node1 net:[4026531833] pid:[4026531833] mnt:[4026531833]",
        "load_5m": 5.25,
        "busy": [],
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told.keys() == expected.keys()
    assert json.loads(json.dumps(reading.values)) == reading.values


def test_all_that_checks_need_is_read(tmp_path):
    machine(tmp_path)
    reading = read(tmp_path)
    known = reading.values.keys() | reading.unreadable.keys()
    assert {fact for check in HOST for fact in check.facts} <= known


def test_this_machine_has_its_own_limits():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    code = (
        "import resource, json; from ronde.check.facts import Reading; "
        "from ronde.check.host import kernel, limits, memory; "
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, {before[1]})); "
        "reading = Reading({}); kernel.read(reading); limits.read(reading); "
        "memory.read(reading); "
        "print(json.dumps([reading.values, reading.unreadable]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        timeout=60,
    )
    values, unreadable = json.loads(ended.stdout)
    assert values["host.memlock_bytes"] == 65536
    assert values["host.num_cpus"] == len(os.sched_getaffinity(0))
    assert values["host.kernel"] == os.uname().release
    room = os.statvfs("/dev/shm")  # noqa: S108
    assert values["host.shm_size_bytes"] == room.f_blocks * room.f_frsize
    assert not unreadable


def test_it_is_a_probe_and_quick():
    outcome = run_probes({"host": PROBES["host"]}, {})["host"]
    assert outcome.failure == ""
    assert outcome.values["host.num_cpus"] >= 1


def test_a_tree_without_anything_is_unreadable_not_bad(tmp_path):
    reading = read(tmp_path)
    assert reading.unreadable.keys() >= {
        "host.memlock_bytes",
        "host.kernel",
        "host.load_5m",
        "host.identity",
    }
    assert all(reading.unreadable.values())


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=300))
def test_trees_of_nonsense_are_read_to_the_end(tmp_path_factory, nonsense):
    root = tmp_path_factory.mktemp("nonsense")
    machine(root)
    for name in ("limits", "uid_map", "status", "stat", "cgroup"):
        (root / "proc/self" / name).write_bytes(nonsense)
    for name in ("meminfo", "loadavg", "uptime", "cpuinfo", "cmdline"):
        (root / "proc" / name).write_bytes(nonsense)
    reading = read(root)
    assert "host.numa_nodes" in reading.values


@given(st.integers(0, len(LIMITS)))
def test_limits_that_are_cut_off(length):
    try:
        limit = parse_limit(LIMITS[:length], "Max open files")
    except UnreadableError:
        return
    # What is cut within the number is a beginning of it.
    assert str(limit) in ("1", "10", "102", "1024")


def test_limits_of_another_name_are_not_taken():
    with pytest.raises(UnreadableError, match="Max locked memory"):
        parse_limit("Max open files  1024 2048 files", "Max locked memory")


def test_memory_without_swap():
    assert parse_meminfo("MemTotal: 4 kB\n") == (4096, 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("BOOT_IMAGE=/a root=UUID=b ip=10.0.0.1 quiet", ["quiet"]),
        ("x=0f8fad5b-d9cb-469f-a165-70867728950e ro", ["ro"]),
        ("rd.lvm.lv=vg/root nosmt initrd=x", ["nosmt"]),
        ("ifname=eth0:0C:42:a1:00:00:01 hostname=n1 ds=nocloud;h=n1 ro", ["ro"]),
        (
            "boot=52:54:00:12:34:56 netroot=iscsi:10.0.0.1::n1 bus=1b:00.0",
            ["bus=1b:00.0"],
        ),
        ("", []),
    ],
)
def test_what_of_a_command_line_is_each_hosts_own(line, words):
    assert parse_cmdline(line) == words


def test_capabilities_in_a_user_namespace_lift_nothing(tmp_path):
    machine(tmp_path).write("proc/self/uid_map", "0 1000 1\n")
    assert read(tmp_path).values["host.capabilities"] == []


def test_kills_are_counted_of_a_group_of_version_1_but_not_of_the_machine(tmp_path):
    tree = machine(tmp_path).write("proc/self/cgroup", "4:memory:/job\n")
    top = "sys/fs/cgroup/memory"
    tree.write(f"{top}/cgroup.sane_behavior", "0\n")
    tree.write(f"{top}/memory.oom_control", "oom_kill_disable 0\noom_kill 9\n")
    assert read(tmp_path).values["host.oom_kills"] == 0
    tree.write(f"{top}/job/memory.oom_control", "under_oom 0\noom_kill 4\n")
    assert read(tmp_path).values["host.oom_kills"] == 4


def test_a_machine_that_does_not_tell_its_memory_is_not_without(tmp_path):
    machine(tmp_path).write("proc/meminfo", "")
    reading = read(tmp_path)
    assert "host.memory_available_bytes" not in reading.values
    assert "MemAvailable" in reading.unreadable["host.memory_available_bytes"]


WITHOUT_RIGHTS = """
import ctypes, json, sys
from ronde.check.facts import Reading
from ronde.check.host import kernel, limits, memory
# Version 3 of the kernel's structure, this process, and three empty sets.
asked, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(asked, none) == 0
reading = Reading({"root": sys.argv[1]})
for part in (kernel, limits, memory):
    part.read(reading)
print(json.dumps([reading.values, reading.unreadable]))
"""


def test_what_may_not_be_looked_at_breaks_nothing(tmp_path):
    machine(tmp_path)
    memory = tmp_path / "dev/shm"
    memory.mkdir(parents=True)
    closed = {tmp_path / "sys/fs/cgroup/job": 0o000, memory: 0o555}
    for path, mode in closed.items():
        path.chmod(mode)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS, str(tmp_path)],
            capture_output=True,
            check=True,
            timeout=60,
        )
    finally:
        for path in closed:
            path.chmod(0o755)
    values, unreadable = json.loads(ended.stdout)
    assert values["host.is_shm_writable"] is False
    assert values["host.oom_kills"] == 0
    assert not [name for name in unreadable if "shm" in name or "oom" in name]


def test_gpus_and_adapters_behind_an_iommu(tmp_path):
    tree = machine(tmp_path)
    for address, kind in (("0000:1b:00.0", "DMA-FQ"), ("0000:1c:00.0", "identity")):
        place = f"pci0000:1a/{address}"
        tree.device(place).write(f"sys/devices/{place}/iommu_group/type", f"{kind}\n")
        name = f"mlx5_{address[6]}"
        tree.link(f"sys/class/infiniband/{name}", f"sys/devices/{place}/{name}")
    values = read(tmp_path).values
    assert values["host.rdma_devices"] == ["mlx5_b", "mlx5_c"]
    # Without a GPU nobody speaks with an adapter but the CPU.
    assert (values["host.num_gpus"], values["host.iommu_translated"]) == (0, [])
    place = "pci0000:1a/0000:1d:00.0"
    tree.device(place).write(f"sys/devices/{place}/iommu_group/type", "DMA\n")
    tree.write("proc/driver/nvidia/gpus/0000:1d:00.0/information", "Device Minor: 0\n")
    tree.write("dev/nvidia0", "")
    values = read(tmp_path).values
    assert values["host.num_gpus"] == 1
    assert values["host.iommu_translated"] == ["0000:1b:00.0", "0000:1d:00.0"]


def test_files_that_nobody_has_any_more(tmp_path):
    machine(tmp_path)
    folder = tmp_path / "dev/shm"
    folder.mkdir(parents=True)
    for name in ("nccl-Xy12", "torch_77_1_0", "nccl-mapped", "mine", "torch_12_1_0"):
        (folder / name).write_bytes(bytes(4096))
    # Process 12 has these by their names, and holds nothing of them open.
    for name in ("ronde_a", "ronde-mpi-0-12"):
        (folder / name).mkdir()
    used = tmp_path / "proc/12"
    (used / "fd").mkdir(parents=True)
    (used / "fd/3").symlink_to("/dev/shm/ronde_a/ring")  # noqa: S108
    (used / "maps").write_text("7f00-7f01 rw-s 0 00:1b 5 /dev/shm/nccl-mapped\n")
    stale = read(tmp_path).values["host.shm_stale"]
    assert stale["names"] == ["nccl-Xy12", "torch_77_1_0"]
    assert stale["count"] == 2
    assert stale["bytes"] == sum(
        (folder / name).stat().st_blocks * 512 for name in stale["names"]
    )


def test_a_file_in_use_here_is_not_stale():
    path = Path(f"/dev/shm/nccl-test{os.getpid()}")  # noqa: S108
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            reading = Reading({})
            memory.read(reading)
            assert path.name not in reading.values["host.shm_stale"]["names"]
        reading = Reading({})
        memory.read(reading)
        assert path.name in reading.values["host.shm_stale"]["names"]
    finally:
        path.unlink()


def test_who_is_busy(tmp_path):
    tree = machine(tmp_path)
    begun_s = time.monotonic()
    tree.write("proc/8/stat", stat(8, "bu) sy", "R"))
    tree.write("proc/7/stat", stat(7, "idle"))
    # Started when the machine had been up for 995 of its 1000 s.
    tree.write("proc/10/stat", stat(10, "young", "R", started=99_500))
    tree.write("proc/11/stat", stat(11, "another before"))
    first = kernel.read_ticks(f"{tmp_path}/proc")
    tree.write("proc/8/stat", stat(8, "bu) sy", "R", 1000))
    tree.write("proc/10/stat", stat(10, "young", "R", 1000, 99_500))
    tree.write("proc/11/stat", stat(11, "another now", "R", 1000, 101))
    (busy,) = kernel.find_busy(f"{tmp_path}/proc", first, begun_s)
    assert (busy["pid"], busy["name"]) == (8, "bu) sy")
    assert busy["cpus"] > 0


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=15))
def test_any_name_of_a_process(name):
    assert parse_stat(stat(7, name, "D", 5, 9)) == Ticks(name, 5, 9)
