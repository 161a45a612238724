import os

import pytest

from ronde.launch.slots import count_cores, count_gpus, cpu_quota


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("0,2", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-ab,MIG-cd", 2)],
)
def test_the_visible_gpus_count(visible, count, tmp_path):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count


def test_the_device_files_count_when_nothing_is_said(tmp_path):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "xnvidia1"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2


def test_cores_are_no_more_than_may_be_used():
    assert 1 <= count_cores() <= len(os.sched_getaffinity(0))


def test_the_tightest_quota_of_all_groups_counts(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, "0::/outer/inner\n") is None
    (tmp_path / "outer" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, "0::/outer/inner\n") == 1.5
    old = tmp_path / "cpu" / "job"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("50000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path, "3:cpu,cpuacct:/job\n0::/outer\n") == 0.5
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path, "3:cpu,cpuacct:/job\n") is None
