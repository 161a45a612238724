"""How fast a GPU copies: from the host, to it, within its memory."""

import math
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    FactReader,
    Family,
    Fleet,
    Problem,
    Problems,
    Value,
    check,
)
from ronde.check.gpu.judges import (
    CheckedDevice,
    SpeedMeasure,
    find_slow_devices,
    fold_devices,
)
from ronde.launch.process_tree import die_with_parent
from ronde.topology.cpu_sets import members
from ronde.topology.kernel_files import read_list
from ronde.topology.pci import plain_address

# Fact: by device, such as ``cuda:0``: its model and how fast it copies.
COPIES = "cluster.gpu_copies"
HOST_BYTES = 32 << 20
# Of two buffers each; more than caches hold.
DEVICE_BYTES = 256 << 20
Torch = Any
Tensor = Any

_NUM_IN_ROUND = 8
_MIN_ROUNDS = 3
# Clocks and PCI link of an idle GPU are low, and take some time to rise.
_WARM_UP_S, _ROUNDS_S = 0.1, 0.2
_MAX_CHARS = 200

_FLOORS_GB_PER_S = {
    "A100-SXM4-40GB": 21.0,
    "A100-SXM4-80GB": 21.0,
    "H100 80GB HBM3": 48.0,
    "H200": 48.0,
}
"""By the model's whole name: parts of a GPU and boards with other links have others."""


def read(reader: FactReader) -> None:
    """Be the program that measures one GPU after the other."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    torch: Torch = import_module("torch")
    for number in range(torch.cuda.device_count()):
        reader.values[f"cuda:{number}"] = measure_gpu(torch, number)


def measure_gpu(torch: Torch, number: int) -> dict[str, Value]:
    """Measure what a GPU of CUDA's copies.

    Returns:
        ``model``, ``is_near`` (whether the host's memory was on the GPU's side of it)
        and the rates; ``failure`` alone where they are unknown.
    """
    try:
        model = torch.cuda.get_device_name(number)
        address = address_of(torch.cuda.get_device_properties(number))
        with (
            torch.cuda.device(number),
            staying_near(address) as is_near,
            _pinned(torch) as host,
        ):
            source, target = (
                torch.zeros(DEVICE_BYTES, dtype=torch.uint8, device="cuda")
                for _ in range(2)
            )
            rates = measure_copies(host, (source, target), torch.cuda.synchronize)
            del source, target
    except RuntimeError as error:
        # CUDA's errors go on with advice for programmers.
        return {"failure": str(error).partition("\n")[0][:_MAX_CHARS]}
    return {"model": model, "is_near": is_near, **rates}


def measure_copies(
    host: Tensor,
    buffers: tuple[Tensor, Tensor],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return GB/s (1e9) copied, the best of some rounds; in memory read and written."""
    source, target = buffers
    part = source[: host.numel()]

    def rate(to: Tensor, of: Tensor) -> float:
        taken: list[float] = []
        begun_s = now_s = clock()
        warm_s, end_s = begun_s + _WARM_UP_S, math.inf
        while len(taken) < _MIN_ROUNDS or now_s < end_s:
            before_s = now_s
            for _ in range(_NUM_IN_ROUND):
                to.copy_(of, non_blocking=True)
            wait()
            now_s = clock()
            if before_s >= warm_s:
                end_s = min(end_s, before_s + _ROUNDS_S)
                taken.append(now_s - before_s)
        return round(_NUM_IN_ROUND * of.nbytes / min(taken) / 1e9, 3)

    return {
        "host_to_device_gb_per_s": rate(part, host),
        "device_to_host_gb_per_s": rate(host, part),
        "device_memory_gb_per_s": 2 * rate(target, source),
    }


