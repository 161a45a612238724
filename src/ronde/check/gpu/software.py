"""Whether torch, CUDA, the driver and the GPUs fit together."""

import re
from collections.abc import Iterator

from ronde.check.check import FAIL, WARN, Family, Problem, each_host
from ronde.check.facts import Fleet, Values
from ronde.check.gpu.answers import COUNT

_BUILD = "versions.torch_build"
_FIRST_CUDA = {8: (11, 0), 9: (11, 8), 10: (12, 8), 11: (13, 0), 12: (12, 8)}
"""The first CUDA for GPUs of a compute capability, by its major part; code for 8.0 runs
on 8.9 too."""
_NO_LONGER = (7, 5)
_ENDED_WITH = (13, 0)
"""CUDA 13.0 makes no code for GPUs before compute capability 7.5,"""
_WHEELS_ENDED_WITH = (12, 8)
"""and PyTorch's wheels from 2.11 on have none from this CUDA on; other builds may."""


def _torch_cuda(values: Values) -> tuple[int, ...]:
    """Return for which CUDA torch was built; empty if for none."""
    match = re.fullmatch(r"CUDA (\d+)\.(\d+).*", values[_BUILD])
    return (int(match[1]), int(match[2])) if match else ()


@each_host(
    Family.GPU,
    FAIL,
    """gpu-torch: torch can use the GPUs that are there
    reads: what torch was built for, in its version.py, and the number of GPUs
    threshold: for CUDA where there are NVIDIA GPUs
    source: torch.version.cuda is None in builds for CPUs
    fix: pip install --force-reinstall torch --index-url
        https://download.pytorch.org/whl/cu128
    needs: an NVIDIA GPU
    why: Training runs on the CPU, a hundred times slower.
    """,
    COUNT,
    _BUILD,
)
def _gpu_torch(values: Values, _: Fleet) -> Iterator[Problem]:
    if values[COUNT] and values[_BUILD] == "CPU":
        count = values[COUNT]
        yield Problem(f"torch was built without CUDA, and there are {count} GPUs")


@each_host(
    Family.GPU,
    FAIL,
    """gpu-cuda: the driver supports the CUDA that torch was built for
    reads: NVML's CUDA version, and torch's in its version.py
    threshold: at least torch's; an older minor version is a warning, an older major one
        does not work
    source: NVIDIA's CUDA compatibility manual
    fix: install a newer driver, or a torch for an older CUDA
    needs: an NVIDIA GPU
    why: CUDA does not start: the driver is insufficient for the runtime.
    """,
    "gpu.cuda_version",
    _BUILD,
)
def _gpu_cuda(values: Values, _: Fleet) -> Iterator[Problem]:
    torch, driver = _torch_cuda(values), values["gpu.cuda_version"]
    if torch and driver and tuple(driver) < torch:
        yield Problem(
            f"the driver supports CUDA {driver[0]}.{driver[1]}, torch was built for "
            f"{torch[0]}.{torch[1]}",
            FAIL if driver[0] < torch[0] else WARN,
        )


@each_host(
    Family.GPU,
    FAIL,
    """gpu-code: torch has code for these GPUs
    reads: NVML's compute capabilities, and torch's CUDA in its version.py
    threshold: 8.x from CUDA 11.0, 9.0 from 11.8, 10.x and 12.x from 12.8, 11.x from
        13.0; below 7.5 until 12.9, a warning from 12.8 on
    source: NVIDIA's release notes of CUDA; PyTorch's support matrix of release 2.11,
        whose wheels for 12.8 begin at 7.5
    fix: install a newer torch
    needs: an NVIDIA GPU
    why: The first kernel fails: no kernel image is available for the device.
    """,
    "gpu.capabilities",
    _BUILD,
)
def _gpu_code(values: Values, _: Fleet) -> Iterator[Problem]:
    torch = _torch_cuda(values)
    known = {tuple(each) for each in values["gpu.capabilities"] if each}
    for major, minor in sorted(known) if torch else ():
        first = _FIRST_CUDA.get(major, (0, 0))
        is_old = (major, minor) < _NO_LONGER and torch >= _WHEELS_ENDED_WITH
        if torch < first or is_old:
            is_sure = torch < first or torch >= _ENDED_WITH
            need = "a torch for CUDA 12.6" if is_old else "a newer torch"
            yield Problem(
                f"torch for CUDA {torch[0]}.{torch[1]} "
                f"{'has' if is_sure else 'mostly has'} no code for GPUs of "
                f"compute capability {major}.{minor}",
                FAIL if is_sure else WARN,
                fix=f"install {need}",
            )
