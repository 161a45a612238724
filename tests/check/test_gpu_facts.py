"""Facts of GPUs from NVML, and from a saved tree of the kernel."""

import json
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest
from hypothesis import given, strategies as st
from tests.check.nvml_fake import SavedNvml, asking, healthy, refusal
from tests.check.nvml_library import FakeLibrary
from tests.limits import HANG_S

from ronde.check import (
    ALL_ANSWERS,
    GPU_QUESTIONS,
    FactReader,
    UnreadableError,
    ask_driver,
    opened_files,
    read_acs,
    read_direct_rdma,
    read_is_virtual,
    read_xids,
    store_answers,
)

ROOT = Path(__file__).parents[2]
NOT_SUPPORTED, NO_PERMISSION, LOST, RESET, UNKNOWN = 3, 4, 15, 16, 999
VERSION_MISMATCH = 18
CARD, BRIDGE, PORT = "0000:1b:00.0", "0000:1a:00.0", "0000:19:01.0"
ACS_REDIRECTION = 0x1D


def keep(record):
    reading = FactReader({})
    nvml = SavedNvml(record)
    store_answers(reading, nvml, asking(nvml))
    return reading


def write(root, path, content=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content)


def plug(root, chain, vendor="0x10de", kind="0x030200", driver="nvidia"):
    """Put a device below bridges into a tree."""
    *_, address = chain
    own = root / "sys/devices/pci0000:00" / "/".join(chain)
    own.mkdir(parents=True, exist_ok=True)
    (own / "class").write_text(kind)
    (own / "vendor").write_text(vendor)
    if driver:
        (own / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / address).symlink_to(own)
    return own


def plug_card(root, control=0):
    """Put a card below a port of a switch; ``control`` is the port's ACS register."""
    for depth, address in enumerate((PORT, BRIDGE), 1):
        own = plug(root, (PORT, BRIDGE)[:depth], "0x8086", "0x060400", "pcieport")
        (own / "config").write_bytes(config(control if address == PORT else 0))
    plug(root, (PORT, BRIDGE, CARD))


