"""NVML's answers from a record, and from a fake library through pynvml."""

import pynvml
import pytest
from tests.check.nvml_fake import healthy, record, refusal
from tests.check.nvml_library import FakeLibrary
from tests.check.nvml_suite import SUITE

from ronde.check import GPU_QUESTIONS, NvmlDriver, RefusedError

NOT_SUPPORTED, FUNCTION_NOT_FOUND, LOST = 3, 13, 15
WORN = healthy(
    2,
    memory_bytes={"total": 80 << 30, "used": 3 << 30},
    has_valid_inforom=False,
    recovery_action=2,
    remapped_rows={
        "corrected": 1,
        "uncorrected": 700,
        "is_pending": True,
        "has_failed": False,
    },
    ecc_errors={
        "sram_uncorrected": 1,
        "sram_uncorrected_ever": 2,
        "sram_corrected": 3,
        "dram_corrected": 4,
    },
    clock_events=0x40,
    margin_celsius=-3,
    pcie={"width": 8, "max_width": 16, "generation": 3, "max_generation": 5},
    nvlinks=[True, False, True],
    fabric={"state": 3, "status": 0, "health": 0x211, "summary": 2},
    mig=True,
    processes=[{"pid": 77, "memory_bytes": 123}, {"pid": 78, "memory_bytes": None}],
    busy_percent=97,
)
RECORDS = {"none": healthy(0), "worn": WORN}


@pytest.fixture
def open_library(monkeypatch):
    """Return a function that makes a driver from a library."""

    def open_it(library):
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return NvmlDriver(pynvml)

    return open_it


@pytest.mark.parametrize("check", SUITE)
@pytest.mark.parametrize("name", RECORDS)
def test_the_fake_library_passes_the_suite(open_library, check, name):
    check(open_library(FakeLibrary(RECORDS[name])))


@pytest.mark.parametrize("name", RECORDS)
def test_answers_through_pynvml_equal_the_record(open_library, name):
    assert record(open_library(FakeLibrary(RECORDS[name]))) == RECORDS[name]


# An NVLink that is not supported is none, and no error.
@pytest.mark.parametrize("question", [q for q in GPU_QUESTIONS if q != "nvlinks"])
def test_an_error_of_the_library_is_a_refusal_with_its_number(open_library, question):
    record = healthy(2, **{question: refusal(NOT_SUPPORTED)})
    nvml = open_library(FakeLibrary(record))
    with pytest.raises(RefusedError) as refused:
        nvml.ask_gpu(question, 1)
    assert refused.value.code == NOT_SUPPORTED
    assert "ot Supported" in str(refused.value) or "error 3" in str(refused.value)


def test_a_function_that_an_old_driver_lacks_is_refused(open_library):
    library = FakeLibrary(healthy(1), missing={"nvmlDeviceGetMarginTemperature"})
    with pytest.raises(RefusedError) as refused:
        open_library(library).ask_gpu("margin_celsius", 0)
    assert refused.value.code == FUNCTION_NOT_FOUND


def test_the_fabric_is_read_from_an_older_driver(open_library):
    nvml = open_library(FakeLibrary(WORN, fabric_version=2))
    reported = WORN["gpus"][1]["fabric"]
    assert nvml.ask_gpu("fabric", 1) == reported | {"summary": 0}


def test_processes_of_a_desktop_are_left_out(open_library):
    record = healthy(1, processes=[{"pid": 77, "memory_bytes": 123}])
    nvml = open_library(FakeLibrary(record, desktop=[5]))
    reported = nvml.ask_gpu("processes", 0)
    assert [each["pid"] for each in reported] == [77]
