"""Copies of a GPU, which uses this machine's memory."""

import os
from types import SimpleNamespace

import pytest
from tests.check.copies_suite import RATES
from tests.check.cuda_fake import PINNING_REFUSED, FakeTorch

from ronde.check import Rounds, address_of, measure_copies, measure_gpu, staying_near

torch = pytest.importorskip("torch")

FIRST, SECOND = (0, 0x1B, 0), (0, 0x1C, 0)
ADDRESS = "0000:1c:00.0"


# Speeds


class Stopwatch:
    """Time passes while copies are waited for, each time as long as was given."""

    def __init__(self, *rounds_s, then_s):
        self.now_s, self._rounds_s, self._then_s = 0.0, list(rounds_s), then_s

    def wait(self):
        self.now_s += self._rounds_s.pop(0) if self._rounds_s else self._then_s

    def clock(self):
        return self.now_s


def measure(stopwatch, warm_up_s=0.0, measured_s=0.0):
    host = torch.arange(1000).to(torch.uint8)
    buffers = [torch.zeros(4000, dtype=torch.uint8) for _ in range(2)]
    rounds = Rounds(warm_up_s, measured_s, stopwatch.clock)
    rates = measure_copies(host, tuple(buffers), stopwatch.wait, rounds)
    return rates, host, buffers


def test_speeds_are_of_the_bytes_that_a_round_copies():
    rates, _, _ = measure(Stopwatch(then_s=1e-6))
    # 8 copies of 1000 bytes in a microsecond; in memory 4000 are read and written.
    assert rates == dict(zip(RATES, (8.0, 8.0, 64.0), strict=True))


def test_rounds_that_warm_up_do_not_count():
    rates, _, _ = measure(Stopwatch(0.5e-6, 0.5e-6, then_s=1e-6), warm_up_s=1e-6)
    assert rates["host_to_device_gb_per_s"] == 8.0


def test_copies_copy_the_data():
    _, host, (source, target) = measure(Stopwatch(then_s=1e-6))
    assert torch.equal(host, torch.arange(1000).to(torch.uint8))
    assert torch.equal(source[:1000], host)
    assert torch.equal(target, source)


# Which GPU


def test_an_address_of_cuda_is_formatted_as_in_sysfs():
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC2, pci_device_id=0)
    assert address_of(properties) == "0001:c2:00.0"
    assert address_of(SimpleNamespace(name="of an older torch")) == ""


def test_a_thread_is_bound_next_to_its_gpu_and_released(tmp_path):
    before = os.sched_getaffinity(0)
    own = tmp_path / "sys/bus/pci/devices" / ADDRESS
    own.mkdir(parents=True)
    (own / "local_cpulist").write_text(f"{max(before)}\n")
    with staying_near(ADDRESS, str(tmp_path)) as is_near:
        assert is_near
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("address", ["", "0000:ff:00.0"])
def test_an_unknown_gpu_is_near_no_cpu(tmp_path, address):
    before = os.sched_getaffinity(0)
    with staying_near(address, str(tmp_path)) as is_near:
        assert not is_near
        assert os.sched_getaffinity(0) == before


# All of it


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"memory_bytes": 1 << 17}, "CUDA out of memory."),
        ({"pins": False}, f"cannot pin host memory: CUDA error {PINNING_REFUSED}"),
    ],
)
def test_a_gpu_that_does_not_copy_is_reported(given, reason):
    fake = FakeTorch(FIRST, SECOND, **given)
    assert measure_gpu(fake, 1)["failure"].endswith(reason)
    assert fake.runtime.pinned == {}