def config(control):
    """Return a bridge's registers: an extended capability, and behind it ACS."""
    registers = bytearray(4096)
    struct.pack_into("<I", registers, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<I", registers, 0x148, 0x000D | 1 << 16)
    struct.pack_into("<H", registers, 0x148 + 6, control)
    return bytes(registers)


# NVML's answers


@given(
    st.dictionaries(
        st.sampled_from(list(GPU_QUESTIONS)), st.integers(1, 1000).map(refusal)
    )
)
def test_each_fact_is_reported_or_unreadable(refused):
    reading = keep(healthy(2, **refused))
    assert reading.values.keys() | reading.unreadable.keys() == set(ALL_ANSWERS)
    for name in refused:
        assert not reading.values[f"gpu.{name}"][1]


# This host's NVML


@pytest.fixture
def use_library(monkeypatch, tmp_path):
    """Give a function that puts a library in the place of this host's.

    The processes that ask for one GPU each find it as well.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import json, os, pynvml\n"
        "from tests.check.nvml_library import FakeLibrary\n"
        "pynvml.nvmlLib = FakeLibrary(**eval(os.environ['FAKE_LIBRARY']))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    def use(**given):
        monkeypatch.setenv("FAKE_LIBRARY", repr(given))
        monkeypatch.setattr(pynvml, "nvmlLib", FakeLibrary(**given))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return use


def test_answers_become_facts(use_library):
    use_library(record=healthy(2, margin_celsius=-1))
    reading = FactReader({})
    ask_driver(reading)
    assert reading.values == keep(healthy(2, margin_celsius=-1)).values
    assert reading.unreadable == {}


# Error 8 is a power cable, 11 an interrupt.
@pytest.mark.parametrize("code", [LOST, 8, 11])
def test_only_a_gpu_without_a_handle_is_lost(use_library, code):
    use_library(record=healthy(4), gone={2: code})
    reading = FactReader({})
    ask_driver(reading)
    assert [bool(why) for why in reading.values["gpu.lost"]] == [
        False,
        False,
        True,
        False,
    ]
    assert reading.unreadable == {}


def test_a_gpu_without_permission_is_not_lost(use_library):
    use_library(record=healthy(2), gone={1: NO_PERMISSION})
    reading = FactReader({})
    ask_driver(reading)
    assert reading.values["gpu.lost"] == ["", ""]
    assert reading.unreadable["gpu.titles"].startswith("of GPU 1: ")
    assert reading.unreadable["gpu.titles"].endswith("root would help")


def test_a_driver_that_does_not_start_makes_all_unreadable(use_library):
    use_library(record=healthy(1), init_error=VERSION_MISMATCH)
    reading = FactReader({})
    ask_driver(reading)
    assert reading.unreadable.keys() == set(ALL_ANSWERS)
    # The check recognises these words, and advises a reboot.
    assert "version mismatch" in reading.values["gpu.nvml_error"]


@pytest.mark.waits
def test_a_gpu_that_hangs_the_driver_leaves_the_facts_of_the_others(use_library):
    use_library(record=healthy(3), hanging=(1,))
    reading = FactReader({})
    ask_driver(reading, deadline_s=5.0)
    lost = reading.values["gpu.lost"]
    assert [bool(why) for why in lost] == [False, True, False]
    assert lost[1] == "it hung and was killed after 5 s"
    assert reading.values["gpu.margin_celsius"] == [50, None, 50]
    assert reading.unreadable == {}


def test_a_crashed_query_makes_no_gpu_lost(use_library):
    broken = healthy(2, margin_celsius="nine")
    use_library(record=broken)
    reading = FactReader({})
    ask_driver(reading)
    assert reading.values["gpu.lost"] == ["", ""]
    assert reading.values["gpu.titles"] == [broken["gpus"][0]["titles"], None]
    assert reading.unreadable["gpu.titles"].startswith("of GPU 1: it ended with code 1")


# The kernel


def test_files_that_cannot_be_opened_are_reported(tmp_path):
    write(tmp_path, "dev/nvidia0")
    (tmp_path / "dev/nvidia1").mkdir()
    write(tmp_path, "dev/nvidiactl")
    write(tmp_path, "dev/nvidia-modeset")
    with opened_files(str(tmp_path)) as files:
        assert files == {
            "/dev/nvidia0": "",
            "/dev/nvidia1": "Is a directory",
            "/dev/nvidiactl": "",
            "/dev/nvidia-uvm": "No such file or directory",
        }


def open_here(path):
    """Return whether this process has a file open."""
    descriptors = Path("/proc/self/fd").iterdir()
    return str(path) in [os.path.realpath(each) for each in descriptors]


def test_device_files_are_held_open(tmp_path):
    write(tmp_path, "dev/nvidia0")
    with opened_files(str(tmp_path)):
        assert open_here(tmp_path / "dev/nvidia0")
    assert not open_here(tmp_path / "dev/nvidia0")


def write_log(root, *records):
    write(root, "proc/uptime", "10000.00 20000.00\n")
    lines = (f"3,{n},{at_s * 1_000_000},-;{text}" for n, (at_s, text) in records)
    write(root, "dev/kmsg", "\n".join(lines) + "\n SUBSYSTEM=pci\n")


def test_errors_in_the_log_are_counted_and_dated(tmp_path):
    write_log(
        tmp_path,
        *enumerate(
            [
                (100, "NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=python, Ch 8"),
                (9000, "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."),
                (9500, "NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 31, pid=2, name=python"),
                (9900, "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link"),
                (9990, "usb 1-1: new device, not Xid"),
            ]
        ),
    )
    shared = {"address": CARD, "is_fatal": False}
    assert read_xids(str(tmp_path)) == [
        {"kind": "Xid", "code": 31, "times": 2, "age_s": 500.0, **shared},
        {"kind": "Xid", "code": 79, "times": 1, "age_s": 1000.0, **shared},
        {
            "kind": "SXid",
            "code": 20034,
            "times": 1,
            "age_s": 100.0,
            "address": "0000:05:00.0",
            "is_fatal": True,
        },
    ]


JOURNAL = """\
{at}.000001 node1 kernel: Linux version 6.8.0
{at}.500000 node1 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', Off bus
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"),
    reason="a /dev/kmsg of one's own needs root and unshare",
)
@pytest.mark.parametrize("journal", [JOURNAL, ""], ids=["whole", "empty"])
def test_the_journal_replaces_an_unreadable_log(tmp_path, journal):
    begun = int(time.time()) - 3600
    write(tmp_path, "bin/journalctl", f"#!/bin/sh\ncat {tmp_path}/journal\n")
    (tmp_path / "bin/journalctl").chmod(0o755)
    write(tmp_path, "journal", journal.format(at=begun))
    code = (
        "import json\n"
        "from ronde.check import read_xids\n"
        "try: print(json.dumps(read_xids('')))\n"
        "except OSError as error: print(error)"
    )
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(tmp_path / "s"))  # opening it is an error
        way = f"mount --bind {tmp_path}/s /dev/kmsg && PATH={tmp_path}/bin:$PATH "
        way += f"exec {sys.executable} -c {shlex.quote(code)}"
        command = ["unshare", "--mount", "sh", "-c", way]
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=HANG_S, text=True
        )
    assert done.returncode == 0, done.stderr
    if not journal:
        assert "journalctl -k is empty; root would help" in done.stdout
        return
    (xid,) = json.loads(done.stdout)
    assert (xid["kind"], xid["code"], xid["address"]) == ("Xid", 79, CARD)
    assert 3599 <= xid["age_s"] <= 3600 + 60


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"),
    reason="a clock of one's own needs root and unshare",
)
def test_the_log_has_a_clock_that_no_container_changes():
    code = "from ronde.topology.kernel_log import read_clock_s; print(read_clock_s(''))"
    # Here the host has been up for years, according to /proc/uptime.
    command = ["unshare", "--time", "--boottime", "100000000", sys.executable, "-c"]
    begun_s = time.monotonic()
    done = subprocess.run(
        [*command, code], capture_output=True, check=False, timeout=HANG_S, text=True
    )
    if "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    assert begun_s <= float(done.stdout) <= time.monotonic(), done.stderr


