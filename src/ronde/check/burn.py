"""Measurements with torch: matrix products and GPU copies.

``--burn`` multiplies matrices on all CPUs and GPUs, then measures the copies of each
GPU. ``--bandwidth`` measures copies between the GPUs of a host. Each of these
measurements runs in its own process.

Note [Exact products]
    The factors' elements are integers, at most 2^20 in size. A product of two is at
    most 2^40, and a sum of ``size`` products at most ``size * 2^40``. For sizes up to
    2^13 that is at most 2^53, and float64 represents all integers up to 2^53. So no
    step rounds, in any order of summation, with or without fused operations, blocks
    and threads. All libraries and all intact processors give the same bits.
"""

import ctypes
import hashlib
import math
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import combinations
from statistics import median
from threading import Thread
from typing import Any, NamedTuple

from ronde.check.check import FAIL, INFORM, WARN, Family, Problem, Problems, check
from ronde.check.fleet import Fleet, Value
from ronde.check.hosts import HostSet, NodeContext, ProbeStep
from ronde.check.majority import find_less, find_odd
from ronde.check.probing import FactReader, run_probe
from ronde.processes import die_with_parent
from ronde.topology.cpu_sets import members
from ronde.topology.kernel_files import read_list
from ronde.topology.pci import plain_address
from ronde.units import list_first

# Fact: the result of ``multiply``, keyed by device, such as ``cpu`` or ``cuda:0``.
PRODUCTS = "cluster.products"
# Fact: model and copy rates, keyed by device, such as ``cuda:0``.
COPIES = "cluster.gpu_copies"
# Fact: GB/s (1e9) of the slower direction, keyed by pair, such as ``0-1``; 0 if data
# arrives changed.
PAIRS = "gpu.pairs"
CPU = "cpu"
_CUDA, _NUM_GPUS = "cuda:", "gpu.count"
_BUILD, _NVLINKS = "versions.torch_build", "gpu.nvlinks"
_BURN_TIMEOUT_S = 130.0
_OVERHEAD_S = 60.0  # to import torch, start drivers, and copy with each GPU
_PAIRS_S, _SLACK_S = 120.0, 5.0  # to import torch, and half a second for each pair
_MAX_CHARS = 200

# See Note [Exact products].
MAX_SIZE = 1 << 13
_SIZE, _SEED = 2048, 2026
# From a signed number of 32 bits to one of 21, between -2^20 and 2^20.
_SHIFT = 11
NUM_IN_ROUND = 8  # products or copies queued at once, so that a GPU is never idle

_HOST_BYTES = 32 << 20
_DEVICE_BYTES = 256 << 20  # size of each of two buffers; more than caches hold
_MIN_ROUNDS = 3
_SLOW, _VERY_SLOW = 0.9, 0.7  # pairs of GPUs
_FLOORS_GB_PER_S = {
    "A100-SXM4-40GB": 21.0,
    "A100-SXM4-80GB": 21.0,
    "H100 80GB HBM3": 48.0,
    "H200": 48.0,
}
"""Keyed by full model name, since other boards with the same GPU have other links."""

Torch = Any
Tensor = Any


class Rounds(NamedTuple):
    """Durations of a benchmark's warm-up and of its measurement."""

    # Clocks and PCI link of an idle GPU are slow, and take some time to speed up.
    warm_up_s: float = 0.1
    measured_s: float = 0.2
    clock: Callable[[], float] = time.perf_counter


_ROUNDS = Rounds()


def burn_host(
    _: NodeContext, question: dict[str, Value], overhead_s: float = _OVERHEAD_S
) -> dict[str, Value]:
    """Multiply matrices on all CPUs and GPUs, then measure each GPU's copy rates.

    ``question`` has ``seconds``, ``size`` and ``seed``. The answer has ``products``,
    the results of ``multiply`` by device, and ``copies``, the results of
    ``measure_gpu`` by device. For a device that failed, the result has only
    ``failure``, the reason.
    """
    limit_s = float(question["seconds"]) + overhead_s
    multiplied = run_probe(__name__, limit_s, question)
    if multiplied.unreadable:
        raise OSError(multiplied.unreadable["products"])
    failed = {"all processors": {"failure": multiplied.failure}}
    products = multiplied.values.get("products", failed)
    gpus = [name for name in products if name.startswith(_CUDA)]
    copies: dict[str, Value] = {}
    if gpus:
        copied = run_probe(__name__, overhead_s, {"do": "copy"})
        failed = {"failure": f"its program failed: {copied.failure}"}
        copies = {name: copied.values.get(name, failed) for name in gpus}
    return {"products": products, "copies": copies}


