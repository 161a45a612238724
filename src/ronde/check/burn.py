"""What ``--burn`` measures: a long matrix product on all processors, copies of GPUs.

The product runs in a program of its own on all processors, and after it the copies of
each GPU in another one, with nothing else at work.

Note [Exact products]
    The factors hold whole numbers of at most 2^20. A product of two is at most 2^40,
    and a sum of ``size`` of them at most ``size * 2^40``: up to a size of 2^13 that is
    2^53, below which float64 holds every whole number. So no step rounds, in whatever
    order the sums are made, fused or not, in blocks or by threads: all processors and
    libraries give the same bits, and one that does not is broken.
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
from importlib import import_module
from threading import Thread
from typing import Any, NamedTuple

from ronde.check.check import FAIL, INFORM, WARN, Family, Problem, Problems, check
from ronde.check.fleet import Fleet, Value
from ronde.check.hosts import HostSet, NodeContext, ProbeStep
from ronde.check.majority import find_few, find_odd
from ronde.check.probing import FactReader, run_probe
from ronde.processes import die_with_parent
from ronde.topology.cpu_sets import members
from ronde.topology.kernel_files import read_list
from ronde.topology.pci import plain_address

# Fact: by device, such as ``cpu`` or ``cuda:0``, what it made of the product.
PRODUCTS = "cluster.products"
# Fact: by device, such as ``cuda:0``: its model and how fast it copies.
COPIES = "cluster.gpu_copies"
CPU = "cpu"
_CUDA, _NUM_GPUS = "cuda:", "gpu.count"
_BURN_TIMEOUT_S = 130.0
_BESIDES_S = 60.0  # for torch to be imported, drivers to start, and each GPU to copy
_MAX_CHARS = 200

# See Note [Exact products].
MAX_SIZE = 1 << 13
_SIZE, _SEED = 2048, 2026
# From the 32 bits of a signed number to the 21 of one between -2^20 and 2^20.
_SHIFT = 11
# Products or copies that a GPU is given at once, so that it never waits.
NUM_IN_ROUND = 8

_HOST_BYTES = 32 << 20
_DEVICE_BYTES = 256 << 20  # of two buffers each; more than caches hold
_MIN_ROUNDS = 3
_FLOORS_GB_PER_S = {
    "A100-SXM4-40GB": 21.0,
    "A100-SXM4-80GB": 21.0,
    "H100 80GB HBM3": 48.0,
    "H200": 48.0,
}
"""By the model's whole name: parts of a GPU and boards with other links have others."""

Torch = Any
Tensor = Any


class Rounds(NamedTuple):
    """How long copies are repeated to find the quickest."""

    # Clocks and PCI link of an idle GPU are low, and take some time to rise.
    warm_up_s: float = 0.1
    measured_s: float = 0.2
    clock: Callable[[], float] = time.perf_counter


_ROUNDS = Rounds()


def burn_host(
    _: NodeContext, question: dict[str, Value], besides_s: float = _BESIDES_S
) -> dict[str, Value]:
    """Multiply two seeded matrices of ``size`` for ``seconds``, on all processors.

    Then each GPU copies, one after the other. The answer has ``products`` by device, of
    ``multiply``, and ``copies`` by GPU, of ``measure_gpu``; of what failed ``failure``.
    """
    limit_s = float(question["seconds"]) + besides_s
    multiplied = run_probe(__name__, limit_s, question)
    if multiplied.unreadable:
        raise OSError(multiplied.unreadable["products"])
    failed = {"all processors": {"failure": multiplied.failure}}
    products = multiplied.values.get("products", failed)
    gpus = [name for name in products if name.startswith(_CUDA)]
    copies: dict[str, Value] = {}
    if gpus:
        copied = run_probe(__name__, besides_s, {"do": "copy"})
        failed = {"failure": f"its program failed: {copied.failure}"}
        copies = {name: copied.values.get(name, failed) for name in gpus}
    return {"products": products, "copies": copies}


