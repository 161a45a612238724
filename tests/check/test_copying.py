"""What a GPU copies, and its link meanwhile; the GPU is this machine's memory."""

import os
from types import SimpleNamespace

import pynvml
import pytest
from tests.check.copies_suite import RATES, check_copies, check_link
from tests.check.cuda_fake import PINNING_REFUSED, FakeTorch
from tests.check.nvml_fake import SavedNvml, healthy, refusal
from tests.check.nvml_library import FakeLibrary

from ronde.check.facts import UnreadableError
from ronde.check.gpu import copies as copying
from ronde.check.gpu.copies import (
    address_of,
    find_gpu,
    measure_copies,
    measure_gpu,
    staying_near,
    watch,
)

torch = pytest.importorskip("torch")

NOT_SUPPORTED, LOST, DRIVER_NOT_LOADED = 3, 15, 9
FIRST, SECOND = (0, 0x1B, 0), (0, 0x1C, 0)
ADDRESS = "0000:1c:00.0"
SLOW_LINK = {"width": 8, "max_width": 16, "generation": 4, "max_generation": 5}


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(copying, "HOST_BYTES", 1 << 16)
    monkeypatch.setattr(copying, "DEVICE_BYTES", 1 << 18)
    monkeypatch.setattr(copying, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(copying, "_ROUNDS_S", 0.0)


@pytest.fixture
def open_library(monkeypatch):
    def open_it(record, **given):
        monkeypatch.setattr(pynvml, "nvmlLib", FakeLibrary(record, **given))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return open_it


# Speeds


class Stopwatch:
    """Time passes while copies are waited for, each time as long as it is told."""

    def __init__(self, *rounds_s, then_s):
        self.now_s, self._rounds_s, self._then_s = 0.0, list(rounds_s), then_s

    def wait(self):
        self.now_s += self._rounds_s.pop(0) if self._rounds_s else self._then_s

    def clock(self):
        return self.now_s


def measure(stopwatch, host_bytes=1000, device_bytes=4000):
    host = torch.arange(host_bytes).to(torch.uint8)
    buffers = [torch.zeros(device_bytes, dtype=torch.uint8) for _ in range(2)]
    rates = measure_copies(host, tuple(buffers), stopwatch.wait, stopwatch.clock)
    return rates, host, buffers


def test_speeds_are_of_the_bytes_that_a_round_copies():
    rates, _, _ = measure(Stopwatch(then_s=1e-6))
    # 8 copies of 1000 bytes in a microsecond; in memory 4000 are read and written.
    assert rates == dict(zip(RATES, (8.0, 8.0, 64.0), strict=True))


def test_the_best_round_counts():
    rates, _, _ = measure(Stopwatch(1e-6, 1e-6, 0.5e-6, then_s=1e-6))
    assert rates["host_to_device_gb_per_s"] == 16.0
    assert rates["device_to_host_gb_per_s"] == 8.0


def test_rounds_that_warm_up_do_not_count(monkeypatch):
    monkeypatch.setattr(copying, "_WARM_UP_S", 1e-6)
    rates, _, _ = measure(Stopwatch(0.5e-6, 0.5e-6, then_s=1e-6))
    assert rates["host_to_device_gb_per_s"] == 8.0


def test_rounds_go_on_for_their_time(monkeypatch):
    monkeypatch.setattr(copying, "_ROUNDS_S", 10.5e-6)
    rates, _, _ = measure(Stopwatch(*[1e-6] * 10, 0.5e-6, then_s=1e-6))
    assert rates["host_to_device_gb_per_s"] == 16.0


def test_it_is_the_data_that_is_copied():
    _, host, (source, target) = measure(Stopwatch(then_s=1e-6))
    assert torch.equal(host, torch.arange(1000).to(torch.uint8))
    assert torch.equal(source[:1000], host)
    assert torch.equal(target, source)


# Which GPU


def test_cuda_tells_an_address_as_the_kernel_writes_it():
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC2, pci_device_id=0)
    assert address_of(properties) == "0001:c2:00.0"
    assert address_of(SimpleNamespace(name="of an older torch")) == ""


def test_a_gpu_is_found_where_it_is_whatever_its_number():
    record = healthy(3)
    record["gpus"].reverse()
    nvml = SavedNvml(record)
    assert find_gpu(nvml, "0000:1b:00.0") == 2
    assert find_gpu(nvml, "0000:1d:00.0") == 0