def copy_pairs(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    copied = run_probe(__name__, float(question["seconds"]), question)
    reason = copied.unreadable.get("products") or copied.unreadable.get("pairs", "")
    if failure := copied.failure or reason:
        raise OSError(failure)
    return copied.values


def read(reader: FactReader) -> None:
    """Run the measurement that the setting ``do`` names, in this process."""
    # This computes for long, and the parent may be killed.
    die_with_parent(os.getppid(), signal.SIGKILL)
    try:
        torch: Torch = import_module("torch")
    except ImportError as error:
        reader.unreadable["products"] = f"torch cannot be imported there: {error}"
        return
    num_gpus = torch.cuda.device_count()
    match reader.settings["do"]:
        case "burn_host":
            reader.values["products"] = _multiply_all(torch, num_gpus, reader.settings)
        case "copy_pairs":
            try:
                reader.values["pairs"] = measure_pairs(torch, num_gpus)
            except RuntimeError as error:
                reader.unreadable["pairs"] = f"torch failed: {_first_line(error)}"
        case _:
            for number in range(num_gpus):
                reader.values[f"{_CUDA}{number}"] = measure_gpu(torch, number)


def _first_line(error: Exception) -> str:
    # Errors of CUDA continue with advice for programmers.
    return str(error).partition("\n")[0][:_MAX_CHARS]


def _multiply_all(
    torch: Torch, num_gpus: int, settings: Mapping[str, Value]
) -> dict[str, Value]:
    seconds, size, seed = (settings[name] for name in ("seconds", "size", "seed"))
    factors = [make_factor(torch, size, seed + number) for number in range(2)]
    found: dict[str, dict[str, Value]] = {}

    def compute(device: str) -> None:
        try:
            found[device] = multiply(torch, device, factors, seconds)
            if device != CPU:
                found[device]["model"] = torch.cuda.get_device_name(device)
        except RuntimeError as error:
            found[device] = {"failure": str(error)[:_MAX_CHARS]}

    devices = [CPU, *(f"{_CUDA}{number}" for number in range(num_gpus))]
    computing = [Thread(target=compute, args=(name,)) for name in devices]
    for each in computing:
        each.start()
    for each in computing:
        each.join()
    return found


def make_factor(torch: Torch, size: int, seed: int) -> Tensor:
    """Return a square float64 matrix that depends on ``size`` and ``seed`` only.

    The numbers do not come from torch's generator, so all versions of torch agree.
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size must be from 1 to {MAX_SIZE}, got {size}")
    drawn = bytearray(random.Random(seed).randbytes(4 * size * size))  # noqa: S311
    numbers = torch.frombuffer(drawn, dtype=torch.int32) >> _SHIFT
    return numbers.to(torch.float64).reshape(size, size)


def multiply(
    torch: Torch, device: str, factors: list[Tensor], seconds: float
) -> dict[str, Value]:
    """Multiply two matrices repeatedly for ``seconds``.

    Return the checksum of the first product, the number of products, the number of
    products that differ from the first one, and the speed.
    """
    left, right = (factor.to(device) for factor in factors)
    first = left @ right
    checksum = sum_up(torch, first)
    num_in_round = 1 if device == CPU else NUM_IN_ROUND
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    begun_s = time.monotonic()
    num_products = num_wrong = 0
    while num_products == 0 or time.monotonic() < begun_s + seconds:
        for _ in range(num_in_round):
            wrong += (left @ right != first).any()
        num_products += num_in_round
        # Waits for all products.
        num_wrong = int(wrong)
    passed_s = time.monotonic() - begun_s
    flop = 2 * left.shape[0] ** 3 * num_products
    return {
        "checksum": checksum,
        "num_products": num_products,
        "num_wrong": num_wrong,
        "gflop_per_s": round(flop / passed_s / 1e9, 6),
    }


def sum_up(torch: Torch, product: Tensor) -> str:
    """Return a checksum of an integer-valued matrix; -0.0 counts as 0.0."""
    numbers = product.to("cpu").to(torch.int64).contiguous()
    data = ctypes.string_at(numbers.data_ptr(), 8 * numbers.numel())
    return hashlib.sha256(data).hexdigest()[:16]


def measure_gpu(torch: Torch, number: int) -> dict[str, Value]:
    """Measure the rates of copies within a GPU, and to and from host memory.

    ``is_near`` is True if the host buffer was allocated from a CPU next to the GPU.
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
                torch.zeros(_DEVICE_BYTES, dtype=torch.uint8, device="cuda")
                for _ in range(2)
            )
            rates = measure_copies(host, (source, target), torch.cuda.synchronize)
            del source, target
    except RuntimeError as error:
        return {"failure": _first_line(error)}
    return {"model": model, "is_near": is_near, **rates}


