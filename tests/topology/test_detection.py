"""This machine is looked at fast, and without what it does not need."""

import os
import subprocess
import sys

import pytest
from tests.topology.saved_trees import Tree

from ronde.topology import detect_host

HAS_DRIVER = any(map(os.path.exists, ("/dev/nvidiactl", "/proc/driver/nvidia")))


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver of NVIDIA's")
def test_without_a_driver_one_line_says_so_and_nothing_is_loaded_for_it():
    code = (
        "import sys; from pathlib import Path; "
        "from ronde.topology import detect_host; "
        "print(*detect_host(Path('/'), {}).notices, sep='|'); "
        "print(sorted({'torch', 'pynvml', 'ctypes'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout == (
        "No driver of NVIDIA's is loaded: NVML is not available.\n[]\n"
    )


def test_gpus_that_the_environment_hides_are_listed_and_said(tmp_path):
    tree = Tree(tmp_path).cpus("0")
    for number, bus in enumerate(("01", "02")):
        place = f"pci0000:00/0000:{bus}:00.0"
        tree.device(place, _class="0x030200", vendor="0x10de")
        tree.write(f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information", "Model: x\n")
        tree.write(f"dev/nvidia{number}")
    host, notices = detect_host(tree.root, {"CUDA_VISIBLE_DEVICES": "1"})
    assert len(host.gpus) == 2
    assert notices == (
        "The environment lets programs see 1 of 2 GPUs; all are listed.",
    )
    assert detect_host(tree.root, {}).notices == ()
    assert detect_host(tree.root, {"CUDA_VISIBLE_DEVICES": "1,0"}).notices == ()
