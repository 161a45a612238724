"""How fast a GPU copies: from the host, to it, within its memory; its PCI link then."""

import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ronde.check.check import FAIL, INFORM, WARN, Family, Problem, Problems, check
from ronde.check.facts import Fleet, UnreadableError, Value
from ronde.check.gpu.judges import (
    CheckedDevice,
    SpeedMeasure,
    find_slow_devices,
    fold_devices,
)
from ronde.check.gpu.nvml import NOT_SUPPORTED, NvmlDriver, RefusedError
from ronde.topology.cpu_sets import members
from ronde.topology.kernel_files import read_list
from ronde.topology.pci import plain_address
from ronde.topology.probes.nvml import NoNvmlError, open_nvml

# Fact: by device, such as ``cuda:0``: its model and how fast it copies.
COPIES = "cluster.gpu_copies"
# Fact: by device, such as ``cuda:0``: its PCI link while it copied.
LOADED_LINKS = "cluster.gpu_links_under_load"
HOST_BYTES = 32 << 20
# Of two buffers each; more than caches hold.
DEVICE_BYTES = 256 << 20
Torch = Any
Tensor = Any

_NUM_IN_ROUND = 8
_MIN_ROUNDS = 3
# Clocks and link of an idle GPU are low, and take some time to rise.
_WARM_UP_S = 0.1
_ROUNDS_S = 0.2
_LOAD_S = 0.3
# So many copies can be queued without blocking.
_MAX_LOAD = 1000
_MAX_CHARS = 200

_FLOORS_GB_PER_S = {
    "A100-SXM4-40GB": 21.0,
    "A100-SXM4-80GB": 21.0,
    "H100 80GB HBM3": 48.0,
    "H200": 48.0,
}
"""By the model's whole name: parts of a GPU and boards with other links have others."""


def measure_gpu(torch: Torch, number: int) -> dict[str, Value]:
    """Measure what a GPU of CUDA's copies, and read its PCI link meanwhile.

    Nothing else should run on the host. The memory that it takes is given back.

    Returns:
        ``copies`` has ``model``, ``is_near`` (whether the host's memory was on the
        GPU's side of it) and what ``measure_copies`` returns; ``link`` has ``address``
        and the parts of NVML's answer, and is nothing where there is no link. Either
        is ``failure`` alone where it is unknown.
    """
    try:
        model = torch.cuda.get_device_name(number)
        address = address_of(torch.cuda.get_device_properties(number))
        with (
            torch.cuda.device(number),
            staying_near(address) as is_near,
            _pinned(torch) as host,
        ):
            buffers = (
                torch.zeros(DEVICE_BYTES, dtype=torch.uint8, device="cuda"),
                torch.zeros(DEVICE_BYTES, dtype=torch.uint8, device="cuda"),
            )
            rates = measure_copies(host, buffers, torch.cuda.synchronize)
            del buffers
            link = _read_link(torch, address, host, rates["host_to_device_gb_per_s"])
    except RuntimeError as error:
        failure = {"failure": _shorten(error)}
        return {"copies": failure, "link": failure}
    return {"copies": {"model": model, "is_near": is_near, **rates}, "link": link}


