"""How fast hosts compute: a little work always, a long matrix product with --burn.

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
import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import Any

from ronde.check.check import (
    FAIL,
    WARN,
    FactReader,
    Family,
    Fleet,
    Problem,
    Problems,
    Value,
    check,
    find_few,
    find_odd,
    show_usual,
)
from ronde.check.gpu.copies import COPIES, measure_gpu
from ronde.check.gpu.judges import (
    CPU,
    CheckedDevice,
    SpeedMeasure,
    find_slow_devices,
    fold_devices,
)
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.probing import ProbeEntry, run_probes
from ronde.launch.process_tree import die_with_parent

# Facts: seconds for a fixed piece of work, while all hosts do it; and of CPU for it,
# the best of many on several CPUs.
PACE, PACE_CPU = "cluster.compute_s", "cluster.compute_cpu_s"
# Fact: by device, such as ``cpu`` or ``cuda:0``, what it made of the product.
PRODUCTS = "cluster.products"
_NUM_GPUS = "gpu.count"
_BURN_TIMEOUT_S = 130.0

_SLOW, _VERY_SLOW, _SLOW_CPU = 2.0, 4.0, 1.5
_SPIN_S, _SPIN_TIMEOUT_S, _MAX_ROUNDS = 0.2, 10.0, 5
_BASE, _EXPONENT, _MODULUS = 3, (1 << 512) - 1, (1 << 521) - 1
"""Half a millisecond or so, in the interpreter's own arithmetic: no library of which a
host may have another one, and no instructions that some processors lack."""

# On each CPU of a tour several pieces: the first find cold caches and a slow clock.
_MAX_CPUS, _NUM_PIECES = 8, 8

# See Note [Exact products].
MAX_SIZE = 1 << 13
_SIZE, _SEED = 2048, 2026
# From the 32 bits of a signed number to the 21 of one between -2^20 and 2^20.
_SHIFT = 11
# Products that a GPU is given at once, so that it never waits for this program.
NUM_IN_ROUND = 8
# For torch to be imported, drivers to start, and each GPU to copy.
_BESIDES_S = 60.0
_MAX_CHARS = 200
Torch = Any
Tensor = Any


def spin(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Compute the same again and again for ``seconds``, where the system puts it.

    The answer has ``wall_s`` for one piece of work, waiting included: hosts that share
    their CPUs, or are limited, have more of it; and ``cpu_s`` of the quickest one on
    any of some CPUs, which a busy neighbour on one core does not change.
    """
    begun_s = now_s = time.monotonic()
    num_pieces, best_s = 0, float("inf")
    while num_pieces == 0 or now_s < begun_s + float(question["seconds"]):
        best_s = min(best_s, _compute_piece())
        num_pieces += 1
        now_s = time.monotonic()
    allowed = sorted(os.sched_getaffinity(0))
    # In some containers no CPU may be chosen.
    with suppress(PermissionError):
        try:
            for cpu in allowed[:: -(-len(allowed) // _MAX_CPUS)]:
                os.sched_setaffinity(0, {cpu})
                best_s = min(best_s, *(_compute_piece() for _ in range(_NUM_PIECES)))
        finally:
            os.sched_setaffinity(0, allowed)
    return {"wall_s": (now_s - begun_s) / num_pieces, "cpu_s": best_s}


def _compute_piece() -> float:
    """Return the seconds of CPU that one piece of work takes now and here."""
    cpu_s = time.thread_time()
    pow(_BASE, _EXPONENT, _MODULUS)
    return time.thread_time() - cpu_s


def measure_pace(hosts: HostSet) -> None:
    """Store the best of some rounds, in which all take part; one if none seems slow."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(_MAX_ROUNDS):
        replies = hosts.ask_all({"do": "spin", "seconds": _SPIN_S}, _SPIN_TIMEOUT_S)
        for host, reply in replies.items():
            if reply.failure:
                hosts.note_unread(host, PACE, reply.failure)
                continue
            wall_s, cpu_s = reply.values["wall_s"], reply.values["cpu_s"]
            known_wall_s, known_cpu_s = best.get(host, (wall_s, cpu_s))
            best[host] = min(wall_s, known_wall_s), min(cpu_s, known_cpu_s)
        walls = {host: wall_s for host, (wall_s, _) in best.items()}
        cpus = {host: cpu_s for host, (_, cpu_s) in best.items()}
        if not find_slow(walls, _SLOW) and not find_slow(cpus, _SLOW_CPU):
            break
    for host, each in best.items():
        hosts.facts[host].values.update(zip((PACE, PACE_CPU), each, strict=True))


PACE_STEP = ProbeStep("pace", measure_pace, (PACE, PACE_CPU))


def _speeds(paces: Mapping[str, float]) -> dict[str, float]:
    return {host: 1 / max(pace, 1e-9) for host, pace in paces.items()}


def find_slow(paces: Mapping[str, float], limit: float) -> tuple[str, ...]:
    """Return the hosts that need more than so many times what most need."""
    return find_few(_speeds(paces), 1 / limit).hosts


@check(Family.CLUSTER, FAIL, PACE, PACE_CPU)
def slow_host(fleet: Fleet) -> Problems:
    """All hosts compute as fast.

    reads: the time and CPU time of a fixed computation, on all hosts at once
    threshold: twice what most hosts need, four times a failure; 1.5 times the CPU time
    source: ronde's own: hosts that share two busy CPUs stay below twice
    fix: Look at who uses or limits its CPUs: top, taskset -p $$, nice, cpu.max
    needs: several hosts
    why: Every collective waits for the slowest host.
    """
    walls, cpus = fleet.known(PACE), fleet.known(PACE_CPU)
    slow_cpus, speeds = find_slow(cpus, _SLOW_CPU), _speeds(walls)
    few, fewest = find_few(speeds, 1 / _SLOW), find_few(speeds, 1 / _VERY_SLOW)

    def show(speed: float) -> str:
        return f"{1000 / speed:.2g} ms"

    for host in (host for host in walls if host in (*few.hosts, *slow_cpus)):
        share = min(1.0, cpus[host] / max(walls[host], 1e-9))
        # In a draw no single host can be said to crawl.
        is_bad = host in fewest.hosts and not fewest.is_draw
        fix = "Its CPU is clocked down or another model: look at governor, power cap "
        yield Problem(
            f"{show(speeds[host])} for a piece of work, with {share:.0%} of a CPU",
            FAIL if is_bad else WARN,
            show_usual(host, speeds, few, show),
            f"{fix}and heat" if host in slow_cpus else "",
            host,
        )


def burn(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Multiply two seeded matrices of ``size`` for ``seconds``, on all processors.

    Then each GPU copies, one after the other. The answer has ``products``: by device;
    see ``multiply``. Of a device that failed, and of all where all hung, ``failure``
    alone. ``copies``: by GPU; see ``copies.measure_gpu``.

    Raises:
        OSError: There is no torch.
    """
    limit_s = float(question["seconds"]) + _BESIDES_S
    program = ProbeEntry((__name__,), limit_s, "", question)
    values, unreadable, failure, _seconds = run_probes({"": program}, {})[""]
    if unreadable:
        raise OSError(unreadable["products"])
    products = values.get("products", {"all processors": {"failure": failure}})
    gpus = [name for name in products if name.startswith("cuda:")]
    copies: dict[str, Value] = {}
    if gpus:
        program = ProbeEntry((measure_gpu.__module__,), _BESIDES_S, "")
        copied = run_probes({"": program}, {})[""]
        failed = {"failure": f"its program failed: {copied.failure}"}
        copies = {name: copied.values.get(name, failed) for name in gpus}
    return {"products": products, "copies": copies}


def read(reader: FactReader) -> None:
    """Be the program that multiplies: the settings are the question."""
    # What asked may be killed, and this computes for long.
    die_with_parent(os.getppid(), signal.SIGKILL)
    seconds, size, seed = (reader.settings[n] for n in ("seconds", "size", "seed"))
    try:
        torch: Torch = import_module("torch")
    except ImportError as error:
        reader.unreadable["products"] = f"torch cannot be imported there: {error}"
        return
    factors = [make_factor(torch, size, seed + number) for number in range(2)]
    found: dict[str, dict[str, Value]] = {}

    def compute(device: str) -> None:
        try:
            found[device] = multiply(torch, device, factors, seconds)
            if device != CPU:
                found[device]["model"] = torch.cuda.get_device_name(device)
        except RuntimeError as error:
            found[device] = {"failure": str(error)[:_MAX_CHARS]}

    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    computing = [Thread(target=compute, args=(name,)) for name in (CPU, *gpus)]
    for each in computing:
        each.start()
    for each in computing:
        each.join()
    reader.values["products"] = found


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

    Return ``checksum`` of the first product, ``num_products`` after it, how many of
    them were not like the first (``num_wrong``), and their ``gflop_per_s``.
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


def run_burn(hosts: HostSet) -> None:
    """Compute on all hosts at once, for the seconds of the setting ``burn_s``."""
    seconds = float(hosts.settings["burn_s"])
    question = {"do": "burn", "seconds": seconds, "size": _SIZE, "seed": _SEED}
    for host, reply in hosts.ask_all(question, seconds + _BURN_TIMEOUT_S).items():
        if reply.failure:
            hosts.note_unread(host, PRODUCTS, reply.failure)
        else:
            hosts.note(host, PRODUCTS, reply.values["products"])
        copies: dict[str, Value] = reply.values.get("copies", {})
        failed = {g: each["failure"] for g, each in copies.items() if "failure" in each}
        if len(failed) < len(copies):
            hosts.note(host, COPIES, copies)
        elif failed:
            gpu, reason = next(iter(failed.items()))
            hosts.note_unread(host, COPIES, f"{gpu}: {reason}")
        elif hosts.facts[host].values.get(_NUM_GPUS):
            hosts.note_unread(host, COPIES, _why_no_gpu(reply))


def _why_no_gpu(reply: Reply) -> str:
    products = reply.values.get("products", {})
    if any(name.startswith("cuda:") for name in products):
        reason = "the host's ronde does not measure it; install this one's version"
    else:
        reason = "torch sees no GPU there"
    failures = (each["failure"] for each in products.values() if "failure" in each)
    return reply.failure or next(failures, reason)


BURN_STEP = ProbeStep("burning", run_burn, (PRODUCTS, COPIES), (_NUM_GPUS,), "burn_s")


@check(Family.CLUSTER, FAIL, PRODUCTS)
def product_checksum(fleet: Fleet) -> Problems:
    """All processors compute the same.

    reads: the checksum of a float64 matrix product on CPUs and GPUs, for --burn's time
    threshold: the same bits everywhere: sums below 2^53 are exact in any order
    source: IEEE 754; large clusters find silent errors by comparing hosts
    fix: Take the host out and test it: dcgmi diag -r 3, memtester, stress-ng --verify
    needs: --burn, torch
    why: A processor that silently computes wrong results spoils the model of all ranks.
    """
    checksums: dict[str, str] = {}
    for host, products in fleet.known(PRODUCTS).items():
        for device, each in products.items():
            if "failure" in each:
                what = f"the product on {device} failed: {each['failure']}"
                yield Problem(what, host=host)
                continue
            checksums[f"{host}\n{device}"] = each["checksum"]
            if each["num_wrong"]:
                what = f"{each['num_wrong']} of {each['num_products']} products on "
                yield Problem(f"{what}{device} differ from the first one", host=host)
    for label, value, usual in find_odd(checksums, of="devices"):
        host, _, device = label.partition("\n")
        what = f"the product on {device} has checksum {value}"
        yield Problem(what, usual=usual, host=host)


def _show_flops(gflop_per_s: float) -> str:
    return f"{gflop_per_s:.3g} GFLOP/s"


_CPU_SPEED = SpeedMeasure("computed at", _show_flops, 0.8, 0.5)
# Nobody else uses a GPU: its speed is steadier than that of CPUs.
_GPU_SPEED = SpeedMeasure("computed at", _show_flops, 0.9, 0.8)


@check(Family.CLUSTER, FAIL, PRODUCTS)
def product_speed(fleet: Fleet) -> Problems:
    """All processors compute as fast under load.

    reads: the speed of that product, of all hosts' CPUs and of GPUs of one model
    threshold: CPUs: 80% of what most hosts reach, below 50% a failure; GPUs: 90% of
        what most of the model reach, below 80% a failure
    source: ronde's own
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
    return fold_devices(slow.items())
