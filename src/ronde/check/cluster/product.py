"""A matrix product again and again, on all processors: a program of its own.

What it has seen it writes at once, a line of JSON each: the products of all, then what
each GPU copies, one after the other and with nothing else at work. The products
are known whatever becomes of the copies.

Note [Exact products]
    The factors hold whole numbers of at most 2^20. A product of two is at most 2^40,
    and a sum of ``size`` of them at most ``size * 2^40``: up to a size of 2^13 that is
    2^53, below which float64 holds every whole number. So no step rounds, in whatever
    order the sums are made, fused or not, in blocks or by threads: all processors and
    libraries give the same bits, and one that does not is broken.
"""

import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import time
from importlib import import_module
from threading import Thread
from typing import Any

from ronde.check.facts import Value
from ronde.check.gpu.copies import measure_gpu
from ronde.launch.process_tree import die_with_parent

# See Note [Exact products].
MAX_SIZE = 1 << 13
Torch = Any
Tensor = Any

# From the 32 bits of a signed number to the 21 of one between -2^20 and 2^20.
_SHIFT = 11
# Products that a GPU is given at once, so that it never waits for this program.
NUM_IN_ROUND = 8
_MAX_REASON_CHARS = 200


def main() -> None:
    """Read seconds, size and seed from the command line; write what was seen."""
    # What asked may be killed, and this computes for long.
    die_with_parent(os.getppid(), signal.SIGKILL)
    seconds, size, seed = json.loads(sys.argv[2])
    try:
        torch: Torch = import_module("torch")
    except ImportError as error:
        _answer({"missing": f"torch cannot be imported there: {error}"})
        return
    factors = [make_factor(torch, size, seed + number) for number in range(2)]
    found: dict[str, dict[str, Value]] = {}

    def compute(device: str) -> None:
        try:
            found[device] = multiply(torch, device, factors, seconds)
            if device != "cpu":
                found[device]["model"] = torch.cuda.get_device_name(device)
        except RuntimeError as error:
            found[device] = {"failure": str(error)[:_MAX_REASON_CHARS]}

    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    computing = [Thread(target=compute, args=(name,)) for name in ("cpu", *gpus)]
    for each in computing:
        each.start()
    for each in computing:
        each.join()
    _answer({"products": found})
    for number, name in enumerate(gpus):
        seen = measure_gpu(torch, number)
        _answer({"copies": {name: seen["copies"]}, "links": {name: seen["link"]}})


def _answer(found: dict[str, Value]) -> None:
    # A line of its own: libraries may have written something before.
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()


def make_factor(torch: Torch, size: int, seed: int) -> Tensor:
    """Return a square matrix in float64, the same for a seed with any torch.

    Raises:
        ValueError: So large a product would not be exact.
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size must be from 1 to {MAX_SIZE}, got {size}")
    drawn = bytearray(random.Random(seed).randbytes(4 * size * size))  # noqa: S311
    numbers = torch.frombuffer(drawn, dtype=torch.int32) >> _SHIFT
    return numbers.to(torch.float64).reshape(size, size)


def multiply(
    torch: Torch, device: str, factors: list[Tensor], seconds: float
) -> dict[str, Value]:
    """Multiply two factors, and again until the time is over.

    Return ``checksum`` of the first product, ``num_products`` behind it, how many of
    them were not like the first (``num_wrong``), and their ``gflop_per_s``.
    """
    left, right = (factor.to(device) for factor in factors)
    first = left @ right
    checksum = sum_up(torch, first)
    num_in_round = 1 if device == "cpu" else NUM_IN_ROUND
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