def test_a_lost_gpu_does_not_hide_the_others():
    record = healthy(2)
    record["gpus"][0]["bus_ids"] = refusal(LOST, "GPU is lost")
    assert find_gpu(SavedNvml(record), ADDRESS) == 1
    with pytest.raises(
        UnreadableError, match="the address of GPU 0 is unknown: GPU is lost"
    ):
        find_gpu(SavedNvml(record), "0000:1b:00.0")


@pytest.mark.parametrize(
    ("address", "words"),
    [("0000:ff:00.0", "no GPU at 0000:ff:00.0"), ("", "PCI address is unknown")],
)
def test_a_gpu_is_not_guessed(address, words):
    with pytest.raises(UnreadableError, match=words):
        find_gpu(SavedNvml(healthy(2)), address)


# Its link


def watch_some(busy, links):
    """Watch while ``busy`` says so, one answer after the other."""
    return watch(iter(links).__next__, iter(busy).__next__)


def test_a_link_is_told_at_its_best():
    early = SLOW_LINK | {"generation": 1}
    narrow = SLOW_LINK | {"width": 4}
    busy = [True] * 6 + [False]
    assert watch_some(busy, [early, SLOW_LINK, narrow]) == SLOW_LINK


def test_an_answer_that_comes_after_the_copies_does_not_count():
    idle = SLOW_LINK | {"width": 16}
    assert watch_some([True, True, True, False, False], [SLOW_LINK, idle]) == SLOW_LINK
    with pytest.raises(UnreadableError, match="had ended before NVML answered"):
        watch_some([True, False, False], [idle])


def test_this_thread_stays_next_to_the_gpu_and_comes_back(tmp_path):
    before = os.sched_getaffinity(0)
    own = tmp_path / "sys/bus/pci/devices" / ADDRESS
    own.mkdir(parents=True)
    (own / "local_cpulist").write_text(f"{max(before)}\n")
    with staying_near(ADDRESS, str(tmp_path)) as is_near:
        assert is_near
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("address", ["", "0000:ff:00.0"])
def test_a_gpu_that_is_nowhere_is_near_no_cpu(tmp_path, address):
    before = os.sched_getaffinity(0)
    with staying_near(address, str(tmp_path)) as is_near:
        assert not is_near
        assert os.sched_getaffinity(0) == before


# All of it


def test_a_gpu_is_examined_and_nothing_stays_pinned(open_library):
    """CUDA's second GPU is NVML's first one, as with CUDA_DEVICE_ORDER."""
    record = healthy(2)
    record["gpus"].reverse()
    record["gpus"][0]["pcie"] = SLOW_LINK
    open_library(record)
    fake = FakeTorch(FIRST, SECOND)
    told = measure_gpu(fake, 1)
    check_copies(told["copies"])
    check_link(told["link"])
    assert told["link"] == {"address": ADDRESS} | SLOW_LINK
    assert fake.runtime.pinned == {}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"memory_bytes": 1 << 17}, "CUDA out of memory."),
        ({"pins": False}, f"cannot be pinned: CUDA's error {PINNING_REFUSED}"),
    ],
)
def test_a_gpu_that_does_not_copy_is_told(open_library, given, reason):
    open_library(healthy(2))
    fake = FakeTorch(FIRST, SECOND, **given)
    told = measure_gpu(fake, 1)
    assert told["copies"]["failure"].endswith(reason)
    assert told["link"] == told["copies"]
    assert fake.runtime.pinned == {}


@pytest.mark.parametrize(
    ("record", "library", "reason"),
    [
        (healthy(1), {}, "NVML knows no GPU at 0000:1c:00.0"),
        (healthy(2, pcie=refusal(LOST)), {}, "GPU is lost"),
        (healthy(2), {"init_error": DRIVER_NOT_LOADED}, "NVML does not answer"),
    ],
    ids=["another GPU", "a lost GPU", "no driver"],
)
def test_a_link_that_is_not_told_leaves_the_copies(
    open_library, record, library, reason
):
    open_library(record, **library)
    told = measure_gpu(FakeTorch(FIRST, SECOND), 1)
    check_copies(told["copies"])
    assert reason in told["link"]["failure"]


def test_copies_that_end_too_early_tell_nothing_of_the_link(open_library):
    open_library(healthy(2))
    told = measure_gpu(FakeTorch(FIRST, SECOND, num_busy=1), 1)
    check_copies(told["copies"])
    assert "before NVML answered" in told["link"]["failure"]


def test_a_gpu_without_a_link_is_no_complaint(open_library):
    open_library(healthy(2, pcie=refusal(NOT_SUPPORTED)))
    told = measure_gpu(FakeTorch(FIRST, SECOND), 1)
    check_copies(told["copies"])
    assert told["link"] is None
