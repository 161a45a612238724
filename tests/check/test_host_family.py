"""Checks of the limits and the memory of a host."""

import re

import pytest
from hypothesis import given, strategies as st
from tests.check.fleets import of_family
from tests.check.host_values import GIB, make_fleet

from ronde.check import Family, Problem, Severity, all_checks, find_low, judge

FAIL, WARN, INFORM = Severity

RDMA = {"rdma_devices": ["mlx5_0"]}

CHECKS = tuple(
    check
    for check in of_family(Family.HOST)
    if not {"scheduler", "logged"} & {*check.id.split("-")}
)

FAULTS = [
    # Without RDMA a low limit does no harm, but differs from the others.
    ("locked-memory", {"memlock_bytes": 8 << 20}, WARN, "8MiB"),
    ("locked-memory", {"memlock_bytes": 8 << 20, **RDMA}, FAIL, "mlx5_0"),
    ("locked-memory", {"memlock_bytes": (32 << 30) - 1, **RDMA}, FAIL, "32GiB"),
    ("open-files", {"open_files": 255}, FAIL, "255"),
    ("open-files", {"open_files": 20000}, INFORM, "20000"),
    ("open-files", {"open_files": 65536}, WARN, "65536"),
    ("process-limit", {"max_processes": 4095}, WARN, "4095"),
    ("process-limit", {"pids_max": 4000, "pids_left": 3000}, WARN, "4000"),
    ("process-limit", {"pids_max": 40000, "pids_left": 63}, FAIL, "63 more"),
    ("cpu-quota", {"cpu_quota": 0.2}, WARN, "0.2 CPUs at a time, for 1 rank"),
    ("shared-memory", {"shm_size_bytes": 0, "shm_free_bytes": 0}, FAIL, "no /dev/shm"),
    ("shared-memory", {"shm_free_bytes": 64 << 20}, FAIL, "64MiB free of 128GiB"),
    ("shared-memory", {"shm_free_bytes": 8 * GIB - 1}, WARN, "8GiB free of 128GiB"),
    ("shared-memory", {"is_shm_writable": False}, FAIL, "no permission to write"),
    ("memory-left", {"memory_available_bytes": GIB - 1}, WARN, "1GiB"),
    ("memory-left", {"memory_available_bytes": GIB // 4 - 1}, FAIL, "for 1 rank"),
]


def find(fleet):
    return judge(fleet, CHECKS).findings


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_healthy_hosts_have_no_findings(names):
    assert find(make_fleet(*names)) == ()


@pytest.mark.parametrize(("name", "changes", "severity", "words"), FAULTS)
def test_a_fault_is_found_on_its_host_only(name, changes, severity, words):
    (finding,) = find(make_fleet("a", "b", "c", b=changes))
    assert finding.check == name
    assert finding.severity == severity
    assert finding.host == "b"
    assert words in finding.message


def test_each_check_has_a_fault_here():
    assert {check.id for check in CHECKS} == {name for name, *_ in FAULTS}


@pytest.mark.parametrize(
    "changes",
    [
        # RDMA with the capability to lock as much as one likes.
        {"memlock_bytes": 8 << 20, "capabilities": ["ipc_lock"], **RDMA},
        {"memlock_bytes": 32 << 30, **RDMA},
        # A laptop: 8 GiB, half of it for /dev/shm, one NUMA node, not yet loaded.
        {"memory_bytes": 8 * GIB, "shm_size_bytes": 4 * GIB, "shm_free_bytes": 4 * GIB},
        # A container of 4 GiB on a large machine, half of it for /dev/shm.
        {
            "shm_size_bytes": 2 * GIB,
            "shm_free_bytes": 2 * GIB,
            "memory_available_bytes": 4 * GIB,
        },
        {"max_processes": 100, "capabilities": ["sys_resource"]},
        {"cpu_quota": 64.0},
    ],
)
def test_usual_limits_are_no_fault(changes):
    assert find(make_fleet("a", "b", "c", a=changes, b=changes, c=changes)) == ()


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"open_files": 1024}, "ulimit -n 65536  #"),
        # Only root may exceed the hard limit.
        (
            {"open_files": 1024, "hard_open_files": 4096},
            "printf '* - nofile 65536\\nroot - nofile 65536\\n' >>/etc/security/",
        ),
        ({"max_processes": 100}, "ulimit -u 65536  #"),
        ({"max_processes": 100, "hard_max_processes": 100}, "printf '* - nproc 65536"),
    ],
)
def test_the_fix_respects_the_hard_limit(changes, fix):
    (finding,) = find(make_fleet("a", a=changes))
    assert finding.fix.startswith(fix)