def measure_copies(
    host: Tensor,
    buffers: tuple[Tensor, Tensor],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return how many GB/s (1e9) are copied each way, the best of some rounds.

    ``host`` is in the host's memory, the buffers in a GPU's, none smaller; ``wait``
    returns when all copies have ended. Within memory, what is read and what is written
    both count.
    """
    source, target = buffers
    part = source[: host.numel()]

    def rate(to: Tensor, of: Tensor) -> float:
        def copy_some() -> None:
            for _ in range(_NUM_IN_ROUND):
                to.copy_(of, non_blocking=True)
            wait()

        best_s = _time_best(copy_some, clock)
        return round(_NUM_IN_ROUND * of.nbytes / best_s / 1e9, 3)

    return {
        "host_to_device_gb_per_s": rate(part, host),
        "device_to_host_gb_per_s": rate(host, part),
        "device_memory_gb_per_s": 2 * rate(target, source),
    }


def _time_best(run: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the seconds of the quickest of some runs, after some that do not count."""
    begun_s = now_s = clock()
    while now_s < begun_s + _WARM_UP_S:
        run()
        now_s = clock()
    taken: list[float] = []
    begun_s = now_s
    while len(taken) < _MIN_ROUNDS or now_s < begun_s + _ROUNDS_S:
        before_s = clock()
        run()
        now_s = clock()
        taken.append(now_s - before_s)
    return min(taken)


@contextmanager
def _pinned(torch: Torch) -> Generator[Tensor]:
    """Give memory of the host that GPUs copy by themselves; on this thread's side.

    torch's own pinned memory is kept for whoever asks next, who may be elsewhere.
    Nobody has touched this one: its pages are chosen when it is pinned.
    """
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


def _read_link(
    torch: Torch, address: str, host: Tensor, rate_gb_per_s: float
) -> dict[str, Value] | None:
    """Return the GPU's link while it copies; nothing for one that has none."""
    num_copies = math.ceil(_LOAD_S * rate_gb_per_s * 1e9 / host.nbytes)

    def load() -> Callable[[], bool]:
        target = torch.empty_like(host, device="cuda")
        for _ in range(min(num_copies, _MAX_LOAD)):
            target.copy_(host, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        return lambda: not end.query()

    try:
        with open_nvml() as module:
            nvml = NvmlDriver(module)
            number = find_gpu(nvml, address)
            link = watch(lambda: nvml.ask_gpu("pcie", number), load())
    except (UnreadableError, RuntimeError, NoNvmlError, RefusedError) as error:
        if isinstance(error, RefusedError) and error.code == NOT_SUPPORTED:
            return None
        return {"failure": _shorten(error)}
    return {"address": address, **link}


def _shorten(error: Exception) -> str:
    # CUDA's errors go on with advice for programmers.
    return str(error).partition("\n")[0][:_MAX_CHARS]


def address_of(properties: Any) -> str:  # noqa: ANN401  torch's, without types
    """Return where a GPU of CUDA's sits, as sysfs spells it; empty if unknown.

    CUDA's numbers follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's neither:
    the address is what both know of a GPU.
    """
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        device = properties.pci_device_id
    except AttributeError:
        return ""
    return plain_address(f"{domain:x}:{bus:x}:{device:x}.0")


def find_gpu(nvml: NvmlDriver, address: str) -> int:
    """Return NVML's number of the GPU at an address.

    Raises:
        RefusedError: The number of GPUs is unknown.
        UnreadableError: None is known to be there.
    """
    if not address:
        raise UnreadableError("its PCI address is unknown to this torch; newer ones do")
    refused = ""
    for number in range(nvml.ask_host("count")):
        try:
            if nvml.ask_gpu("bus_ids", number) == address:
                return number
        except RefusedError as error:
            refused = f", and the address of GPU {number} is unknown: {error}"
    raise UnreadableError(f"NVML knows no GPU at {address}{refused}")


def watch(ask: Callable[[], Value], is_busy: Callable[[], bool]) -> Value:
    """Return a link, as ``ask`` answers, at its best while copies ran.

    What is answered after the last copy has ended does not count.

    Raises:
        RefusedError: The question is not answered.
        UnreadableError: All copies had ended before the first answer.
    """
    best: dict[str, int] = {}
    while is_busy():
        link = ask()
        if is_busy():
            best = {name: max(now, best.get(name, 0)) for name, now in link.items()}
    if not best:
        raise UnreadableError("its copies had ended before NVML answered")
    return best


@contextmanager
def staying_near(address: str, root: str = "") -> Generator[bool]:
    """Keep this thread on the CPUs next to a GPU: memory that it takes lies there too.

    It gives whether that could be done: not where the address is unknown, or no CPU
    may be chosen, as in some containers.
    """
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


_MEASURES = {
    f"{name}_gb_per_s": SpeedMeasure(action, _show, 0.9, 0.8)
    for name, action in (
        ("host_to_device", "copied from the host at"),
        ("device_to_host", "copied to the host at"),
        ("device_memory", "copied within its memory at"),
    )
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
    source: the shares are ronde's own; 21 and 48 GB/s: Azure's node health checks (ND
        A100 v4, ND H100 v5, ND H200 v5)
    fix: Look at its PCI link (gpu-pcie-load) and clocks; reseat it; for its own
        memory: dcgmi diag -r 3
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
        if not name.startswith("device_memory"):
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


@check(Family.GPU, FAIL, LOADED_LINKS)
def gpu_pcie_load(fleet: Fleet) -> Problems:
    """The GPUs' PCI links rise to what is possible under load.

    reads: NVML's width and generation of each link while the GPU copies from the host,
        the best of what is answered before the copies end, and what is possible in this
        host; GPUs are matched by their PCI address
    threshold: the width and the generation that are possible (a warning in virtual
        machines)
    source: NVIDIA's NVML manual: nvmlDeviceGetCurrPcieLinkWidth and -Generation,
        nvmlDeviceGetMaxPcieLinkWidth and -Generation
    fix: reseat the card or its riser; look at the slot's lanes and generation in the
        BIOS; sudo lspci -vv -s ADDRESS | grep Lnk
    needs: --burn, torch, an NVIDIA GPU, nvidia-ml-py
    why: Copies to the host and to network adapters take a multiple of the time.
    """
    for facts in fleet.having(LOADED_LINKS):
        # Virtual machines do not see the slot; where it is unknown, it may be one.
        severity = WARN if facts.values.get("gpu.is_virtual", True) else FAIL
        links: dict[str, Value] = facts.values[LOADED_LINKS]
        low = [each["address"] for each in links.values() if _is_low(each)]
        fix = f"sudo lspci -vv -s {low[0]} | grep Lnk" if low else ""
        fix += ", and so on" * (len(low) > 1)
        fix += "; reseat the card or its riser; look at the slot in the BIOS"
        found: list[tuple[CheckedDevice, Problem]] = []
        for name, link in links.items():
            device = CheckedDevice(facts.host, name, "")
            if link and "failure" in link:
                what = f"link is unknown: {link['failure']}"
                found.append((device, Problem(what, INFORM)))
            elif _is_low(link):
                what = (
                    f"used x{link['width']} of PCI generation {link['generation']} "
                    f"under load, x{link['max_width']} of generation "
                    f"{link['max_generation']} is possible"
                )
                found.append((device, Problem(what, severity, fix=fix)))
        yield from fold_devices(found)


def _is_low(link: Value) -> bool:
    if link is None or "failure" in link:
        return False
    return any(0 < link[n] < link[f"max_{n}"] for n in ("width", "generation"))