@pytest.mark.parametrize(
    ("module", "kernel", "peermem", "way"),
    [
        ("550.54", "6.8.0-31-generic", False, ""),
        ("550.54", "6.8.0-31-generic", True, "nvidia_peermem"),
        ("560.35 (open)", "5.12.1", False, "DMA-BUF"),
        ("560.35 (open)", "5.4.0", False, ""),
    ],
)
def test_gpudirect_rdma_has_two_methods(tmp_path, module, kernel, peermem, way):
    write(tmp_path, "proc/sys/kernel/osrelease", kernel)
    write(tmp_path, "sys/class/infiniband/mlx5_0/device/vendor", "0x15b3\n")
    write(tmp_path, "sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE")
    if peermem:
        write(tmp_path, "sys/module/nvidia_peermem/refcnt", "0")
    assert read_direct_rdma(str(tmp_path), module) == {"adapters": 1, "way": way}


def test_acs_is_found_on_the_bridge_that_has_it(tmp_path):
    plug_card(tmp_path, ACS_REDIRECTION)
    assert read_acs(str(tmp_path), [CARD]) == [PORT]


def test_registers_for_root_are_unreadable(tmp_path):
    plug_card(tmp_path, ACS_REDIRECTION)
    own = tmp_path / "sys/bus/pci/devices" / PORT / "config"
    own.write_bytes(own.read_bytes()[:64])
    with pytest.raises(UnreadableError, match=r"64 bytes .* root would help"):
        read_acs(str(tmp_path), [CARD])


def test_a_virtual_machine_needs_acs(tmp_path):
    plug_card(tmp_path, ACS_REDIRECTION)
    write(tmp_path, "proc/cpuinfo", "processor : 0\nflags\t\t: fpu hypervisor sse\n")
    assert read_is_virtual(str(tmp_path))
    assert read_acs(str(tmp_path), [CARD]) == []


@pytest.mark.parametrize(
    ("vendor", "product", "is_virtual"),
    [
        ("QEMU", "KVM Virtual Machine", True),
        ("Amazon EC2", "g5g.metal", False),
        ("", "", False),
    ],
)
def test_the_firmware_names_virtual_machines(tmp_path, vendor, product, is_virtual):
    write(tmp_path, "proc/cpuinfo", "processor : 0\nFeatures\t: fp asimd\n")
    write(tmp_path, "sys/class/dmi/id/sys_vendor", f"{vendor}\n")
    write(tmp_path, "sys/class/dmi/id/product_name", f"{product}\n")
    assert read_is_virtual(str(tmp_path)) is is_virtual