def measure_copies(
    host: Tensor,
    buffers: tuple[Tensor, Tensor],
    wait: Callable[[], None],
    rounds: Rounds = _ROUNDS,
) -> dict[str, float]:
    """Return the best rate of each kind of copy in GB/s (1e9 bytes).

    The bytes of a copy within device memory count twice, as read and as written.
    """
    source, target = buffers
    part = source[: host.numel()]

    def rate(to: Tensor, of: Tensor) -> float:
        def copy() -> None:
            for _ in range(NUM_IN_ROUND):
                to.copy_(of, non_blocking=True)
            wait()

        return round(NUM_IN_ROUND * of.nbytes / quickest_s(copy, rounds) / 1e9, 3)

    return {
        "host_to_device_gb_per_s": rate(part, host),
        "device_to_host_gb_per_s": rate(host, part),
        "device_memory_gb_per_s": 2 * rate(target, source),
    }


def quickest_s(work: Callable[[], None], rounds: Rounds = _ROUNDS) -> float:
    """Return the duration of the fastest call of ``work`` after a warm-up."""
    taken: list[float] = []
    now_s = rounds.clock()
    warm_s, end_s = now_s + rounds.warm_up_s, math.inf
    while len(taken) < _MIN_ROUNDS or now_s < end_s:
        before_s = now_s
        work()
        now_s = rounds.clock()
        if before_s >= warm_s:
            end_s = min(end_s, before_s + rounds.measured_s)
            taken.append(now_s - before_s)
    return min(taken)


