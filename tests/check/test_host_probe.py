"""Facts of hosts: from trees written here, and from this one."""

import json
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st
from tests.check.fleets import of_family
from tests.limits import HANG_S
from tests.topology.saved_trees import Tree

from ronde.check import (
    PROBES,
    UNLIMITED,
    FactReader,
    Family,
    UnreadableError,
    parse_limit,
    parse_meminfo,
    read_facts,
    run_probes,
)

HOST = tuple(
    check
    for check in of_family(Family.HOST)
    if not {"scheduler", "logged"} & {*check.id.split("-")}
)
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
    reading = FactReader({"root": str(root)})
    read_facts(reading, PROBES["host"].modules)
    return reading


def test_a_machine_that_was_written(tmp_path):
    machine(tmp_path)
    reading = read(tmp_path)
    reported = {name.removeprefix("host."): v for name, v in reading.values.items()}
    expected = {
        "memlock_bytes": UNLIMITED,
        "open_files": 1024,
        "hard_open_files": 1048576,
        "hard_max_processes": 8192,
        "max_processes": 4096,
        # Bit 14 of 0x84000.
        "capabilities": ["ipc_lock"],
        "shm_size_bytes": 0,
        "shm_free_bytes": 0,
        "is_shm_writable": False,
        "cpu_quota": 1.5,
        "num_cpus": 4,
        "memory_bytes": 16_384_000 * 1024,
        "memory_available_bytes": 3_000_000_000,
        "pids_max": 500,
        "pids_left": 20,
        "num_gpus": 0,
        "rdma_devices": [],
    }
    assert {name: reported.get(name) for name in expected} == expected
    assert reported.keys() == expected.keys()
    assert json.loads(json.dumps(reading.values)) == reading.values


def test_all_that_checks_need_is_read(tmp_path):
    machine(tmp_path)
    reading = read(tmp_path)
    known = reading.values.keys() | reading.unreadable.keys()
    assert {fact for check in HOST for fact in check.facts} <= known


def test_this_machine_has_its_own_limits():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    code = (
        "import resource, json; "
        "from ronde.check import PROBES, FactReader, read_facts; "
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, {before[1]})); "
        "reading = FactReader({}); read_facts(reading, PROBES['host'].modules); "
        "print(json.dumps([reading.values, reading.unreadable]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        timeout=HANG_S,
    )
    values, unreadable = json.loads(ended.stdout)
    assert values["host.memlock_bytes"] == 65536
    assert values["host.num_cpus"] == len(os.sched_getaffinity(0))
    room = os.statvfs("/dev/shm")  # noqa: S108
    assert values["host.shm_size_bytes"] == room.f_blocks * room.f_frsize
    assert not unreadable


def test_it_is_a_probe_and_quick():
    outcome = run_probes({"host": PROBES["host"]}, {})["host"]
    assert outcome.failure == ""
    assert outcome.values["host.num_cpus"] >= 1


def test_a_tree_without_anything_is_unreadable_not_bad(tmp_path):
    reading = read(tmp_path)
    assert "host.memlock_bytes" in reading.unreadable
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
    assert "host.num_gpus" in reading.values


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


def test_memory():
    assert parse_meminfo("MemTotal: 4 kB\n") == 4096


def test_capabilities_in_a_user_namespace_lift_nothing(tmp_path):
    machine(tmp_path).write("proc/self/uid_map", "0 1000 1\n")
    assert read(tmp_path).values["host.capabilities"] == []


def test_a_machine_that_does_not_report_its_memory_is_not_without(tmp_path):
    machine(tmp_path).write("proc/meminfo", "")
    reading = read(tmp_path)
    assert "host.memory_available_bytes" not in reading.values
    assert "MemAvailable" in reading.unreadable["host.memory_available_bytes"]


WITHOUT_RIGHTS = """
import ctypes, json, sys
from ronde.check import PROBES, FactReader, read_facts
# Version 3 of the kernel's structure, this process, and three empty sets.
asked, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(asked, none) == 0
reading = FactReader({"root": sys.argv[1]})
read_facts(reading, PROBES["host"].modules)
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
            timeout=HANG_S,
        )
    finally:
        for path in closed:
            path.chmod(0o755)
    values, unreadable = json.loads(ended.stdout)
    assert values["host.is_shm_writable"] is False
    assert not [name for name in unreadable if "shm" in name]