def read(reader: FactReader) -> None:
    """Be the program that multiplies or copies: the settings are the question."""
    # What asked may be killed, and this computes for long.
    die_with_parent(os.getppid(), signal.SIGKILL)
    try:
        torch: Torch = import_module("torch")
    except ImportError as error:
        reader.unreadable["products"] = f"torch cannot be imported there: {error}"
        return
    num_gpus = torch.cuda.device_count()
    if reader.settings["do"] == "burn_host":
        reader.values["products"] = _multiply_all(torch, num_gpus, reader.settings)
        return
    for number in range(num_gpus):
        reader.values[f"{_CUDA}{number}"] = measure_gpu(torch, number)


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
    """Return a square matrix in float64, the same for a seed with any torch."""
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size must be from 1 to {MAX_SIZE}, got {size}")
    drawn = bytearray(random.Random(seed).randbytes(4 * size * size))  # noqa: S311
    numbers = torch.frombuffer(drawn, dtype=torch.int32) >> _SHIFT
    return numbers.to(torch.float64).reshape(size, size)


def multiply(
    torch: Torch, device: str, factors: list[Tensor], seconds: float
) -> dict[str, Value]:
    """Multiply two factors, and again until the time is over.

    ``checksum`` is of the first product; the others are compared with it.
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
        # The number is there when all products are.
        num_wrong = int(wrong)
    passed_s = time.monotonic() - begun_s
    flop = 2 * left.shape[0] ** 3 * num_products
    return {
        "checksum": checksum,
        "num_products": num_products,
        "num_wrong": num_wrong,
        "gflop_per_s": round(flop / passed_s / 1e9, 3),
    }


def sum_up(torch: Torch, product: Tensor) -> str:
    """Return a checksum of whole numbers; minus zero is zero."""
    numbers = product.to("cpu").to(torch.int64).contiguous()
    data = ctypes.string_at(numbers.data_ptr(), 8 * numbers.numel())
    return hashlib.sha256(data).hexdigest()[:16]


def measure_gpu(torch: Torch, number: int) -> dict[str, Value]:
    """Measure what a GPU of CUDA's copies.

    ``is_near``: whether the host's memory was on the GPU's side of it.
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
        # CUDA's errors go on with advice for programmers.
        return {"failure": str(error).partition("\n")[0][:_MAX_CHARS]}
    return {"model": model, "is_near": is_near, **rates}


def measure_copies(
    host: Tensor,
    buffers: tuple[Tensor, Tensor],
    wait: Callable[[], None],
    rounds: Rounds = _ROUNDS,
) -> dict[str, float]:
    """Return GB/s (1e9) copied, the best of some rounds; in memory read and written."""
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
    """Return what the quickest of some rounds takes, once clocks have risen."""
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
    """Give new memory, near this thread, that GPUs copy by themselves."""
    memory = torch.empty(_HOST_BYTES, dtype=torch.uint8)
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


class CheckedDevice(NamedTuple):
    """One processor of one host; those of one model should be alike."""

    host: str
    name: str  # ``cpu``, all of the host's together, or ``cuda:0`` and so on
    model: str


class SpeedMeasure(NamedTuple):
    """What is measured of devices, and when one is slow."""

    action: str  # with the preposition before the amount: ``computed at``
    unit: str = "GB/s"
    # Nobody else uses a GPU: its speed is steadier than that of CPUs.
    slow: float = 0.9  # below this share of what most have: a warning
    very_slow: float = 0.8  # and below this one a failure

    def show(self, amount: float) -> str:
        return f"{amount:.3g} {self.unit}"


