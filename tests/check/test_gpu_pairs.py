"""Copies between GPUs of a host; the GPUs are this machine's memory."""

from itertools import combinations
from types import SimpleNamespace

import pytest
from tests.check.programs import run_step

from ronde.check import (
    FAIL,
    WARN,
    Fleet,
    HostFacts,
    HostSet,
    Rounds,
    gpu_pair_speed,
    judge,
    measure_pairs,
)

torch = pytest.importorskip("torch")


QUICK = Rounds(0.0, 0.0)


def make_torch(broken=""):
    """Return torch with small GPUs; a copy to one does not arrive."""

    class Memory(torch.Tensor):
        place = ""

        def copy_(self, other, **given):
            return self if self.place == broken else super().copy_(other, **given)

    def zeros(size, *, dtype, device):
        made = torch.zeros(size >> 12, dtype=dtype).as_subclass(Memory)
        made.place = device
        return made

    cuda = SimpleNamespace(synchronize=lambda _: None, empty_cache=lambda: None)
    return SimpleNamespace(zeros=zeros, uint8=torch.uint8, cuda=cuda)


def test_all_pairs_are_measured_both_ways():
    found = measure_pairs(make_torch(), 3, QUICK)
    assert list(found) == ["0-1", "0-2", "1-2"]
    assert all(rate > 0 for rate in found.values())


def test_changed_data_has_no_rate():
    found = measure_pairs(make_torch(broken="cuda:1"), 3, QUICK)
    assert (found["0-1"], found["1-2"]) == (0, 0)
    assert found["0-2"] > 0


def find(*, nvlinks=True, **changes):
    rates = {f"{a}-{b}": 300.0 for a, b in combinations(range(8), 2)}
    rates |= {f"0-{name[1:]}": rate for name, rate in changes.items()}
    facts = {"gpu.pairs": rates, "gpu.nvlinks": [[nvlinks] * 18] * 8}
    fleet = Fleet((HostFacts("a", facts, {}, {}),), {})
    found = judge(fleet, [gpu_pair_speed]).findings
    return [(each.severity, each.message) for each in found]


def test_equal_pairs_are_no_finding():
    assert find(_1=271.0) == []


def test_slow_pairs_are_named():
    assert find(_1=269.0, _2=100.0) == [
        (FAIL, "GPUs 0-2 (100 GB/s)"),
        (WARN, "GPUs 0-1 (269 GB/s)"),
    ]


def test_without_nvlinks_slow_pairs_are_a_warning():
    assert find(nvlinks=False, _1=220.0) == []
    assert find(nvlinks=False, _1=20.0) == [(WARN, "GPUs 0-1 (20 GB/s)")]


def test_wrong_bytes_are_a_failure():
    assert find(_1=0) == [(FAIL, "GPUs 0-1: the data arrives changed")]


@pytest.mark.parametrize(
    "values",
    [
        {"gpu.count": 1, "versions.torch_build": "CUDA 12.8"},
        {"gpu.count": 8, "versions.torch_build": "CPU"},
        {},
    ],
)
def test_one_host_without_two_gpus_for_torch_has_nothing_to_pair(values):
    hosts = HostSet(None, {"a": ""}, {})
    hosts.facts["a"].values.update(values)
    run_step("GPU pairs", hosts)
    (unread,) = judge(Fleet((hosts.facts["a"],), {}), [gpu_pair_speed]).unread
    assert unread.reason.startswith("torch cannot use two GPUs here; name more")