def test_in_a_pod_the_fix_is_one_of_kubernetes():
    changes = {"memlock_bytes": 8 << 20, "shm_free_bytes": 64 << 20, **RDMA}
    fleet = make_fleet("a", "b", a=changes, b=changes)
    fleet.hosts[0].values["probe.in_pod"] = True
    fixes = {(f.check, f.host): f.fix for f in find(fleet)}
    assert "LimitMEMLOCK=infinity for containerd" in fixes["locked-memory", "a"]
    assert "docker run --ulimit memlock=-1" in fixes["locked-memory", "b"]
    assert "emptyDir at /dev/shm" in fixes["shared-memory", "a"]
    assert "docker run --shm-size" in fixes["shared-memory", "b"]


def test_a_check_for_a_pod_has_a_fix_that_a_pod_allows():
    """Fixes with docker or root are replaced in a pod, or name its node."""
    for check in all_checks():
        problem = Problem("broken", host="a")
        broken = check._replace(judge=lambda _, found=problem: iter([found]))
        fleet = make_fleet("a")
        fleet.hosts[0].values["probe.in_pod"] = True
        (finding,) = broken.find(fleet)
        assert not re.search("docker run|ulimit|limits.conf", finding.fix), check.id
        if "sudo" in finding.fix:
            assert finding.fix.startswith("On the pod's node: "), check.id


@pytest.mark.parametrize(
    ("names", "num_gpus", "severity"),
    [("a", 8, WARN), ("ab", 8, FAIL), ("ab", 0, WARN)],
)
def test_locked_memory_matters_to_gpus_on_several_hosts(names, num_gpus, severity):
    changes = {"memlock_bytes": 8 << 20, "num_gpus": num_gpus, **RDMA}
    found = find(make_fleet(*names, **dict.fromkeys(names, changes)))
    assert {(f.check, f.severity) for f in found} == {("locked-memory", severity)}


def test_limits_that_differ_a_little_are_equal():
    """As systemd lets it be locked, on three virtual machines of one size."""
    limits = {"a": 4_031_283_200, "b": 4_031_270_912, "c": 4_031_299_584}
    odd = {name: {"memlock_bytes": limit} for name, limit in limits.items()}
    assert find(make_fleet(*limits, **odd)) == ()


def test_more_ranks_need_more():
    settings = {"num_ranks": 8}
    changes = {"cpu_quota": 7.0, "memory_available_bytes": 7 * GIB}
    found = find(make_fleet("a", settings=settings, a=changes))
    assert [(f.check, f.severity) for f in found] == [
        ("cpu-quota", WARN),
        ("memory-left", WARN),
    ]
    (finding,) = find(make_fleet("a", settings=settings, a={"num_cpus": 4}))
    assert finding.message == "4 CPUs may be used, for 8 ranks"


@given(st.integers(3, 9), st.integers(0, 8), st.floats(1.0, 1e9))
def test_only_low_amounts_are_found(count, odd, usual):
    hosts = {f"n{number}": usual for number in range(count)}
    name = f"n{odd % count}"
    assert find_low(hosts | {name: usual / 10}, 0.5).hosts == (name,)
    assert find_low(hosts | {name: usual * 10}, 0.5).hosts == ()
