"""Facts of hosts: from trees written here, and from this one."""

import json

from hypothesis import given, settings, strategies as st
from tests.topology.saved_trees import Tree

from ronde.check import (
    PROBES,
    UNLIMITED,
    FactReader,
    read_facts,
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


def machine(root):
    """Write a machine: 2 NUMA nodes, control groups of version 2."""
    tree = Tree(root).cpus("0-3").node(0, "3").node(1, "c")
    group = "sys/fs/cgroup/job"
    for path, text in {
        "proc/self/limits": LIMITS,
        "proc/self/uid_map": "         0          0 4294967295\n",
        "proc/self/status": "CapEff:\t0000000000084000\nCpus_allowed:\tf\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/meminfo": MEMINFO,
        f"{group}/cpu.max": "150000 100000\n",
        f"{group}/memory.max": "4096000000\n",
        f"{group}/memory.current": "1096000000\n",
        f"{group}/memory.stat": "inactive_file 0\n",
        f"{group}/pids.max": "500\n",
        f"{group}/pids.current": "480\n",
        "sys/fs/cgroup/pids.max": "max\n",
    }.items():
        tree.write(path, text)
    return tree


def read(root):
    reading = FactReader({"root": str(root)})
    read_facts(reading, PROBES["host"].modules)
    return reading


def test_a_saved_machine_is_read(tmp_path):
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


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=300))
def test_nonsense_raises_no_error(tmp_path_factory, nonsense):
    root = tmp_path_factory.mktemp("nonsense")
    machine(root)
    for name in (
        "self/limits",
        "self/uid_map",
        "self/status",
        "self/cgroup",
        "meminfo",
    ):
        (root / "proc" / name).write_bytes(nonsense)
    reading = read(root)
    assert "host.num_gpus" in reading.values


def test_a_user_namespace_has_no_capabilities(tmp_path):
    machine(tmp_path).write("proc/self/uid_map", "0 1000 1\n")
    assert read(tmp_path).values["host.capabilities"] == []


def test_unreported_memory_is_unreadable(tmp_path):
    machine(tmp_path).write("proc/meminfo", "")
    reading = read(tmp_path)
    assert "host.memory_available_bytes" not in reading.values
    assert "MemAvailable" in reading.unreadable["host.memory_available_bytes"]