@contextmanager
def _pinned(torch: Torch) -> Generator[Tensor]:
    """Yield a new pinned buffer, allocated on the NUMA node of this thread."""
    memory = torch.empty(_HOST_BYTES, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise RuntimeError(f"cannot pin host memory: CUDA error {code}")
    try:
        yield memory
    finally:
        try:
            # Memory may be released only after all copies.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        finally:
            runtime.cudaHostUnregister(memory.data_ptr())


def address_of(properties: Any) -> str:  # noqa: ANN401  torch's, without types
    """Return a GPU's PCI address as sysfs writes it, or an empty string if unknown."""
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        device = properties.pci_device_id
    except AttributeError:
        return ""
    return plain_address(f"{domain:x}:{bus:x}:{device:x}.0")


@contextmanager
def staying_near(address: str, root: str = "") -> Generator[bool]:
    """Bind this thread to the CPUs next to a GPU, so that it allocates memory there.

    Yield True, or False if the thread cannot be bound.
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


def run_burn(hosts: HostSet) -> None:
    seconds = float(hosts.settings["burn_s"])
    question = {"do": "burn_host", "seconds": seconds, "size": _SIZE, "seed": _SEED}
    for host, reply in hosts.ask_all(question, seconds + _BURN_TIMEOUT_S).items():
        products, copies = (reply.values.get(n, {}) for n in ("products", "copies"))
        if reply.failure:
            hosts.note_unread(host, PRODUCTS, reply.failure)
        else:
            hosts.note(host, PRODUCTS, products)
        if copies:
            hosts.note(host, COPIES, copies)
        elif hosts.facts[host].values.get(_NUM_GPUS):
            failures = [reply.failure, *(p.get("failure") for p in products.values())]
            reason = next(filter(None, failures), "torch sees no GPU there")
            hosts.note_unread(host, COPIES, reason)


BURN_STEP = ProbeStep("burning", run_burn, (PRODUCTS, COPIES), (_NUM_GPUS,), "burn_s")


def measure_pairs(
    torch: Torch, num_gpus: int, rounds: Rounds = _ROUNDS
) -> dict[str, float]:
    """Return the rate of each GPU pair's slower direction, measuring pairs in turn."""
    found: dict[str, float] = {}
    zeros = partial(torch.zeros, _DEVICE_BYTES, dtype=torch.uint8)
    for one, other in combinations(range(num_gpus), 2):
        a, b = zeros(device=f"cuda:{one}"), zeros(device=f"cuda:{other}")
        there = _pair_rate(torch, a.fill_(1), b, rounds)
        found[f"{one}-{other}"] = min(there, _pair_rate(torch, b.fill_(2), a, rounds))
        del a, b
        torch.cuda.empty_cache()
    return found


def _pair_rate(torch: Torch, source: Tensor, target: Tensor, rounds: Rounds) -> float:
    """Return the best rate of a copy in GB/s, or 0 if the data arrives changed."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            torch.cuda.synchronize(tensor.device)

    seconds = quickest_s(copy, rounds)
    is_right = bool((target == source.flatten()[0].item()).all())
    return round(is_right * source.nbytes / seconds / 1e9, 3)


def run_pairs(hosts: HostSet) -> None:
    able = {
        name: {"do": "copy_pairs", "seconds": _PAIRS_S}
        for name, facts in hosts.facts.items()
        if int(facts.values.get(_NUM_GPUS) or 0) > 1
        and str(facts.values.get(_BUILD)).startswith(("CUDA", "HIP"))
    }
    for name, reply in hosts.ask(able, _PAIRS_S + _SLACK_S).items():
        if reply.failure:
            hosts.note_unread(name, PAIRS, reply.failure)
        else:
            hosts.note(name, PAIRS, reply.values["pairs"])
    if len(hosts.names) == 1 and not able:
        reason = "torch cannot use two GPUs here; name more hosts with -H"
        hosts.note_unread(hosts.names[0], PAIRS, reason)


PAIRS_STEP = ProbeStep(
    "GPU pairs", run_pairs, (PAIRS,), (_NUM_GPUS, _BUILD), "bandwidth"
)


class CheckedDevice(NamedTuple):
    """All CPUs or one GPU of a host, to be compared with devices of the same model."""

    host: str
    name: str  # ``cpu`` for all CPUs of the host, or ``cuda:0`` and so on
    model: str


class SpeedMeasure(NamedTuple):
    """The wording for a measured speed, and its limits as shares of the usual speed."""

    action: str  # with the preposition before the amount: ``computed at``
    unit: str = "GB/s"
    # Speeds of GPUs, which run no other programs, vary less than those of CPUs.
    slow: float = 0.9  # a warning
    very_slow: float = 0.8  # a failure

    def show(self, amount: float) -> str:
        return f"{amount:.3g} {self.unit}"


def find_slow_devices(
    amounts: Mapping[CheckedDevice, float], measure: SpeedMeasure
) -> dict[CheckedDevice, Problem]:
    """Return a problem for each device that is slower than most devices of its model.

    If there is no majority, each device of the model gets a problem.
    """
    found: dict[CheckedDevice, Problem] = {}
    models: dict[str, dict[CheckedDevice, float]] = defaultdict(dict)
    for device, amount in amounts.items():
        models[device.model][device] = amount
    for of_model in models.values():
        is_cpu = next(iter(of_model)).name == CPU
        kind = "hosts" if is_cpu else "GPUs of this model"
        for device, severity, usual in find_less(
            of_model, measure.show, measure.slow, measure.very_slow, kind
        ):
            message = f"{measure.action} {measure.show(amounts[device])}"
            found[device] = Problem(message, severity, usual)
    return found


def _of_hosts(found: Iterable[tuple[CheckedDevice, Problem]]) -> Problems:
    for device, problem in found:
        message = f"{device.name} {problem.message}"
        yield problem._replace(message=message, host=device.host)


@check(FAIL, PRODUCTS)
def product_checksum(fleet: Fleet) -> Problems:
    """All CPUs and GPUs compute the same result.

    reads: the checksum of a float64 matrix product, which CPUs and GPUs compute
        repeatedly for the time of --burn
    threshold: the same bits everywhere; sums of integers below 2^53 are exact in
        float64, in any order
    source: IEEE 754; Dixit et al., Silent Data Corruptions at Scale, arXiv 2102.11245:
        silent errors of processors are common in large clusters
    fix: Remove the host from the job and test it: dcgmi diag -r 3; memtester 1G 1;
        stress-ng --cpu 0 --verify -t 10m
    needs: --burn, torch
    why: A processor that silently computes wrong results corrupts the whole model.
    """
    checksums: dict[tuple[str, str], str] = {}
    for host, products in fleet.known(PRODUCTS).items():
        for device, each in products.items():
            if "failure" in each:
                message = f"the product on {device} failed: {each['failure']}"
                yield Problem(message, host=host)
                continue
            checksums[host, device] = each["checksum"]
            if each["num_wrong"]:
                message = f"{each['num_wrong']} of {each['num_products']} products on "
                yield Problem(f"{message}{device} differ from the first one", host=host)
    for (host, device), value, usual in find_odd(checksums, of="devices"):
        message = f"the product on {device} has checksum {value}"
        yield Problem(message, usual=usual, host=host)


_CPU_SPEED = SpeedMeasure("computed at", "GFLOP/s", 0.8, 0.5)
_GPU_SPEED = SpeedMeasure("computed at", "GFLOP/s")


@check(FAIL, PRODUCTS)
def product_speed(fleet: Fleet) -> Problems:
    """All CPUs and GPUs compute equally fast under load.

    reads: the speed of the matrix products of product-checksum
    threshold: CPUs: 80% of the speed of most hosts; below 50% is a failure. GPUs: 90%
        of the speed of most GPUs of the model; below 80% is a failure
    source: ronde's choice: CPUs of equal hosts differ more than GPUs of one model
    fix: Look at the clocks, power cap and temperature of the device while it computes
    needs: --burn, torch; several hosts, or several GPUs of one model
    why: Every collective waits for the slowest rank.
    """
    cpus: dict[CheckedDevice, float] = {}
    gpus: dict[CheckedDevice, float] = {}
    for host, products in fleet.known(PRODUCTS).items():
        for name, each in products.items():
            if "failure" not in each:
                device = CheckedDevice(host, name, each.get("model", name))
                (cpus if name == CPU else gpus)[device] = float(each["gflop_per_s"])
    slow = find_slow_devices(cpus, _CPU_SPEED) | find_slow_devices(gpus, _GPU_SPEED)
    return _of_hosts(slow.items())


_IN_MEMORY = "device_memory_gb_per_s"
_MEASURES = {
    "host_to_device_gb_per_s": SpeedMeasure("copied from the host at"),
    "device_to_host_gb_per_s": SpeedMeasure("copied to the host at"),
    _IN_MEMORY: SpeedMeasure("copied within its memory at"),
}


@check(FAIL, COPIES, family=Family.GPU)
def gpu_copy_speed(fleet: Fleet) -> Problems:
    """GPUs of one model copy equally fast.

    reads: copies to and from pinned host memory, and within GPU memory (bytes read plus
        bytes written). The best of several rounds counts. GPUs are measured one at a
        time, from CPUs next to them, after the matrix products of --burn
    threshold: 90% of the rate of most GPUs of the model on all hosts; below 80% is a
        failure. Copies to and from the host: at least 21 GB/s on A100 SXM, and 48 GB/s
        on H100 SXM and H200 SXM; only a warning if no CPU next to the GPU can be used
    source: ronde's choice: the shares; Azure's node health checks 0e0a1ac
        (nd96asr_v4.conf, nd96isr_h100_v5.conf, nd96isr_h200_v5.conf: check_gpu_bw): 21
        and 48 GB/s
    fix: Look at the GPU's clocks and its PCI link under load (sudo lspci -vv | grep
        Lnk), and reseat it; if copies within its own memory are slow: dcgmi diag -r 3
    needs: --burn, torch and GPUs; for the comparison several GPUs of one model
    why: Every step waits for the slowest GPU.
    """
    known: dict[CheckedDevice, Value] = {}
    found: list[tuple[CheckedDevice, Problem]] = []
    for host, gpus in fleet.known(COPIES).items():
        for name, copies in gpus.items():
            device = CheckedDevice(host, name, copies.get("model", ""))
            if "failure" in copies:
                message = f"could not be measured: {copies['failure']}"
                found.append((device, Problem(message, INFORM)))
            else:
                known[device] = copies
    for name, measure in _MEASURES.items():
        rates = {device: float(copies[name]) for device, copies in known.items()}
        slow = find_slow_devices(rates, measure)
        if name != _IN_MEMORY:
            slow = _judge_with_host(known, rates, slow, measure)
        found += slow.items()
    yield from _of_hosts(found)


def _judge_with_host(
    known: dict[CheckedDevice, Value],
    rates: dict[CheckedDevice, float],
    slow: dict[CheckedDevice, Problem],
    measure: SpeedMeasure,
) -> dict[CheckedDevice, Problem]:
    """Return ``slow``, plus the devices below the minimum rate of their model."""
    found: dict[CheckedDevice, Problem] = {}
    for device, rate in rates.items():
        problem = slow.get(device)
        floor = _FLOORS_GB_PER_S.get(device.model.removeprefix("NVIDIA "), 0.0)
        if rate < floor and (problem is None or problem.severity is not FAIL):
            message = f"{measure.action} {measure.show(rate)}, below the {floor:g}"
            problem = Problem(f"{message} of a healthy {device.model}", FAIL)
        if problem is not None and not known[device]["is_near"]:
            message = problem.message
            message += " (the host memory may have been on another NUMA node)"
            problem = problem._replace(severity=WARN, message=message)
        if problem is not None:
            found[device] = problem
    return found


@check(FAIL, PAIRS, optional=(_NVLINKS,))
def gpu_pair_speed(fleet: Fleet) -> Problems:
    """All pairs of GPUs on a host copy correctly and equally fast.

    reads: copies of 256 MiB in both directions between each two GPUs, one pair at a
        time
    threshold: the data arrives unchanged. With NVLinks: below 90 % of the median of the
        host's pairs is a warning, below 70 % a failure. Without NVLinks: below 70 % is
        a warning
    source: ronde's choice: 10 % is more than the noise of short copies, and 30 % slows
        a job
    fix: nvidia-smi topo -m; nvidia-smi nvlink -e; without NVLinks look at ACS and the
        slots
    needs: --bandwidth, torch, two GPUs
    why: A ring goes through all GPUs, so the slowest pair sets the pace of every step.
    """
    for facts in fleet.having(PAIRS):
        pairs: dict[str, float] = facts.values[PAIRS]
        wrong = [pair for pair, rate in pairs.items() if not rate]
        if wrong:
            message = f"GPUs {list_first(wrong)}: the data arrives changed"
            fix = "switch ACS and the IOMMU's translation off, else reset the GPUs"
            yield Problem(message, fix=fix, host=facts.host)
        usual = median(pairs.values()) if pairs else 0.0
        links = facts.values.get(_NVLINKS) or ()
        has_nvlinks = bool(links) and all(any(each or ()) for each in links)
        slow: dict[bool, list[str]] = defaultdict(list)
        for pair, rate in pairs.items():
            # Without NVLinks pairs on two sockets are always slower.
            limit = _SLOW if has_nvlinks else _VERY_SLOW
            if 0 < rate < limit * usual:
                is_bad = has_nvlinks and rate < _VERY_SLOW * usual
                slow[is_bad].append(f"{pair} ({rate:.3g} GB/s)")
        median_text = f"{usual:.3g} GB/s is the median of its pairs"
        for is_bad, names in slow.items():
            severity, message = FAIL if is_bad else WARN, f"GPUs {list_first(names)}"
            yield Problem(message, severity, median_text, host=facts.host)
