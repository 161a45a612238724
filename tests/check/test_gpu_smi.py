"""NVML's answers as nvidia-smi prints them, where nvidia-ml-py is missing."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ronde.check import ALL_ANSWERS, FactReader, UnreadableError, ask_driver, read_smi

GPU = (Path(__file__).parent / "nvidia-smi-gpu.xml").read_text()
HEAD = (
    '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    "<nvidia_smi_log>\n <cuda_version>12.9</cuda_version>"
)
NVLINKS = (
    b"GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n"
    b"\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    b"GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n"
    b"\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
)


def log(*titles, hot="Not Active"):
    gpus = (
        GPU.format(bus=f"{0x1B + n:02X}", title=title, width=16, hot=hot)
        for n, title in enumerate(titles)
    )
    return f"{HEAD}{''.join(gpus)}\n</nvidia_smi_log>\n".encode()


H100 = "NVIDIA H100 80GB HBM3"


def test_the_output_becomes_nvmls_answers():
    cuda_version, (first, second) = read_smi(log(H100, H100, hot="Active"), NVLINKS)
    assert cuda_version == [12, 9]
    assert second["nvlinks"] == [True, True]
    assert first == {
        "titles": H100,
        "bus_ids": "0000:1b:00.0",
        "memory_bytes": {"total": 81559 << 20, "used": 4 << 20},
        "vbios": "96.00.74.00.01",
        "recovery_action": 0,
        "remapped_rows": {
            "corrected": 0,
            "uncorrected": 1,
            "is_pending": True,
            "has_failed": False,
        },
        "ecc_errors": {
            "sram_uncorrected": 3,
            "sram_uncorrected_ever": 5,
            "sram_corrected": 0,
            "dram_corrected": 0,
        },
        "clock_events": 0x40,
        "margin_celsius": 53,
        "pcie": {"width": 16, "max_width": 16, "generation": 1, "max_generation": 5},
        "fabric": {"state": 3, "status": 0, "health": 0, "summary": 1},
        "mig": False,
        "processes": [{"pid": 1, "memory_bytes": 530 << 20}],
        "busy_percent": 3,
        "nvlinks": [True, False],
    }


def test_inapplicable_is_none_and_missing_is_left_out():
    text = log(H100).decode().replace("53 C", "N/A").replace("Disabled", "[N/A]")
    text = text.replace("<gpu_recovery_action>None</gpu_recovery_action>", "")
    _, (gpu,) = read_smi(text.encode(), b"")
    assert (gpu["margin_celsius"], gpu["mig"]) == (None, None)
    assert {"recovery_action", "nvlinks"}.isdisjoint(gpu)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_cut_text_is_unreadable(data):
    text = log(H100)
    cut = text[: data.draw(st.integers(0, len(text.rstrip()) - 1))]
    with pytest.raises(UnreadableError, match="nvidia-smi -q -x is not XML"):
        read_smi(cut, NVLINKS)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that installs ``nvidia-smi``, without nvidia-ml-py."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def use(script, text=b""):
        (tmp_path / "log.xml").write_bytes(text)
        (tmp_path / "links").write_bytes(NVLINKS)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        reader = FactReader({})
        ask_driver(reader)
        return reader

    return use


PRINT = "case $1 in -q) cat log.xml;; *) cat links;; esac"


def test_nvidia_smi_replaces_a_missing_binding(smi):
    reader = smi(PRINT, log(H100, H100))
    assert reader.values["gpu.count"] == 2
    assert reader.values["gpu.lost"] == ["", ""]
    assert reader.values["gpu.nvlinks"] == [[True, False], [True, True]]
    assert reader.values["gpu.processes"][0][0]["command"]
    assert reader.unreadable.keys() == {"gpu.has_valid_inforom"}
    assert "pip install nvidia-ml-py" in reader.unreadable["gpu.has_valid_inforom"]


def test_a_driver_that_nvidia_smi_cannot_query_is_a_fault(smi):
    why = "NVIDIA-SMI has failed because it couldn't communicate with the driver."
    reader = smi(f'echo "{why}"; exit 9')
    assert reader.values == {"gpu.nvml_error": why}
    assert reader.unreadable.keys() == {*ALL_ANSWERS}


def test_without_either_all_is_unreadable(smi, tmp_path):
    smi("exit 1")
    (tmp_path / "nvidia-smi").unlink()
    reader = FactReader({})
    ask_driver(reader)
    assert not reader.values
    assert (
        "nvidia-smi is installed: pip install nvidia-ml-py"
        in reader.unreadable["gpu.count"]
    )