def find_slow_devices(
    amounts: Mapping[CheckedDevice, float], measure: SpeedMeasure
) -> dict[CheckedDevice, Problem]:
    """Return the devices slower than most of their model; in a draw all."""
    found: dict[CheckedDevice, Problem] = {}
    models: dict[str, dict[CheckedDevice, float]] = defaultdict(dict)
    for device, amount in amounts.items():
        models[device.model][device] = amount
    for of_model in models.values():
        few = find_few(of_model, measure.slow)
        fewest = find_few(of_model, measure.very_slow)
        for device in few.hosts:
            if few.is_draw:
                others = [a for other, a in of_model.items() if other != device]
                ends = (measure.show(min(others)), measure.show(max(others)))
                usual = f"{' to '.join(dict.fromkeys(ends))} elsewhere"
            else:
                kind = "hosts" if device.name == CPU else "GPUs of this model"
                usual = f"{measure.show(few.usual)} on most {kind}"
            # In a draw no single device can be said to crawl.
            is_bad = device in fewest.hosts and not fewest.is_draw
            severity = FAIL if is_bad else WARN
            message = f"{measure.action} {measure.show(amounts[device])}"
            found[device] = Problem(message, severity, usual)
    return found


def _of_hosts(found: Iterable[tuple[CheckedDevice, Problem]]) -> Problems:
    for device, problem in found:
        message = f"{device.name} {problem.message}"
        yield problem._replace(message=message, host=device.host)


@check(FAIL, PRODUCTS)
def product_checksum(fleet: Fleet) -> Problems:
    """All processors compute the same.

    reads: the checksum of a float64 matrix product on CPUs and GPUs, for --burn's time
    threshold: the same bits everywhere: sums below 2^53 are exact in any order
    source: IEEE 754; silent errors of processors are common in large clusters: Dixit et
        al., Silent Data Corruptions at Scale, arXiv 2102.11245
    fix: Take the host out and test it: dcgmi diag -r 3; memtester 1G 1; stress-ng --cpu
        0 --verify -t 10m
    needs: --burn, torch
    why: A processor that silently computes wrong results spoils the model of all ranks.
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
    """All processors compute as fast under load.

    reads: the speed of that product, of all hosts' CPUs and of GPUs of one model
    threshold: CPUs: 80% of what most hosts reach, below 50% a failure; GPUs: 90% of
        what most of the model reach, below 80% a failure
    source: ronde's own: CPUs of like hosts differ more than GPUs of one model
    fix: Look at clocks, power cap and heat of that device while it computes
    needs: --burn, torch; several hosts, or several GPUs of one model
    why: Every collective waits for the slowest.
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
    """GPUs of one model copy as fast.

    reads: copies from pinned memory of the host, to it, and within the GPU's memory
        (read and written both count), the best of some rounds; one GPU after the other,
        from CPUs next to it, after the product of --burn
    threshold: 90% of what most GPUs of the model reach, on all hosts; below 80% a
        failure; with the host at least 21 GB/s on A100 SXM, 48 GB/s on H100 SXM and
        H200 SXM. A warning at most where no CPU next to the GPU could be chosen
    source: shares: ronde's own; 21 and 48 GB/s: Azure's node health checks 0e0a1ac
        (nd96asr_v4.conf, nd96isr_h100_v5.conf, nd96isr_h200_v5.conf: check_gpu_bw)
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
    """Return what is slow or below its model's floor, the worse of the two."""
    found: dict[CheckedDevice, Problem] = {}
    for device, rate in rates.items():
        problem = slow.get(device)
        floor = _FLOORS_GB_PER_S.get(device.model.removeprefix("NVIDIA "), 0.0)
        if rate < floor and (problem is None or problem.severity is not FAIL):
            message = f"{measure.action} {measure.show(rate)}, below the {floor:g}"
            problem = Problem(f"{message} of a sound {device.model}", FAIL)
        if problem is not None and not known[device]["is_near"]:
            message = f"{problem.message} (its memory there may have been far)"
            problem = problem._replace(severity=WARN, message=message)
        if problem is not None:
            found[device] = problem
    return found