@contextmanager
def _pinned(torch: Torch) -> Generator[Tensor]:
    """Give new memory, near this thread, that GPUs copy by themselves."""
    memory = torch.empty(HOST_BYTES, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise RuntimeError(f"the host's memory cannot be pinned: CUDA's error {code}")
    try:
        yield memory
    finally:
        try:
            # What the GPU copied to is free only when it has ended.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        finally:
            runtime.cudaHostUnregister(memory.data_ptr())


def address_of(properties: Any) -> str:  # noqa: ANN401  torch's, without types
    """Return where a GPU of CUDA's sits, as sysfs spells it; empty if unknown."""
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        device = properties.pci_device_id
    except AttributeError:
        return ""
    return plain_address(f"{domain:x}:{bus:x}:{device:x}.0")


@contextmanager
def staying_near(address: str, root: str = "") -> Generator[bool]:
    """Keep this thread, and its new memory, next to a GPU; give whether that works."""
    allowed = os.sched_getaffinity(0)
    path = f"{root}/sys/bus/pci/devices/{address}/local_cpulist"
    near = allowed.intersection(members(read_list(path)))
    is_near = bool(near)
    if near:
        try:
            os.sched_setaffinity(0, near)
        except PermissionError:
            is_near = False
    try:
        yield is_near
    finally:
        if is_near:
            os.sched_setaffinity(0, allowed)


def _show(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


_IN_MEMORY = "device_memory_gb_per_s"
_MEASURES = {
    "host_to_device_gb_per_s": SpeedMeasure("copied from the host at", _show, 0.9, 0.8),
    "device_to_host_gb_per_s": SpeedMeasure("copied to the host at", _show, 0.9, 0.8),
    _IN_MEMORY: SpeedMeasure("copied within its memory at", _show, 0.9, 0.8),
}


@check(Family.GPU, FAIL, COPIES)
def gpu_copy_speed(fleet: Fleet) -> Problems:
    """GPUs of one model copy as fast.

    reads: copies from pinned memory of the host, to it, and within the GPU's memory
        (read and written both count), the best of some rounds; one GPU after the other,
        from CPUs next to it, after the product of --burn
    threshold: 90% of what most GPUs of the model reach, on all hosts; below 80% a
        failure; with the host at least 21 GB/s on A100 SXM, 48 GB/s on H100 SXM and
        H200 SXM. A warning at most where no CPU next to the GPU could be chosen
    source: shares: ronde's own; 21 and 48 GB/s: Azure's node health checks (ND v4, v5)
    fix: Look at its PCI link under load (sudo lspci -vv | grep Lnk) and clocks; reseat
        it; for its own memory: dcgmi diag -r 3
    needs: --burn, torch, GPUs; to compare, several of one model
    why: Every step waits for the GPU whose data comes last.
    """
    known: dict[CheckedDevice, Value] = {}
    found: list[tuple[CheckedDevice, Problem]] = []
    for host, gpus in fleet.known(COPIES).items():
        for name, copies in gpus.items():
            device = CheckedDevice(host, name, copies.get("model", ""))
            if "failure" in copies:
                what = f"could not be measured: {copies['failure']}"
                found.append((device, Problem(what, INFORM)))
            else:
                known[device] = copies
    for name, measure in _MEASURES.items():
        rates = {device: float(copies[name]) for device, copies in known.items()}
        slow = find_slow_devices(rates, measure)
        if name != _IN_MEMORY:
            slow = _judge_with_host(known, rates, slow, measure)
        found += slow.items()
    yield from fold_devices(found)


def _judge_with_host(
    known: dict[CheckedDevice, Value],
    rates: dict[CheckedDevice, float],
    slow: dict[CheckedDevice, Problem],
    measure: SpeedMeasure,
) -> dict[CheckedDevice, Problem]:
    """Return what is slow or below its model's floor, the worse of the two."""
    found: dict[CheckedDevice, Problem] = {}
    for device, rate in rates.items():
        problem = slow.get(device)
        floor = _FLOORS_GB_PER_S.get(device.model.removeprefix("NVIDIA "), 0.0)
        if rate < floor and (problem is None or problem.severity is not FAIL):
            what = f"{measure.action} {_show(rate)}, below the {floor:g} of a sound"
            problem = Problem(f"{what} {device.model}", FAIL)
        if problem is not None and not known[device]["is_near"]:
            what = f"{problem.what} (its memory there may have been far)"
            problem = problem._replace(severity=WARN, what=what)
        if problem is not None:
            found[device] = problem
    return found
